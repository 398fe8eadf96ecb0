"""Pool, session and streaming edges in any order of events: what always holds, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from langgraph_pingpong import EnginePool, FakeEngine
from langgraph_pingpong.certificate import Certificate
from langgraph_pingpong.engines.base import Delta, Request, Said
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.growing_prompt import CallKey, GrowingPrompt, Segment, Stream, common_prefix
from langgraph_pingpong.placement import CLEARLY_FEWER
from langgraph_pingpong.pool import Lease
from langgraph_pingpong.session import Call, Session
from langgraph_pingpong.streaming_edge import UNCLAIMED_AFTER_S, Upcoming
from langgraph_pingpong.tokens import ChatTemplate
from tests.conftest import leases_on

T = TypeVar("T")


@cache
def template() -> ChatTemplate:
    return ChatTemplate(fake_tokenizer())


class PoolMachine(RuleBasedStateMachine):
    """Places are reserved and given back in any order, some of them twice."""

    leases: Bundle[Lease] = Bundle("leases")

    @initialize(size=st.integers(1, 5))
    def make(self, size: int) -> None:
        self.pool = EnginePool([FakeEngine(f"fake:{n}", tokenizer=template().tokenizer) for n in range(size)])
        self.held: list[Lease] = []

    def loads(self) -> list[int]:
        """What the leases that are held add up to, by engine."""
        return [sum(lease.index == n for lease in self.held) for n in range(len(self.pool.engines))]

    @rule(target=leases, preferred=st.integers(-3, 12))
    def reserve(self, preferred: int) -> Lease:
        before, turn = self.loads(), preferred % len(self.pool.engines)
        lease = self.pool.lease(preferred)
        if lease.index != turn:
            assert before[lease.index] + CLEARLY_FEWER <= before[turn]
        return self.hold(lease)

    @rule(target=leases, upstream=leases, ahead=st.integers(1, 4))
    def reserve_ahead(self, upstream: Lease, ahead: int) -> Lease:
        lease = self.pool.lease_ahead(upstream, ahead)
        if len(self.pool.engines) == 1:
            assert lease is None
        if lease is None:
            return upstream
        assert lease.index != upstream.index
        return self.hold(lease)

    @rule(target=leases, upstream=leases)
    def reserve_beside(self, upstream: Lease) -> Lease:
        lease = self.pool.lease_beside(upstream)
        assert lease is not None
        assert lease.index == upstream.index
        return self.hold(lease)

    @rule(target=leases)
    def reserve_for_a_run(self) -> Lease:
        before = self.loads()
        lease = self.pool.lease(self.pool.start_of_run())
        assert before[lease.index] == min(before)
        return self.hold(lease)

    def hold(self, lease: Lease) -> Lease:
        self.held.append(lease)
        return lease

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        """It may have been given back before."""
        lease.release()
        if lease in self.held:
            self.held.remove(lease)

    @invariant()
    def loads_are_the_leases_that_are_held(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool._placement.leases == self.loads()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


NODES = ("a", "b", "c", "d")
"""They may call the model in any order, over and over, as in a loop. The prompt of each begins with its name."""

TEXTS = ("", "One.", "The tide is in. ", "Two words", "A longer answer, which fills a block or two.", "\nx\n")
BLOCK = 4


def key_of(node: str) -> CallKey:
    return CallKey((node,))


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(template().encode(text))


class ModelledLoop(asyncio.SelectorEventLoop):
    """Its clock stands still until a test moves it."""

    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass
class Speaking:
    """A call whose answer is under way."""

    call: Call
    deltas: AsyncGenerator[tuple[Delta, Said, Certificate | None]]
    said: str = ""


@dataclass
class Foreseen:
    """A prompt that an edge was opened for, and the answers that it will hold, as far as they are known by now."""

    row: list[Segment]
    answers: dict[str, str]
    sure: bool = True
    """Whether no node that it quotes has spoken twice."""

    @property
    def ids(self) -> tuple[int, ...]:
        return ids_of("".join(s if isinstance(s, str) else self.answers.get(s.call.node, "?") for s in self.row))


class SessionMachine(RuleBasedStateMachine):
    """One run on two engines: calls begin, speak, end, fail and are left; edges open on them, rightly and wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = ModelledLoop()
        self.replies: dict[tuple[int, ...], str] = {}
        self.engines = [FakeEngine(f"fake:{n}", template().tokenizer, self.reply, BLOCK) for n in range(2)]
        self.pool = EnginePool(self.engines)
        self.session = Session(self.pool, 0)
        self.speaking: dict[str, Speaking] = {}
        self.answers: dict[str, str] = {}  # the last of each node, in full also where it still speaks
        self.foreseen: dict[str, list[Foreseen]] = {node: [] for node in NODES}
        self.prefilled: set[tuple[int, ...]] = set()
        self.step = 0

    def reply(self, prompt: str) -> str:
        """One answer to a prompt, also where it is begun before its call."""
        return self.replies.setdefault(ids_of(prompt), "Begun ahead.")

    def run(self, work: Awaitable[T]) -> T:
        """Run something on the modelled loop, and whatever follows from it without time going by."""

        async def settled() -> T:
            working = asyncio.ensure_future(work)
            for turn in range(200):
                if working.done() and turn > 40:
                    return working.result()
                await asyncio.sleep(0)
            working.cancel()
            raise AssertionError("it waits for something that does not come")

        return self.loop.run_until_complete(settled())

    # -- what may happen ---------------------------------------------------------------------------------------

    @rule(
        node=st.sampled_from(NODES),
        answer=st.sampled_from(TEXTS),
        follow=st.lists(st.sampled_from(NODES), max_size=3, unique=True),
        reads=st.lists(st.sampled_from(NODES), max_size=2, unique=True),
        as_foreseen=st.booleans(),
        in_step=st.booleans(),
        defer=st.booleans(),
        sampling=st.sampled_from([None, {"max_tokens": 60}, {"max_tokens": 61}, {}]),
    )
    def begin(
        self,
        node: str,
        answer: str,
        follow: list[str],
        reads: list[str],
        as_foreseen: bool,
        in_step: bool,
        defer: bool,
        sampling: Mapping[str, Any] | None,
    ) -> None:
        """A node calls the model, as was foreseen or not, and foresees calls of other nodes."""
        if node in self.speaking:
            return
        self.step += 1
        known = self.foreseen[node][-1:] if as_foreseen else []
        prompt = known[0].ids if known else ids_of(f"{node} in step {self.step} is asked something else. Go on.")
        self.note_answer(node, self.replies.setdefault(prompt, answer))

        async def plan() -> list[Upcoming]:
            expected = self.step + 1 if in_step else None
            return [self.foresee(each, [node, *reads], expected, sampling) for each in follow if each != node]

        call = Call(Request(prompt, {"max_tokens": 60}), key_of(node), self.step, plan, defer)
        self.speaking[node] = Speaking(call, self.session.answer(call))
        self.say(node)

    def note_answer(self, node: str, answer: str) -> None:
        self.answers[node] = answer
        for each in (each for prompts in self.foreseen.values() for each in prompts):
            if any(isinstance(s, Stream) and s.call == key_of(node) for s in each.row):
                each.sure = each.sure and node not in each.answers
                each.answers.setdefault(node, answer)

    def foresee(
        self, node: str, reads: Sequence[str], step: int | None, sampling: Mapping[str, Any] | None
    ) -> Upcoming:
        row: list[Segment] = [f"{node} reads: "]
        for each in dict.fromkeys(reads):
            row += [Stream(key_of(each)), f" (said {each}) "]
        row.append("Go on.<|im_end|>\n<|im_start|>assistant\n")
        answers = {each: self.answers[each] for each in reads if each in self.answers}
        self.foreseen[node].append(Foreseen(row, answers))
        return Upcoming(key_of(node), step, "declared", GrowingPrompt(template(), row), sampling)

    @rule(node=st.sampled_from(NODES))
    def say(self, node: str) -> None:
        """One delta more, or the end of the call behind its last."""
        if (one := self.speaking.get(node)) is None:
            return
        try:
            delta, _, certificate = self.run(anext(one.deltas))
        except StopAsyncIteration:
            del self.speaking[node]
            assert one.said == self.answers[node]
            return
        one.said += delta.text
        if certificate is not None:
            self.check(certificate, one.call)

    @rule(node=st.sampled_from(NODES))
    def finish(self, node: str) -> None:
        while node in self.speaking:
            self.say(node)

    @rule(node=st.sampled_from(NODES))
    def leave(self, node: str) -> None:
        """The caller is cancelled, or closes the stream."""
        if (one := self.speaking.pop(node, None)) is not None:
            self.run(one.deltas.aclose())
            running = self.engines[0].running | self.engines[1].running
            assert not running & {each.request_id for each in self.asked(one)}, "nobody waits for it"

    @rule(node=st.sampled_from(NODES))
    def break_off(self, node: str) -> None:
        """The engine fails this call."""
        if (one := self.speaking.pop(node, None)) is None:
            return
        for engine in self.engines:
            engine.fail_generate = RuntimeError("lost")
        with contextlib.suppress(RuntimeError):
            while True:
                try:
                    self.run(anext(one.deltas))
                except StopAsyncIteration:
                    break
        for engine in self.engines:
            engine.fail_generate = None

    @rule(number=st.integers(0, 1), hold=st.booleans())
    def hold_prefills(self, number: int, hold: bool) -> None:
        """Prefills take longer than anything else, until they are let go."""
        gate = self.engines[number].prefill_gate
        if hold and gate is None:
            self.engines[number].prefill_gate = asyncio.Event()
        elif not hold and gate is not None:
            self.engines[number].prefill_gate = None
            gate.set()
            self.run(asyncio.sleep(0))

    @rule(number=st.integers(0, 1), fail=st.booleans())
    def fail_prefills(self, number: int, fail: bool) -> None:
        self.engines[number].fail_prefill = OSError("no blocks left") if fail else None

    @rule(seconds=st.sampled_from([1.0, UNCLAIMED_AFTER_S / 2, UNCLAIMED_AFTER_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.loop.now += seconds
        self.run(asyncio.sleep(0))
        if seconds > UNCLAIMED_AFTER_S:
            for edge in self.session._edges.values():
                assert {key.node for key in edge.upstreams} & self.speaking.keys(), "nobody claimed it"

    @rule()
    def graph_ends(self) -> None:
        self.session.close()
        self.run(asyncio.sleep(0))
        assert self.session._edges == {}

    # -- what always holds -------------------------------------------------------------------------------------

    def check(self, certificate: Certificate, call: Call) -> None:
        """What the certificate says of a prompt is so."""
        ids = call.request.prompt_token_ids
        assert certificate.ids_equal
        assert certificate.prompt_tokens == len(ids)
        right = certificate.static + certificate.streamed
        self.look_at_prefills()
        if certificate.ready:
            assert right == len(ids)
            return
        assert right <= max((common_prefix(each, ids) for each in self.prefilled), default=0)
        assert certificate.cached is not None
        assert certificate.cached >= min(right, len(ids) - 1) // BLOCK * BLOCK
        assert certificate.wasted >= 0

    @invariant()
    def leases_are_the_open_edges_and_answers(self) -> None:
        assert leases_on(self.pool) == len(self.session._edges) + len(self.speaking)

    @invariant()
    def an_edge_has_one_append_under_way_at_most(self) -> None:
        under_way = [r for engine in self.engines for r in engine.prefills if r.request_id in engine.running]
        nodes = [template().tokenizer.decode(r.prompt_token_ids[:1]) for r in under_way]
        assert len(set(nodes)) == len(nodes)
        assert set(nodes) <= {key.node for key in self.session._edges}

    @invariant()
    def what_is_prefilled_begins_a_prompt_that_was_foreseen(self) -> None:
        self.look_at_prefills()

    def look_at_prefills(self) -> None:
        for request in (request for engine in self.engines for request in engine.prefills):
            ids = request.prompt_token_ids
            foreseen = self.foreseen[template().tokenizer.decode(ids[:1])]
            assert any(not each.sure or each.ids[: len(ids)] == ids for each in foreseen)
            assert len(ids) % BLOCK == 0
            self.prefilled.add(ids)
        for engine in self.engines:  # those that were looked at need no second look
            engine.prefills = [request for request in engine.prefills if request.request_id in engine.running]

    @invariant()
    def answers_are_asked_with_the_whole_prompt(self) -> None:
        for one in self.speaking.values():
            assert self.asked(one)

    def asked(self, one: Speaking) -> list[Request]:
        """What the engines were asked for a call; another id than the call's own was begun before it."""
        mine = one.call.request
        everything = [request for engine in self.engines for request in engine.requests]
        return [r for r in everything if (r.prompt_token_ids, r.sampling) == (mine.prompt_token_ids, mine.sampling)]

    def teardown(self) -> None:
        for node in list(self.speaking):
            self.leave(node)
        self.graph_ends()
        assert leases_on(self.pool) == 0
        assert [engine.num_unfinished for engine in self.engines] == [0, 0]
        assert asyncio.all_tasks(self.loop) == set()
        self.pool.close()
        self.loop.close()


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
SessionMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestSession = SessionMachine.TestCase
