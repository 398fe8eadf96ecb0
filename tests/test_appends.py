"""Prompts that grow on an engine: what they may hold, when they are closed, and that edges do without them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.engines import vllm_appends
from langgraph_pingpong.engines.base import Delta, Request, TokenLogprob
from langgraph_pingpong.engines.fake_engine import FakeAppends
from langgraph_pingpong.engines.vllm_appends import AHEAD, AppendsBook, VllmAppends, are_sound
from langgraph_pingpong.errors import CallRefused, EngineDead
from langgraph_pingpong.kv_budget import BRANCH_SHARE, PULL_SHARE, KvBudget
from langgraph_pingpong.pool import Lease
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Lab

LIMIT = 1000


@dataclass
class Stream:
    """Stands for vLLM: gives an output for each piece, while `works`."""

    works: bool = True
    error: Exception | None = None
    pieces: int = 0
    closed: bool = False

    async def __call__(self, pieces: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        try:
            async for _ in pieces:
                self.pieces += 1
                if self.error is not None:
                    raise self.error
                if not self.works:
                    await asyncio.Event().wait()
                yield SimpleNamespace(num_cached_tokens=0)
        finally:
            self.closed = True


@dataclass(eq=False)
class HeldAnswers(FakeEngine):
    """The answer to one request has no token before it is let go."""

    asked: threading.Event = field(default_factory=threading.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        if request.request_id == "held":
            self.asked.set()
            await self.held.wait()
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta


@pytest.fixture(autouse=True)
def streaming_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's class for a piece, so that these tests run without vLLM."""
    module = ModuleType("vllm.engine.protocol")
    module.StreamingInput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.engine"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.engine.protocol", module)


def opened(book: AppendsBook, stream: Stream | None = None) -> VllmAppends:
    appends = book.open(stream or Stream(), None, LIMIT)
    assert appends is not None
    return appends


class TestAppendsBook:
    async def test_opens_no_more_than_it_may(self) -> None:
        book = AppendsBook(KvBudget(10_000, LIMIT), max_open=2)
        first = opened(book)
        opened(book)
        assert book.open(Stream(), None, LIMIT) is None
        await first.close()
        assert opened(book)
        await book.close()
        assert len(book) == 0

    async def test_closes_the_one_used_least_recently_where_the_share_is_full(self) -> None:
        book = AppendsBook(KvBudget(1000, LIMIT), max_open=10)
        one, two, three = (opened(book) for _ in range(3))
        for each in (one, two):
            assert await each.append(range(300)) == 0
        assert await one.append(range(100)) == 300  # used last, and 700 tokens are held
        assert await three.append(range(300)) == 0  # 1000 would be over 850
        assert [await each.append(range(16)) for each in (one, two, three)] == [400, None, 300]
        assert book.held == 732
        await book.close()

    async def test_closes_prompts_when_answers_need_the_room(self) -> None:
        book = AppendsBook(KvBudget(1000, LIMIT), max_open=10)
        one, two = opened(book), opened(book)
        for each in (one, two):
            await each.append(range(400))
        with book.answer(300, 0):
            await asyncio.sleep(0)
            assert [await each.append(range(16)) for each in (one, two)] == [None, 400]
            assert book.budget.room == 700
            with book.answer(2000, 0):  # more than there is: nobody may hold anything
                assert await two.append(range(16)) is None
        assert (book.held, book.budget.room) == (0, 850)

    async def test_keeps_room_for_an_answer_as_it_grows(self) -> None:
        book = AppendsBook(KvBudget(100_000, LIMIT), max_open=2)
        with book.answer(prompt=500, longest=60_000) as reach:
            assert book.budget.answering == 500 + 2 * AHEAD
            reach(AHEAD - 1)
            assert book.budget.answering == 500 + 2 * AHEAD
            reach(AHEAD)
            assert book.budget.answering == 500 + 3 * AHEAD
            reach(59_999)
            assert book.budget.answering == 60_500
        with book.answer(prompt=500, longest=16):
            assert book.budget.answering == 516
        assert book.budget.answering == 0

    async def test_one_that_was_never_used_is_closed_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_appends, "IDLE_S", 0.02)
        book = AppendsBook(KvBudget(1000, LIMIT), max_open=1)
        opened(book)
        await asyncio.sleep(0.1)
        assert len(book) == 0

    async def test_one_that_alone_is_too_large_is_not_computed(self) -> None:
        book = AppendsBook(KvBudget(500, LIMIT), max_open=2)
        stream = Stream()
        assert await opened(book, stream).append(range(600)) is None
        assert (stream.pieces, len(book)) == (0, 0)

    async def test_counts_pieces_under_way(self) -> None:
        book = AppendsBook(KvBudget(1000, LIMIT), max_open=2)
        appends = opened(book, Stream(works=False))
        assert book.computing == 0
        piece = asyncio.create_task(appends.append(range(32)))
        await asyncio.sleep(0.01)
        assert book.computing == 1
        await appends.close()
        assert (await piece, book.computing, len(book)) == (None, 0, 0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "append", "answer", "end", "anchor", "release", "pull", "read", "guess", "drop"]),
        st.integers(0, 7),
        st.integers(1, 400),
    ),
    max_size=40,
)


class TestBudget:
    @given(steps, st.floats(0.05, 1.0), st.integers(200, 2000))
    def test_is_never_exceeded(self, doing: list[tuple[str, int, int]], ratio: float, capacity: int) -> None:
        asyncio.run(self.obeyed(doing, KvBudget(capacity, 200, ratio)))

    async def obeyed(self, doing: list[tuple[str, int, int]], budget: KvBudget) -> None:
        """Whatever opens, grows, answers, is anchored or read: all that is held fits, and the longest answer."""
        book, answers = AppendsBook(budget, 8), list[Any]()
        for what, which, size in doing:
            self.claim(what, size, budget)
            await self.do(what, which, size, book, answers)
            assert book.held == budget.prompts
            assert sum(each.held for each in book._open) == book.held + budget.anchored <= budget.share - budget.pulled
            assert budget.anchored <= budget.anchor_cap
            assert budget.pulled <= budget.capacity * PULL_SHARE
            assert budget.branches <= budget.capacity * BRANCH_SHARE
            assert not budget.anchored or budget.anchored + budget.longest <= budget.capacity
            assert not book.held or book.held + budget.anchored + budget.answering <= budget.capacity
            assert len(book) <= 8
        for answer in answers:
            answer.__exit__(None, None, None)
        await book.close()
        assert (book.held, budget.prompts, budget.answering) == (0, 0, 0)

    def claim(self, what: str, size: int, budget: KvBudget) -> None:
        """A pull begins, or the prompt of a branch candidate: never into what others hold; and their ends."""
        match what:
            case "pull" if budget.may_pull(size):
                budget.pulled += size
                assert budget.held <= budget.share
            case "guess" if budget.may_branch(size):
                budget.branches += size
                assert budget.held <= budget.share
            case "read":
                budget.pulled = max(0, budget.pulled - size)
            case "drop":
                budget.branches = max(0, budget.branches - size)

    async def do(self, what: str, which: int, size: int, book: AppendsBook, answers: list[Any]) -> None:
        of_kind = {keep: [each for each in book._open if each.keep is keep] for keep in (False, True)}
        match what:
            case "open":
                book.open(Stream(), None, 10_000)
            case "append" if prompts := of_kind[False]:
                await prompts[which % len(prompts)].append(range(size))
            case "answer" if len(answers) < 4:
                answers.append(book.answer(size // 2, 200 - size // 2))
                answers[-1].__enter__()
            case "end" if answers:
                answers.pop(which % len(answers)).__exit__(None, None, None)
            case "anchor" if book.budget.anchored + size <= book.budget.anchor_cap:
                await self.anchor(size, book)
            case "release" if kept := of_kind[True]:
                book.budget.anchored -= kept[which % len(kept)].held
                await kept[which % len(kept)].close()

    async def anchor(self, size: int, book: AppendsBook) -> None:
        """As `Anchors` does: what it asks for counts at once, and is taken when pulls leave the room."""
        book.budget.anchored += size
        opened = book.open(Stream(), None, 10_000, keep=True) if book.budget.anchors_fit else None
        if opened is None:
            book.budget.anchored -= size
        else:
            await opened.append(range(size))


class TestVllmAppends:
    async def test_is_closed_when_it_was_idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_appends, "IDLE_S", 0.05)
        book, stream = AppendsBook(KvBudget(1000, LIMIT), 2), Stream()
        appends = opened(book, stream)
        for _ in range(3):
            assert await appends.append(range(16)) is not None
            await asyncio.sleep(0.03)
        await asyncio.sleep(0.1)
        assert stream.closed
        assert await appends.append(range(16)) is None

    async def test_is_closed_by_a_cancelled_append(self) -> None:
        book, stream = AppendsBook(KvBudget(1000, LIMIT), 2), Stream(works=False)
        appends = opened(book, stream)
        piece = asyncio.create_task(appends.append(range(16)))
        await asyncio.sleep(0.01)
        piece.cancel()
        await asyncio.wait([piece])
        assert piece.cancelled()
        await appends.close()
        assert stream.closed

    async def test_hands_on_what_goes_wrong(self) -> None:
        appends = opened(AppendsBook(KvBudget(1000, LIMIT), 2), Stream(error=EngineDead("killed")))
        with pytest.raises(EngineDead, match="killed"):
            await appends.append(range(16))
        assert await appends.append(range(16)) is None

    async def test_refuses_a_prompt_that_leaves_no_room(self) -> None:
        appends = opened(AppendsBook(KvBudget(10_000, LIMIT), 2))
        await appends.append(range(900))
        with pytest.raises(CallRefused, match="1000 tokens"):
            await appends.append(range(100))
        await appends.close()


class Unsound(FakeEngine):
    """An engine whose growing prompts fill the cache with something else."""

    fault = ""

    def open_appends(self, cache_salt: str | None = None, *, keep: bool = False) -> FakeAppends | None:
        opened = super().open_appends(f"wrong {cache_salt}" if self.fault == "not found" else cache_salt)
        if opened is None or self.fault != "hangs":
            return opened
        self.prefill_gate = asyncio.Event()
        return opened

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                cached = self.fault == "other content" and (delta.num_cached_tokens or 0) > 0
                sampled = TokenLogprob("a", -1.0, (("a", -2.0 if cached else -1.0),))
                yield replace(delta, logprobs=(sampled,))


class TestSelfTest:
    @pytest.mark.parametrize(
        ("fault", "sound"), [("", True), ("not found", False), ("other content", False), ("hangs", False)]
    )
    def test_tells_sound_from_unsound(self, monkeypatch: pytest.MonkeyPatch, fault: str, sound: bool) -> None:
        monkeypatch.setattr(vllm_appends, "TRY_S", 0.2)
        engine = Unsound()
        engine.fault = fault
        with EnginePool([engine]) as pool:
            assert pool.loop.run(are_sound(engine)) is sound
            assert engine.num_unfinished == 0
            assert engine.appends == []

    @pytest.mark.parametrize("max_model_len", [40, 66, 67])
    def test_a_context_too_short_to_try_does_without(self, max_model_len: int) -> None:
        with EnginePool([Unsound(max_model_len=max_model_len)]) as pool:
            assert pool.loop.run(are_sound(pool.engines[0])) is (max_model_len > 66)

    def test_an_engine_without_them_is_not_sound(self) -> None:
        engine = Unsound(takes_appends=False)
        with EnginePool([engine]) as pool:
            assert pool.loop.run(are_sound(engine)) is False


class TestEdges:
    """Edges give the same, whether their prompts are open, closed in mid-run, or sent as whole prefixes."""

    @pytest.mark.parametrize("kind", ["open", "closed in mid-run", "none"])
    def test_prefill_the_same(self, lab: Lab, kind: str) -> None:
        model = lab.model(speed={"takes_appends": kind != "none"})
        record = lab.record(model)
        if kind == "closed in mid-run":
            model.trace.subscribe(_after_appends(2, lambda: [each.let_go() for each in lab.engines[1].appends[:]]))
        graph = lab.chain(model)
        result = graph.invoke({"task": "Say what a tide pool is."})
        assert result == lab.chain(lab.model(overlap="off")).invoke({"task": "Say what a tide pool is."})
        critic = record.certificate("critic")
        assert critic["static"] + critic["streamed"] > 0.7 * critic["prompt_tokens"]
        assert (critic["wasted"], critic["fallback"], critic["cached"] > 100) == (0, None, True)
        assert critic["appends"] > 2
        assert [engine.appends for engine in lab.engines] == [[], []]

    def test_send_pieces_where_the_device_has_other_work(self, lab: Lab) -> None:
        engines = [lab.engine("fake:0", piece_tokens=64), lab.engine("fake:1", piece_tokens=64)]
        model = lab.model(engines)
        sizes = self.sizes_of_appends(lab, model, engines, "somebody else's request")
        assert max(sizes) == 64
        engines = [lab.engine("fake:0", piece_tokens=64), lab.engine("fake:1", piece_tokens=64)]
        assert max(self.sizes_of_appends(lab, lab.model(engines), engines, "")) > 64

    def test_wait_while_a_call_on_the_device_waits_for_its_first_token(self, lab: Lab) -> None:
        held_up = HeldAnswers("fake:1", tokenizer=lab.engine().tokenizer, time_scale=1.0)
        model = lab.model([lab.engine("fake:0"), held_up])
        record = lab.record(model)

        async def ask() -> None:
            lease = model.pool.lease(1)
            async with aclosing(lease.generate(Request((1, 2, 3), request_id="held"))) as deltas:
                await anext(deltas)
            lease.release()

        with ThreadPoolExecutor() as threads:
            held = threads.submit(model.pool.loop.run, ask())
            assert held_up.asked.wait(5)
            running = threads.submit(lab.chain(model).invoke, {"task": "Say what a tide pool is."})
            try:
                wait_until(lambda: record.named("finish", "writer"), 5, "the upstream's answer")
                assert not record.named("append.started"), "the call that waits goes first"
            finally:
                model.pool.loop.call_soon(held_up.held.set)
            held.result(5)
            running.result(5)

    @pytest.mark.parametrize(("piece_tokens", "order"), [(64, "first, append, end"), (0, "first, end, append")])
    def test_go_on_at_its_first_token_or_where_steps_carry_nothing_at_its_end(
        self, piece_tokens: int, order: str
    ) -> None:
        engine = HeldAnswers(piece_tokens=piece_tokens)
        with EnginePool([engine]) as pool:
            assert ", ".join(pool.loop.run(self.order_of_events(pool.lease(0), engine))) == order

    async def order_of_events(self, lease: Lease, engine: HeldAnswers) -> list[str]:
        order: list[str] = []
        answer = lease.generate(Request((1, 2, 3), request_id="held"))
        first = asyncio.create_task(anext(answer))
        await asyncio.wait([first], timeout=0.01)
        append = asyncio.create_task(lease.answers_went_first())
        append.add_done_callback(lambda _: order.append("append"))
        await asyncio.wait([append], timeout=0.01)
        engine.held.set()
        await first
        order.append("first")
        await asyncio.wait([append], timeout=0.01)
        await answer.aclose()
        order.append("end")
        await append
        return order

    def sizes_of_appends(self, lab: Lab, model: ChatPingPong, engines: list[FakeEngine], other: str) -> list[int]:
        record = lab.record(model)
        engines[1].running.update({other} - {""})
        lab.chain(model).invoke({"task": "Say what a tide pool is."})
        engines[1].running.clear()
        ends = [0, *(event.data["tokens"] for event in record.named("append.started", "critic"))]
        return [after - before for before, after in pairwise(ends)]


def _after_appends(count: int, act: Callable[[], object]) -> Callable[[Any], None]:
    seen: list[Any] = []

    def look(event: Any) -> None:
        seen.append(event)
        if sum(each.name == "append.complete" for each in seen) == count and event.name == "append.complete":
            act()

    return look
