"""Faults that others have reported of engines, each with the right outcome: on real ones, and the contract without."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from graphs.briefs import read_text
from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.engines.base import Delta, Engine, Request
from langgraph_pingpong.session import Session
from langgraph_pingpong.trace import Trace
from tests.engines_fixture import DEVICES
from tests.growing_prompts import WRITER
from tests.test_cases import opened

if TYPE_CHECKING:
    from langgraph_pingpong.trace import Event
    from tests.conftest import Lab

TASK = {"task": "Say what a tide pool is."}
NEAR_TIE = 0.1
"""How far apart the log-probabilities of two tokens may be of which rounding chooses."""


@dataclass(eq=False)
class SlowToStart(FakeEngine):
    """Looks whether another engine starts at the same time."""

    at_once = 0
    most = 0

    async def start(self) -> None:
        SlowToStart.at_once += 1
        SlowToStart.most = max(SlowToStart.most, SlowToStart.at_once)
        await asyncio.sleep(0.02)
        SlowToStart.at_once -= 1


class TestTwoEnginesOnOneHost:
    """Case 08: both take the same device, or measure memory while the other takes some."""

    def test_start_one_after_the_other(self) -> None:
        with EnginePool([SlowToStart(f"fake:{n}") for n in range(3)]):
            assert SlowToStart.most == 1

    @pytest.mark.engine
    @pytest.mark.timeout(600)
    def test_leave_this_process_its_environment(self, real_model: ChatPingPong) -> None:
        assert real_model._serving().pool.started
        before = psutil.Process().environ()  # as it was when this process began
        for name in ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
            assert os.environ.get(name) == before.get(name)

    @pytest.mark.engine
    @pytest.mark.timeout(600)
    @pytest.mark.skipif(DEVICES[0].startswith("cuda"), reason="whose GPU a process uses is not to be seen from here")
    def test_have_cores_of_their_own(self, real_model: ChatPingPong) -> None:
        assert real_model._serving().pool.started
        engines: Any = real_model._serving().pool.engines
        cores_of = [each._engine.engine_core.resources.engine_manager.processes for each in engines]
        children = [psutil.Process(process.pid).children() for processes in cores_of for process in processes]
        workers = [p for of_one in children for p in of_one if p.name().startswith("VLLM::Worker")]
        cores = [set(worker.cpu_affinity()) for worker in workers]
        assert len(cores) == len(DEVICES)
        assert not set.intersection(*cores)


class RealSubject:
    """The first of two real engines, and a prompt of several hundred tokens."""

    def __init__(self, model: ChatPingPong) -> None:
        serving = model._serving()
        self.pool: EnginePool = serving.pool
        self.engine: Engine = self.pool.engines[0]
        ask = f"{read_text('documents/bakery_oven.md')[:1200]}\n\nName one flaw of this text."
        self.ids = tuple(serving.template.prompt_ids([{"role": "user", "content": ask}]))
        self.encode = serving.template.encode

    def request(self, **sampling: Any) -> Request:
        return Request(self.ids, {"temperature": 0.0, "max_tokens": 16, "logprobs": 2, "ignore_eos": True, **sampling})

    async def answer(self, request: Request | None = None) -> list[Delta]:
        return [delta async for delta in self.engine.generate(request or self.request())]

    async def warm(self) -> None:
        """As an edge does: growing prefixes, in no round sizes."""
        for part in (100, 231, len(self.ids) - 20):
            await self.engine.prefill(Request(self.ids[:part]))


@pytest.fixture
def subject(real_model: ChatPingPong) -> RealSubject:
    real_model.reset_prefix_cache()
    return RealSubject(real_model)


async def idle(engine: Engine) -> None:
    for _ in range(2000):
        if not engine.num_unfinished:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{engine.device} is still busy")


def tokens(said: Sequence[Delta]) -> list[int]:
    return [token for delta in said for token in delta.token_ids]


def check_same_answer(cold: Sequence[Delta], other: Sequence[Delta]) -> None:
    """Equal, or apart from a token on where two were as good as equally likely."""
    assert other[0].prompt_token_ids == cold[0].prompt_token_ids
    pairs = zip(tokens(cold), tokens(other), strict=True)
    differing = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
    if differing is not None:
        (_, best), (_, second) = [each for delta in cold for each in delta.logprobs][differing].top[:2]
        assert best - second < NEAR_TIE, "a wrong hit in the cache"


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestWarmAndCold:
    """Case 13: what was cached before, or runs beside it, changes an answer at temperature 0."""

    def test_answers_are_the_same(self, subject: RealSubject) -> None:
        async def warmed() -> list[Delta]:
            await subject.warm()
            return await subject.answer()

        cold = subject.pool.loop.run(subject.answer())
        assert cold[0].num_cached_tokens == 0
        subject.pool.loop.run(subject.engine.reset_prefix_cache())
        warm = subject.pool.loop.run(warmed())
        assert warm[0].num_cached_tokens >= len(subject.ids) - 20 - subject.engine.block_size
        assert tokens(warm) == tokens(cold)
        check_same_answer(cold, warm)

    def test_answers_are_the_same_beside_eight_others(self, subject: RealSubject) -> None:
        async def under_load() -> list[Delta]:
            await subject.warm()
            texts = [f"Count from {n} to twenty, in words." for n in range(8)]
            asked = [Request(tuple(subject.encode(text)), {"max_tokens": 40, "ignore_eos": True}) for text in texts]
            async with asyncio.TaskGroup() as others:
                for request in asked:
                    others.create_task(subject.answer(request))
                await asyncio.sleep(0.1)
                assert subject.engine.num_unfinished == len(asked)
                return await subject.answer()

        cold = subject.pool.loop.run(subject.answer())
        subject.pool.loop.run(subject.engine.reset_prefix_cache())
        check_same_answer(cold, subject.pool.loop.run(under_load()))

    def test_answers_are_the_same_after_one_that_a_stop_text_ended(self, subject: RealSubject) -> None:
        async def after_a_stop() -> tuple[list[Delta], list[Delta]]:
            stopped = await subject.answer(subject.request(stop=[first_word]))
            return stopped, await subject.answer()

        cold = subject.pool.loop.run(subject.answer())
        first_word = "".join(delta.text for delta in cold).split()[1]
        subject.pool.loop.run(subject.engine.reset_prefix_cache())
        stopped, after = subject.pool.loop.run(after_a_stop())
        assert stopped[-1].finish_reason == "stop"
        assert after[0].num_cached_tokens > 0
        check_same_answer(cold, after)


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestWholeBlocks:
    """Case 12: on a real engine, whose own block size counts."""

    def test_an_edge_sends_what_a_real_engine_finds_again(self, real_model: ChatPingPong) -> None:
        pool = real_model._serving().pool
        real_model.reset_prefix_cache()
        block = pool.engines[1].block_size
        events: list[Event] = []
        trace = Trace()
        trace.subscribe(events.append)

        async def grow() -> int | None:
            run, lease = Session(pool, 0), pool.lease(0)
            edge = opened(run, lease, trace)
            for size in (block * 6 + 4, block * 6 + 9, block * 7 - 1, block * 7):
                edge.feed(WRITER, str(size))
                await asyncio.sleep(0)
                await idle(pool.engines[1])
            edge.drop("end of test")
            await edge.stopped()
            lease.release()
            request = Request(tuple(range(block * 7 + 5)), {"max_tokens": 1})
            (said,) = [delta async for delta in pool.engines[1].generate(request)]
            return said.num_cached_tokens

        assert pool.loop.run(grow()) == block * 7
        assert [event.data["tokens"] for event in events if event.name == "append.started"] == [block * 6, block * 7]


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestAnswersOfReal:
    """Cases 19 and 21: on calls that were prefilled, whatever is asked of them."""

    @staticmethod
    def chain(lab: Lab, model: ChatPingPong, **critic: Any) -> tuple[Any, list[Any]]:
        """A writer, and a critic with more arguments; also the messages it gets, the last of them no made-up ones."""
        heard: list[Any] = []
        writes = {"critic": lambda answer: (heard.append(answer), {"critic": answer.text})[1]}
        graph = lab.chain(model.bind(max_tokens=64, ignore_eos=True), writes=writes)
        graph.nodes["critic"].bound.model = model.bind(max_tokens=12, **critic)
        return graph, heard

    def test_one_that_ends_at_once_is_an_empty_message_and_disturbs_nobody(
        self, lab: Lab, real_model: ChatPingPong
    ) -> None:
        template = real_model._serving().template
        end = template.tokenizer.eos_token_id
        graph, heard = self.chain(lab, real_model, logit_bias={end: 100.0})
        record = lab.record(real_model)

        async def among_others() -> list[Any]:
            others = [real_model.ainvoke(f"Count to {n}.", max_tokens=16) for n in (5, 6, 7, 8)]
            return await asyncio.gather(graph.ainvoke(TASK), *others)

        state, *others = asyncio.run(among_others())
        assert state["critic"] == ""
        assert heard[-1].response_metadata["finish_reason"] == "stop"
        assert record.certificate("critic")["upstream"] == "writer"
        assert [message.usage_metadata["output_tokens"] for message in others] == [16] * 4

    def test_stop_texts_several_answers_and_logprobs_go_with_a_prefill(
        self, lab: Lab, real_model: ChatPingPong
    ) -> None:
        off, _ = self.chain(lab, real_model.model_copy(update={"overlap": "off"}))
        plain = off.invoke(TASK)
        word = plain["critic"].split()[2]
        graph, heard = self.chain(lab, real_model, stop=[word], logprobs=True, top_logprobs=2)
        record = lab.record(real_model)
        assert graph.invoke(TASK)["critic"] == plain["critic"][: plain["critic"].index(word)]
        certificate = record.certificate("critic")
        assert certificate["streamed"] > 0
        assert len(heard[-1].response_metadata["logprobs"]["content"]) == heard[-1].usage_metadata["output_tokens"]
        several = {"n": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        off, _ = self.chain(lab, real_model.model_copy(update={"overlap": "off"}), **several)
        graph, _ = self.chain(lab, real_model, **several)
        assert graph.invoke(TASK) == off.invoke(TASK)
        assert record.certificate("critic")["output_tokens"] == 24


@dataclass(eq=False)
class Instant(FakeEngine):
    """Costs its loop next to nothing: what the loop does is the package's own work."""

    async def prefill(self, request: Request) -> int:
        self.prefills.append(request)
        await asyncio.sleep(0.001)
        return 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        self.requests.append(request)
        first = Delta(prompt_token_ids=request.prompt_token_ids, num_cached_tokens=0)
        for number in range(256):
            await asyncio.sleep(0.001)
            yield replace(first, text=" word", token_ids=(7,), finish_reason="stop" if number == 255 else None)
            first = Delta()


class TestLongPrompts:
    """Case 23: prefilling a long prompt stalls the event loop that the answers run on."""

    STALL_S = 0.020

    def test_take_no_step_of_the_loop_longer_than_20_ms(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """In processor time of the loop's own thread, so that other processes do not count."""
        model = lab.model([lab.engine(f"fake:{n}", kind=Instant) for n in range(2)])
        record = lab.record(model)
        filler = "The tide pool is cold, and the crab is quick. " * 400
        prompts = {"critic": lambda state: [("system", filler), ("human", f"{state['writer']}\n\nGo on.")]}
        graph = lab.chain(model, prompts=prompts)
        graph.invoke(TASK)  # what happens once only
        steps: list[float] = []
        original = asyncio.Handle._run  # type: ignore[attr-defined]

        def measured(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            original(handle)
            if threading.current_thread() is model.pool.loop._thread:
                steps.append(time.thread_time() - started)

        monkeypatch.setattr(asyncio.Handle, "_run", measured)
        graph.invoke(TASK)
        certificate = record.certificate("critic")
        assert certificate["prompt_tokens"] > 16_000
        assert certificate["streamed"] > 1000
        assert len(steps) > 500
        assert max(steps) < self.STALL_S
