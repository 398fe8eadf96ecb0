"""Answers that are begun before their call comes: taken over only where they are the very answer that is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from langgraph_pingpong import EnginePool, FakeEngine
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.evictions import Evictions
from langgraph_pingpong.session import Call, Session
from langgraph_pingpong.speculation import Speculation, Worth
from langgraph_pingpong.streaming_edge import Upcoming
from langgraph_pingpong.tokens import ChatTemplate
from tests.conftest import going_on, wait_until
from tests.growing_prompts import CRITIC, WRITER, growing_with
from tests.shipped_tokenizers import qwen, sentencepiece, smollm2, tekken

if TYPE_CHECKING:
    from tests.conftest import Lab

TASK = {"task": "Say what a tide pool is."}
SLOW_NODE_S = 0.1


class State(TypedDict, total=False):
    task: str
    draft: str
    note: str


def slow_chain(lab: Lab, model: Any, **critic: Any) -> Any:
    """The critic thinks for a while before it calls the model, so that its answer can be begun."""

    def writer(state: State) -> State:
        return {"draft": model.invoke(lab.prompt("writer", "task").format_messages(**state)).text}

    def critique(state: State) -> State:
        time.sleep(SLOW_NODE_S)
        settings = {name: value() for name, value in critic.items()}
        return {"note": model.invoke(lab.prompt("critic", "draft").format_messages(**state), **settings).text}

    builder = StateGraph(State)
    builder.add_node("writer", writer).add_node("critic", critique)
    builder.add_edge(START, "writer").add_edge("writer", "critic")
    return builder.compile()


class TestAnswersBegunAhead:
    def test_are_taken_over_by_the_call(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        graph = slow_chain(lab, model)
        results = [graph.invoke(TASK) for _ in range(3)]
        assert results == [slow_chain(lab, lab.model(overlap="off")).invoke(TASK)] * 3
        ready = [event.data["certificate"]["ready"] for event in record.named("finish", "critic")]
        assert ready[0] == 0
        assert ready[-1] > 0
        last = record.certificate("critic")
        assert (last["ids_equal"], last["wasted"]) == (True, 0)
        assert last["ttft_ms"] >= SLOW_NODE_S * 1000, "the node's own time counts: the answer was there, not asked for"

    def test_are_not_begun_where_they_are_switched_off(self, lab: Lab) -> None:
        model = lab.model(speculate=False)
        record = lab.record(model)
        graph = slow_chain(lab, model)
        for _ in range(3):
            graph.invoke(TASK)
        assert record.named("append.complete", "critic")
        assert not record.named("speculation.started")
        assert record.certificate("critic")["ready"] == 0

    def test_are_aborted_where_the_call_samples_otherwise(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        heat = iter((0.1, 0.2, 0.3))
        graph = slow_chain(lab, model, temperature=lambda: next(heat))
        for _ in range(3):
            graph.invoke(TASK)
        assert len(record.named("speculation.started", "critic")) >= 2
        assert [event.data["certificate"]["ready"] for event in record.named("finish", "critic")] == [0, 0, 0]
        asked = [request.sampling for engine in lab.engines for request in engine.requests]
        assert {sampling["temperature"] for sampling in asked if "temperature" in sampling} == {0.1, 0.2, 0.3}

    def test_leave_a_limit_that_only_fills_the_context_open(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        graph = slow_chain(lab, model)
        for task in ("One.", "Another task, which is longer.", "And a third one."):
            graph.invoke({"task": task})
        assert record.certificate("critic")["ready"] > 0

    def test_are_not_left_to_themselves_where_they_come_too_late(self, lab: Lab) -> None:
        """The upstream's next word comes before their first token: after a few none is begun before the end."""
        model = lab.model(speed={"prefill_speed": 2_000.0}, replies={"writer": "Crabs walk sideways. " * 20})
        record = lab.record(model)
        graph = slow_chain(lab, model)
        graph.invoke(TASK)
        begun = []
        for _ in range(2):
            record.events.clear()
            graph.invoke(TASK)
            spoken = record.events[: record.first("finish", "writer")]
            begun.append(sum(event.name == "speculation.started" for event in spoken))
            assert begun[-1] == sum(event.name == "speculation.dropped" for event in spoken)
        assert 0 < max(begun) <= Worth.TRIES

    def test_are_not_looked_up_block_by_block(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """One may be begun with each word of an upstream, and a prompt has many blocks."""
        looked: list[int] = []
        known = Evictions.computed_before
        monkeypatch.setattr(Evictions, "computed_before", lambda *args: (looked.append(1), known(*args))[1])
        model = lab.model()
        record = lab.record(model)
        graph = slow_chain(lab, model)
        for _ in range(3):
            graph.invoke(TASK)
        assert record.named("speculation.started")
        asked = [event.data["certificate"]["ready"] for event in record.named("finish")]
        assert len(looked) == sum(not ready for ready in asked), "calls that no begun answer served"

    def test_that_fail_leave_the_answer_to_the_call(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        graph = slow_chain(lab, model)
        expected = graph.invoke(TASK)
        assert graph.invoke(TASK) == expected

        def fail(event: Any) -> None:
            engine = lab.engines[int(event.device.endswith("1"))]
            if event.name == "speculation.started" and event.data["ended"]:  # the writer's own answer is complete
                engine.fail_generate, engine.fail_after_tokens = RuntimeError("out of order"), 3
            elif event.name == "finalize":
                engine.fail_generate = None

        with model.trace.subscribed(fail):
            assert graph.invoke(TASK) == expected
        assert record.named("speculation.started", "critic")[-1].data["ended"]
        assert record.named("speculation.dropped", "critic")[-1].data["tokens"] == 3
        assert record.certificate("critic")["ready"] == 0
        assert record.certificate("critic")["ids_equal"]

    @pytest.mark.parametrize("event", ["speculation.started", "finalize", "first_token"])
    @pytest.mark.parametrize("comes_back", [True, False])
    def test_on_a_device_that_dies_leave_the_answer_to_another(self, lab: Lab, event: str, comes_back: bool) -> None:
        engines = [lab.engine(f"fake:{index}", reply=going_on(), decode_speed=400.0) for index in range(2)]
        model = lab.model(engines)
        record = lab.record(model)
        graph = slow_chain(lab, model)
        expected = [graph.invoke(TASK) for _ in range(3)]
        assert record.certificate("critic")["ready"] > 0
        engines[1].fail_restart = None if comes_back else OSError("no such process")

        def die(each: Any) -> None:
            if (each.name, each.node) == (event, "critic"):
                engines[1].die()

        with model.trace.subscribed(die):
            assert graph.invoke(TASK) == expected[0]
        certificate = record.certificate("critic")
        assert certificate["device"] == "fake:0" or comes_back
        assert certificate["ids_equal"]
        assert certificate["output_tokens"] == len(expected[0]["note"])
        assert "died" in certificate["fallback"] or "failed" in certificate["fallback"]
        model.pool.close()

    def test_give_way_to_a_call_on_their_device(self) -> None:
        engines = [FakeEngine(f"fake:{n}", time_scale=1.0, decode_speed=500.0) for n in range(2)]
        with EnginePool(engines) as pool:
            prompt = Request(tuple(range(40)), {"max_tokens": 400})

            async def begin_and_answer() -> None:
                lease = pool.lease(1)
                begun = lease.begin(prompt)
                assert begun is not None
                await asyncio.sleep(0.02)
                assert lease.begin(prompt) is None, "one at a time on a device"
                call = Call(Request((1, 2, 3), {"max_tokens": 3}))
                async for _ in Session(pool, 1).answer(call):
                    pass
                assert engines[1].aborted == [prompt.request_id]
                assert not begun.fits(prompt)
                lease.release()

            pool.loop.run(begin_and_answer())

    def test_switched_off_for_one_model_of_the_pool(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        first, second = slow_chain(lab, model), slow_chain(lab, model.model_copy(update={"speculate": False}))
        for _ in range(2):
            first.invoke(TASK)
        before = len(record.named("speculation.started", "critic"))
        assert before
        for _ in range(3):
            second.invoke(TASK)
        assert record.certificate("critic")["appends"]
        assert len(record.named("speculation.started", "critic")) == before

    def test_wait_for_an_idle_device(self, lab: Lab) -> None:
        engines = [lab.engine("fake:0"), lab.engine("fake:1")]
        engines[1].running.add("somebody else's request")
        busy = lab.model(engines)
        record = lab.record(busy)
        graph = slow_chain(lab, busy)
        for _ in range(3):
            graph.invoke(TASK)
        engines[1].running.clear()
        assert not [event for event in record.named("speculation.started") if event.device == "fake:1"]

    def test_are_aborted_with_the_run(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        graph = slow_chain(lab, model)
        for _ in range(2):
            graph.invoke(TASK)
        begun = len(record.named("speculation.started", "critic"))

        async def leave() -> None:
            run = asyncio.create_task(graph.ainvoke(TASK))
            one_more = lambda: len(record.named("speculation.started", "critic")) > begun  # noqa: E731
            await asyncio.to_thread(wait_until, one_more, 5, "answer that is begun")
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

        asyncio.run(leave())  # the fixture of every test sees that nothing is left on the engines


async def asked_when_the_upstream_ended(pool: EnginePool) -> tuple[Sequence[int] | None, list[Sequence[int]]]:
    """The prompt that is complete when the last of the upstream's answer is given out, and what was sent by then."""
    same_device = len(pool.engines) == 1
    template = ChatTemplate(pool.engines[0].tokenizer)  # type: ignore[attr-defined]
    prompt = growing_with(template, lambda text: [{"role": "user", "content": f"Review this draft.\n\n{text}"}])

    async def plan() -> list[Upcoming]:
        return [Upcoming(CRITIC, None, "declared", prompt, {"max_tokens": 4})]

    request = Request(tuple(template.prompt_ids([{"role": "user", "content": "Write."}])), {"max_tokens": 60})
    session = Session(pool, 0)
    try:
        async with aclosing(session.answer(Call(request, WRITER, plan=plan, same_device=same_device))) as answer:
            async for _, _, certificate in answer:
                if certificate is not None:
                    return prompt.if_ended(), [each.prompt_token_ids for each in pool.engines[-1].requests]  # type: ignore[attr-defined]
    finally:
        session.close()
    raise AssertionError("no certificate")


@pytest.mark.parametrize("devices", [1, 2])
def test_the_next_answer_is_asked_for_before_the_graph_goes_on(lab: Lab, devices: int) -> None:
    with EnginePool([lab.engine(f"fake:{number}") for number in range(devices)]) as pool:
        prompt, asked = pool.loop.run(asked_when_the_upstream_ended(pool))
    assert prompt is not None
    assert asked[-1] == prompt


class TestSpeculation:
    async def test_gives_what_came_and_what_comes(self) -> None:
        engine = FakeEngine(time_scale=1.0, decode_speed=500.0)
        request = Request(tuple(range(40)), {"max_tokens": 20})
        speculation = Speculation(engine.generate, request)
        await asyncio.sleep(0.02)
        assert 0 < speculation.ready < 20
        said = [delta async for delta in speculation.deltas()]
        await engine.reset_prefix_cache()
        assert said == [delta async for delta in engine.generate(request)]
        assert speculation.ready == 20

    async def test_aborts_its_request_when_it_is_left(self) -> None:
        engine = FakeEngine(time_scale=1.0, decode_speed=500.0)
        speculation = Speculation(engine.generate, Request(tuple(range(40)), {"max_tokens": 500}))
        answer = speculation.deltas()
        assert isinstance(await anext(answer), Delta)
        await answer.aclose()
        assert engine.num_unfinished == 0
        assert engine.aborted == [speculation.request.request_id]

    async def test_fits_the_same_request_only(self) -> None:
        engine = FakeEngine()
        mine = Request((1, 2, 3), {"max_tokens": 5}, cache_salt="a")
        speculation = Speculation(engine.generate, mine)
        assert speculation.fits(Request((1, 2, 3), {"max_tokens": 5}, cache_salt="a"))
        assert not speculation.fits(Request((1, 2, 4), {"max_tokens": 5}, cache_salt="a"))
        assert not speculation.fits(Request((1, 2, 3), {"max_tokens": 6}, cache_salt="a"))
        assert not speculation.fits(Request((1, 2, 3), {"max_tokens": 5}, cache_salt="b"))
        speculation.stop()
        await speculation.stopped()

    async def test_that_was_stopped_fits_nothing_unless_it_was_complete(self) -> None:
        engine = FakeEngine(time_scale=1.0, decode_speed=500.0)
        request = Request(tuple(range(40)), {"max_tokens": 20})
        early, complete = Speculation(engine.generate, request), Speculation(engine.generate, request)
        early.stop()
        await complete.stopped()
        complete.stop()
        assert (early.fits(request), complete.fits(request)) == (False, True)
        await early.stopped()

    async def test_that_failed_fits_nothing(self) -> None:
        request = Request((1, 2, 3), {"max_tokens": 5})
        speculation = Speculation(FakeEngine(fail_generate=RuntimeError("no")).generate, request)
        await speculation.stopped()
        assert not speculation.fits(request)
        with pytest.raises(RuntimeError, match="no"):
            [delta async for delta in speculation.deltas()]


DRAFT = "Tide pools empty twice a day.\n\nIt's so: 12,345 crabs (naïve ones) — don't \U0001f980 mind.\n"


@pytest.mark.parametrize("family", [fake_tokenizer, smollm2, qwen, tekken, sentencepiece])
@pytest.mark.parametrize("end", ["\n\nList one flaw.", "", "?"])
def test_a_prompt_as_if_it_ended_is_the_prompt_of_that_text(family: Any, end: str) -> None:
    """Cut at every character: the ids are those of the full rendering, or none are given where that is not known."""
    template = ChatTemplate(family())

    def use(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Review this draft.\n\n{text}{end}"}]

    growing = growing_with(template, use)
    known = 0
    for count, character in enumerate(DRAFT, start=1):
        growing.feed(WRITER, character)
        if (ids := growing.if_ended()) is not None:
            assert ids == template.prompt_ids(use(DRAFT[:count])), DRAFT[:count]
            known += 1
    growing.finish(WRITER)
    assert growing.if_ended() in (template.prompt_ids(use(DRAFT)), None)
    assert known > len(DRAFT) * 0.8
