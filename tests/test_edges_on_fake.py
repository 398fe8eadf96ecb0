"""Streaming edges change when the work is done, never what comes out: on modelled engines, with every fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy, Send
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, FakeEngine, agent_node, engine_pool, streaming_edge
from langgraph_pingpong.certificate import Certificate
from langgraph_pingpong.edges import langgraph_internals
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.errors import EngineDead, PromptTooLong, UnknownSetting
from langgraph_pingpong.growing_prompt import CallKey, GrowingPrompt
from langgraph_pingpong.session import Call, Session
from langgraph_pingpong.streaming_edge import Upcoming
from tests.conftest import edges_on
from tests.growing_prompts import CRITIC, WRITER, is_probe

if TYPE_CHECKING:
    from tests.conftest import Lab, Recorder

THREE = ("writer", "critic", "editor")
TASK = {"task": "Say what a tide pool is."}
NO_LATER_S = 1.5
"""How much longer than without edges a run may take, in seconds: above a busy machine's noise, below any wait."""


INSTANT = {"time_scale": 0.0}


def baseline(lab: Lab, nodes: tuple[str, ...] = THREE, **chain: Any) -> dict[str, Any]:
    """What the same graph gives with edges off, on engines that take no time."""
    return lab.chain(type(lab)().model(overlap="off", speed=INSTANT), nodes, **chain).invoke(TASK)


def timed_baseline(lab: Lab, **chain: Any) -> tuple[dict[str, Any], float]:
    """The same with the time it takes on engines of the usual speed, in seconds."""
    graph = lab.chain(lab.model(overlap="off"), THREE, **chain)
    started = time.monotonic()
    return graph.invoke(TASK), time.monotonic() - started


def edges_of(record: Recorder) -> list[str]:
    """The nodes whose prompts were prefilled."""
    return sorted({event.node for event in record.named("append.started")})


class TestOrder:
    def test_prefill_waits_for_the_upstreams_first_token(self, lab: Lab) -> None:
        model = lab.model(THREE_ENGINES := 3)
        record = lab.record(model)
        lab.chain(model, THREE).invoke(TASK)
        assert len(lab.engines) == THREE_ENGINES
        for upstream, downstream in (("writer", "critic"), ("critic", "editor")):
            appended, finished = record.first("append.started", downstream), record.first("finish", upstream)
            assert record.first("first_token", upstream) < appended < finished

    def test_prefill_overlaps_the_upstreams_prefill_when_not_deferred(self, lab: Lab) -> None:
        slow, other = lab.engine("fake:0", prefill_speed=2_000.0), lab.engine("fake:1")
        model = lab.model([slow, other], defer_downstream=False)
        record = lab.record(model)
        lab.chain(model).invoke(TASK)
        assert record.first("append.complete", "critic") < record.first("first_token", "writer")

    def test_deferred_prefill_waits_even_if_the_upstreams_prefill_is_slow(self, lab: Lab) -> None:
        slow, other = lab.engine("fake:0", prefill_speed=2_000.0), lab.engine("fake:1")
        model = lab.model([slow, other])
        record = lab.record(model)
        lab.chain(model).invoke(TASK)
        assert record.first("first_token", "writer") < record.first("append.started", "critic")

    def test_the_words_are_prefilled_while_they_are_said(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        lab.chain(model).invoke(TASK)
        sizes = [event.data["tokens"] for event in record.named("append.started", "critic")]
        assert sizes == sorted(set(sizes))
        assert all(size % lab.engines[0].block_size == 0 for size in sizes)
        certificate = record.certificate("critic")
        assert certificate["upstream"] == "writer"
        assert certificate["streamed"] > 20
        assert certificate["wasted"] == 0
        assert certificate["cached"] == certificate["static"] + certificate["streamed"]
        assert certificate["appends"] == len(record.named("append.complete", "critic"))
        assert certificate["fallback"] is None

    def test_the_answer_comes_from_the_device_that_was_prefilled(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        lab.chain(model, THREE).invoke(TASK)
        places = {node: {event.device for event in record.named("append.started", node)} for node in THREE[1:]}
        assert places == {"critic": {"fake:1"}, "editor": {"fake:0"}}
        assert [record.certificate(node)["device"] for node in THREE] == ["fake:0", "fake:1", "fake:0"]

    def test_appends_are_prefixes_of_the_prompt_that_is_answered(self, lab: Lab) -> None:
        lab.chain(lab.model()).invoke(TASK)
        (prompt,) = lab.prompts("critic")
        prefills = [request.prompt_token_ids for request in lab.engines[1].prefills]
        assert len(prefills) > 2
        assert all(prompt[: len(ids)] == ids for ids in prefills)


class TestQuiet:
    def test_nothing_is_prefilled_with_overlap_off(self, lab: Lab) -> None:
        expected = lab.chain(lab.model(), THREE).invoke(TASK)
        assert lab.chain(lab.model(overlap="off"), THREE).invoke(TASK) == expected
        assert lab.prefills() == 0
        assert sum(len(engine.requests) for engine in lab.engines) == 3

    def test_nothing_is_prefilled_on_one_device(self, lab: Lab) -> None:
        expected = baseline(lab)
        assert lab.chain(lab.model(1), THREE).invoke(TASK) == expected
        assert lab.prefills() == 0

    def test_overlap_off_uses_the_devices_in_the_same_order(self, lab: Lab) -> None:
        devices = []
        for overlap in ("on", "off"):
            model = lab.model(overlap=overlap)
            record = lab.record(model)
            lab.chain(model, THREE).invoke(TASK)
            devices.append([record.certificate(node)["device"] for node in THREE])
        assert devices[0] == devices[1]

    def test_a_breakpoint_before_the_downstream_stops_the_edge(self, lab: Lab) -> None:
        model = lab.model()
        graph = lab.chain(model, checkpointer=InMemorySaver(), interrupt_before=["critic"])
        config = {"configurable": {"thread_id": "1"}}
        first = graph.invoke(TASK, config)
        assert "critic" not in first
        assert lab.prefills() == 0
        assert graph.invoke(None, config) == baseline(lab, ("writer", "critic"))

    def test_a_breakpoint_after_the_upstream_stops_the_edge(self, lab: Lab) -> None:
        graph = lab.chain(lab.model(), checkpointer=InMemorySaver(), interrupt_after=["writer"])
        config = {"configurable": {"thread_id": "1"}}
        graph.invoke(TASK, config)
        assert lab.prefills() == 0
        assert graph.invoke(None, config) == baseline(lab, ("writer", "critic"))

    @pytest.mark.parametrize("trip", ["version", "self test"])
    def test_an_unknown_langgraph_turns_edges_off_with_one_warning(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trip: str
    ) -> None:
        expected = baseline(lab)
        if trip == "version":
            monkeypatch.setattr(langgraph_internals, "TESTED", ((99, 0), (99, 1)))
        else:
            monkeypatch.setattr(langgraph_internals, "node_of", lambda task: None)
            monkeypatch.setattr(langgraph_internals, "_superstep", lambda *_: {}["moved"])
        langgraph_internals.usable.cache_clear()
        try:
            with caplog.at_level(logging.WARNING):
                graph = lab.chain(lab.model(), THREE)
                assert [graph.invoke(TASK), asyncio.run(graph.ainvoke(TASK))] == [expected, expected]
        finally:
            langgraph_internals.usable.cache_clear()
        assert lab.prefills() == 0
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "Streaming edges are off" in warnings[0]

    def test_a_config_without_langgraphs_own_keys_runs_plain(self, lab: Lab) -> None:
        config = {"metadata": {"langgraph_node": "writer", "langgraph_checkpoint_ns": "writer:1"}}
        assert lab.model().invoke("You are the writer.", config).text
        assert lab.prefills() == 0


class HangingAbort(FakeEngine):
    """Takes a while to abort a prefill, as an engine does that answers from another process."""

    async def prefill(self, request: Request) -> int:
        try:
            return await super().prefill(request)
        finally:
            await asyncio.sleep(0.4)


class SlowPrefill(FakeEngine):
    """Prefills take two seconds, answers none."""

    async def prefill(self, request: Request) -> int:
        await asyncio.sleep(2.0)
        return await super().prefill(request)


class FailsOnce(FakeEngine):
    """The first answer breaks off after two tokens."""

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self.fail_after_tokens = 2
        self.fail_generate = None if self.requests else RuntimeError("lost")
        async for delta in super().generate(request):
            yield delta


class TestFaultyPrefill:
    def run(self, lab: Lab, break_them: Callable[[FakeEngine], None], kind: type = FakeEngine) -> Recorder:
        expected, plain_s = timed_baseline(lab)
        engines = [lab.engine(f"fake:{index}", kind=kind) for index in range(2)]
        for engine in engines:
            break_them(engine)
        model = lab.model(engines)
        record = lab.record(model)
        graph = lab.chain(model, THREE)
        started = time.monotonic()
        assert graph.invoke(TASK) == expected
        assert time.monotonic() - started < plain_s + NO_LATER_S
        assert asyncio.run(graph.ainvoke(TASK)) == expected
        return record

    def test_that_raises_is_counted_and_changes_nothing(self, lab: Lab) -> None:
        def break_it(engine: FakeEngine) -> None:
            engine.fail_prefill = OSError("no blocks left")

        record = self.run(lab, break_it)
        certificate = record.certificate("critic")
        assert certificate["fallback"] == "OSError: no blocks left"
        assert certificate["static"] == certificate["streamed"] == certificate["wasted"] == 0
        assert len(record.named("append.failed", "critic")) == 2

    def test_that_hangs_is_aborted_and_changes_nothing(self, lab: Lab) -> None:
        def break_it(engine: FakeEngine) -> None:
            engine.prefill_gate = asyncio.Event()

        self.run(lab, break_it)
        for engine in lab.engines:
            assert engine.prefills
            assert {request.request_id for request in engine.prefills} == set(engine.aborted)

    def test_that_is_slow_is_aborted_and_changes_nothing(self, lab: Lab) -> None:
        record = self.run(lab, lambda engine: None, SlowPrefill)
        assert record.named("append.started", "critic")
        assert not record.named("append.complete", "critic")

    def test_whose_bookkeeping_raises_changes_nothing(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GrowingPrompt, "feed", lambda self, call, text: {}["feed"])
        record = self.run(lab, lambda engine: None)
        assert "KeyError" in record.certificate("critic")["fallback"]

    def test_on_a_dead_device_leaves_the_upstream_alone(self, lab: Lab) -> None:
        expected = baseline(lab, ("writer", "critic"))
        model = lab.model([lab.engine("fake:0"), lab.engine("fake:1", fail_restart=OSError("gone"))]).start()
        record = lab.record(model)
        lab.engines[1].die()
        assert lab.chain(model).invoke(TASK) == expected
        (failed,) = record.named("append.failed", "critic")
        assert "EngineDead" in failed.data["error"]
        assert record.certificate("critic")["device"] == "fake:0"
        model.pool.close()

    def test_that_is_slow_to_abort_does_not_outlive_a_cancelled_call(self, lab: Lab) -> None:
        engines = [lab.engine("fake:0"), lab.engine("fake:1", kind=HangingAbort)]
        engines[1].prefill_gate = asyncio.Event()
        model = lab.model(engines)
        record = lab.record(model)
        graph = lab.chain(model)

        async def cancel_while_aborting() -> None:
            task = asyncio.create_task(graph.ainvoke(TASK))
            await asyncio.to_thread(record.wait_for, "finalize", "critic")
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel_while_aborting())
        assert lab.prompts("critic") == []


def on_probes(act: Callable[[], Any]) -> Callable[[Mapping[str, str]], list[tuple[str, str]]]:
    """A prompt function that acts up on answers that nobody gave."""

    def prompt(state: Mapping[str, str]) -> list[tuple[str, str]]:
        if is_probe(state["writer"]):
            act()
        return [("system", "You are the critic."), ("human", f"Text:\n{state['writer']}\n\nGo on.")]

    return prompt


class TestPromptFunctions:
    @pytest.mark.parametrize("on_first", [True, False])
    def test_that_raise_on_made_up_answers_change_nothing(self, lab: Lab, on_first: bool) -> None:
        def prompt(state: Mapping[str, str]) -> list[tuple[str, str]]:
            if is_probe(state["writer"]) and state["writer"].strip().startswith("Zq" if on_first else "Kx"):
                raise ValueError("nobody says that")
            return on_probes(lambda: None)(state)

        expected = baseline(lab, prompts={"critic": prompt})
        model = lab.model()
        record = lab.record(model)
        assert lab.chain(model, THREE, {"critic": prompt}).invoke(TASK) == expected
        assert [event.node for event in record.named("plan.failed")] == ["writer"]
        assert edges_of(record) == ["editor"]

    def test_that_hang_on_made_up_answers_change_nothing(self, lab: Lab) -> None:
        prompts = {"critic": on_probes(lambda: time.sleep(5))}
        expected, plain_s = timed_baseline(lab, prompts=prompts)
        model = lab.model()
        record = lab.record(model)
        started = time.monotonic()
        assert lab.chain(model, THREE, prompts).invoke(TASK) == expected
        assert time.monotonic() - started < plain_s + NO_LATER_S
        assert edges_of(record) == ["editor"]

    def test_a_plan_that_takes_too_long_is_given_up(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("langgraph_pingpong.planning.PLAN_WITHIN_S", 0.02)
        model = lab.model()
        record = lab.record(model)
        lab.chain(model, prompts={"critic": on_probes(lambda: time.sleep(1))}).invoke(TASK)
        assert "TimeoutError" in record.named("plan.failed", "writer")[0].data["error"]

    @pytest.mark.parametrize(
        ("name", "use"),
        [
            ("upper", str.upper),
            ("first line", lambda text: text.split("\n")[0]),
            ("first words", lambda text: text[:40]),
            ("json", json.dumps),
            ("length only", lambda text: str(len(text))),
            ("stripped", lambda text: text.strip()),
            ("twice", lambda text: f"{text}\n{text}"),
            ("reversed", lambda text: text[::-1]),
            ("nothing", lambda text: ""),
        ],
    )
    def test_may_use_the_answer_in_any_way(self, lab: Lab, name: str, use: Callable[[str], str]) -> None:
        def prompt(state: Mapping[str, str]) -> list[tuple[str, str]]:
            return [("system", "You are the critic. Be brief."), ("human", f"Text: {use(state['writer'])} End.")]

        replies = {"writer": ' Tide pools\n"empty"  twice a day. ' * 4}
        prompts = {"critic": prompt}
        plain = lab.model(replies=replies, overlap="off", speed=INSTANT)
        off = lab.chain(plain, THREE, prompts).invoke(TASK)
        (expected,) = lab.prompts("critic")
        model = lab.model(replies=replies)
        record = lab.record(model)
        assert lab.chain(model, THREE, prompts).invoke(TASK) == off
        assert lab.prompts("critic") == [expected]
        certificate = record.certificate("critic")
        assert certificate["ids_equal"]
        assert certificate["appends"] > 0, f"{name}: the part before the answer is known and worth prefilling"
        sent = max(len(request.prompt_token_ids) for request in lab.engines[1].prefills)
        assert certificate["static"] + certificate["streamed"] + certificate["wasted"] <= sent

    def test_that_change_the_state_do_not_change_the_graphs(self, lab: Lab) -> None:
        seen: list[list[str]] = []

        class State(TypedDict, total=False):
            notes: list[str]
            writer: str

        def prompt(state: State) -> list[tuple[str, str]]:
            state["notes"].append("seen by a prompt")
            return [("system", "You are the critic."), ("human", state["writer"])]

        model = lab.model()
        builder = StateGraph(State)
        builder.add_node("writer", agent_node(model, prompt=lambda state: "You are the writer.", writes="writer"))
        builder.add_node("critic", agent_node(model, prompt=prompt, writes="writer"))
        builder.add_node("last", lambda state: seen.append(list(state["notes"])))
        builder.add_edge(START, "writer")
        builder.add_edge("writer", "critic")
        builder.add_edge("critic", "last")
        builder.compile().invoke({"notes": ["first"]})
        assert lab.prefills() > 0
        assert seen == [["first", "seen by a prompt"]]

    def test_see_nothing_of_the_callers_context(self, lab: Lab) -> None:
        """No callback, tracer or stream of the user notices a plan, whatever runs in it."""

        def prompt(state: Mapping[str, str]) -> Any:
            return lab.prompt("critic", "writer").invoke(state)

        def seen(overlap: str) -> list[tuple[str, str]]:
            graph = lab.chain(lab.model(overlap=overlap), THREE, {"critic": prompt})

            async def listen() -> list[tuple[str, str]]:
                events = graph.astream_events(TASK, version="v2")
                return [(each["event"], each["name"]) async for each in events if not each["event"].endswith("_stream")]

            return asyncio.run(listen())

        off, on = seen("off"), seen("on")
        assert lab.prefills() > 0
        assert ("on_prompt_start", "ChatPromptTemplate") in off
        assert on == off


class TestBrokenRuns:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming_edge, "UNCLAIMED_AFTER_S", 0.2)

    def test_an_upstream_that_fails_in_mid_answer_closes_its_edges(self, lab: Lab) -> None:
        broken = lab.engine("fake:0", fail_generate=RuntimeError("lost"), fail_after_tokens=40)
        model = lab.model([broken, lab.engine("fake:1")])
        record = lab.record(model)
        with pytest.raises(RuntimeError, match="lost"):
            lab.chain(model).invoke(TASK)
        (dropped,) = record.named("edge.dropped")
        assert (dropped.node, dropped.data["reason"]) == ("critic", "upstream did not finish")
        assert dropped.data["wasted"] > 0
        assert repr(model.pool) == "<EnginePool fake:0=0 fake:1=0>"

    @pytest.mark.parametrize(("takes_s", "reason"), [(0.0, "run ended"), (0.5, "unclaimed")])
    def test_a_downstream_that_is_never_called_gives_its_place_back(
        self, lab: Lab, takes_s: float, reason: str
    ) -> None:
        def prompt(state: Mapping[str, str]) -> str:
            if not is_probe(state["writer"]):
                time.sleep(takes_s)
                raise ValueError("no such text")
            return state["writer"]

        model = lab.model()
        record = lab.record(model)
        with pytest.raises(ValueError, match="no such text"):
            lab.chain(model, prompts={"critic": prompt}).invoke(TASK)
        assert record.wait_for("edge.dropped", "critic", 2).data["reason"] == reason

    def test_an_edge_past_its_superstep_is_dropped_at_the_next_call(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(streaming_edge, "UNCLAIMED_AFTER_S", 30.0)

        class Silent(type(agent_node(lab.model(), prompt=str, writes="x"))):
            def invoke(self, *_: Any, **__: Any) -> dict[str, str]:
                return {"critic": "Nothing to add."}

        model = lab.model()
        record = lab.record(model)
        lab.chain(model, THREE, node_type={"critic": Silent}).invoke(TASK)
        (dropped,) = record.named("edge.dropped")
        assert (dropped.node, dropped.data["reason"]) == ("critic", "not called")
        assert record.certificate("editor")["upstream"] is None

    def test_closing_the_pool_ends_waiting_edges(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming_edge, "UNCLAIMED_AFTER_S", 30.0)
        model = lab.model()
        record = lab.record(model)
        closed = threading.Event()

        def prompt(state: Mapping[str, str]) -> str:
            if not is_probe(state["writer"]):
                assert closed.wait(5)
            return state["writer"]

        with ThreadPoolExecutor(1) as threads:
            run = threads.submit(lab.chain(model, prompts={"critic": prompt}).invoke, TASK)
            record.wait_for("finish", "writer")
            assert edges_on(model.pool)
            started = time.monotonic()
            model.pool.close()
            assert time.monotonic() - started < 1
            closed.set()
            assert isinstance(run.exception(), EngineDead)

    def expect_quiet(self, lab: Lab, record: Recorder, model: ChatPingPong) -> None:
        """Within a second: no request, no edge, and the downstream never ran."""
        deadline = time.monotonic() + 1.0
        while any(engine.num_unfinished for engine in lab.engines) or "=1" in repr(model.pool):
            assert time.monotonic() < deadline, [engine.running for engine in lab.engines]
            time.sleep(0.01)
        assert not record.named("generate.started", "critic")

    def test_a_cancelled_run_leaves_nothing(self, lab: Lab) -> None:
        model = lab.model(speed={"decode_speed": 100.0})
        record = lab.record(model)

        async def cancel() -> None:
            task = asyncio.create_task(lab.chain(model).ainvoke(TASK))
            await asyncio.to_thread(record.wait_for, "append.complete", "critic")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        self.expect_quiet(lab, record, model)
        assert record.named("edge.dropped", "critic")

    @pytest.mark.parametrize("mode", ["messages", "updates", "values"])
    def test_a_closed_async_stream_leaves_nothing(self, lab: Lab, mode: str) -> None:
        model = lab.model(speed={"decode_speed": 200.0})
        record = lab.record(model)

        async def take_one() -> None:
            stream = lab.chain(model).astream(TASK, stream_mode=mode)
            async with contextlib.aclosing(stream) as parts:
                async for _ in parts:
                    break

        asyncio.run(take_one())
        if mode == "messages":
            self.expect_quiet(lab, record, model)

    def test_breaking_out_of_an_async_stream_leaves_nothing(self, lab: Lab) -> None:
        model = lab.model(speed={"decode_speed": 200.0})
        record = lab.record(model)

        async def take_three() -> None:
            taken = 0
            async for _ in lab.chain(model).astream(TASK, stream_mode="messages"):
                taken += 1
                if taken == 3:
                    break

        asyncio.run(take_three())
        self.expect_quiet(lab, record, model)

    def test_breaking_out_of_a_sync_stream_leaves_nothing(self, lab: Lab) -> None:
        model = lab.model(speed={"decode_speed": 400.0})
        record = lab.record(model)
        for _ in lab.chain(model).stream(TASK, stream_mode="messages"):
            break
        self.expect_quiet(lab, record, model)

    def test_breaking_out_of_the_models_own_stream_aborts_the_request(self, lab: Lab) -> None:
        model = lab.model(speed={"decode_speed": 50.0})
        stream = model.stream("You are the writer.")
        next(stream)
        stream.close()
        assert [engine.num_unfinished for engine in lab.engines] == [0, 0]
        assert len(lab.engines[0].aborted) == 1

    def test_a_node_timeout_leaves_nothing(self, lab: Lab) -> None:
        model = lab.model(speed={"decode_speed": 50.0})
        record = lab.record(model)
        graph = lab.chain(model, add={"writer": {"timeout": 0.3}})
        with pytest.raises(Exception, match=r"(?i)time"):
            asyncio.run(graph.ainvoke(TASK))
        self.expect_quiet(lab, record, model)

    def test_the_next_run_is_right(self, lab: Lab) -> None:
        expected = baseline(lab, ("writer", "critic"))
        model = lab.model()
        graph = lab.chain(model)
        for _ in graph.stream(TASK, stream_mode="messages"):
            break
        assert graph.invoke(TASK) == expected

    def test_a_retried_node_is_answered_anew(self, lab: Lab) -> None:
        expected = baseline(lab, ("writer", "critic"))
        engines = [lab.engine("fake:0", kind=FailsOnce), lab.engine("fake:1")]
        model = lab.model(engines)
        record = lab.record(model)
        retry = RetryPolicy(max_attempts=2, initial_interval=0.01, jitter=False, retry_on=RuntimeError)
        graph = lab.chain(model, add={"writer": {"retry_policy": retry}})
        assert graph.invoke(TASK) == expected
        assert len(record.named("generate.started", "writer")) == 2
        assert record.certificate("critic")["upstream"] == "writer"
        assert record.certificate("critic")["wasted"] == 0


class GivenIds:
    """A growing prompt whose ids, and how far they reach into the prompt, a test decides."""

    static_tokens = 0
    calls: frozenset[CallKey] = frozenset({WRITER})

    def __init__(self, ids: range, reach: int) -> None:
        self.ids, self.reach = ids, reach


class TestClaims:
    @pytest.mark.parametrize("order", [(1, 2), (2, 1)])
    def test_of_two_edges_to_one_call_the_one_that_reaches_further_stays(
        self, lab: Lab, order: tuple[int, int]
    ) -> None:
        model = lab.model()
        foreseen = {1: GivenIds(range(64), 1), 2: GivenIds(range(100, 180), 2)}

        async def ask_twice() -> list[Certificate]:
            run = Session(model.pool, 0)
            upstream = model.pool.lease(0)
            for reach in order:
                run.open_edge(Upcoming(CRITIC, 2, "learned", foreseen[reach]), Call(Request(()), WRITER), upstream, 1)
                await asyncio.sleep(0.05)
            call = Call(Request(tuple(range(100, 200))), CRITIC, 2)
            certificates = [answer[-1] for _ in range(2) async for answer in run.answer(call) if answer[-1]]
            upstream.release()
            return certificates

        certificates = model.pool.loop.run(ask_twice())
        taken_over = order == (1, 2)
        assert [(each.streamed, each.wasted) for each in certificates] == [(80, 64 * taken_over), (0, 0)]
        assert [each.source for each in certificates] == ["learned", None]
        assert all(each.ids_equal for each in certificates)
        assert repr(model.pool) == "<EnginePool fake:0=0 fake:1=0>"


class TestFourWays:
    def run(self, graph: Any) -> list[dict[str, Any]]:
        async def asynchronously() -> list[dict[str, Any]]:
            streamed = [state async for state in graph.astream(TASK, stream_mode="values")]
            return [await graph.ainvoke(TASK), streamed[-1]]

        return [graph.invoke(TASK), list(graph.stream(TASK, stream_mode="values"))[-1], *asyncio.run(asynchronously())]

    def test_give_the_same_with_edges_on_and_off(self, lab: Lab) -> None:
        off = self.run(lab.chain(lab.model(overlap="off", speed=INSTANT), THREE))
        on = self.run(lab.chain(lab.model(), THREE))
        assert lab.prefills() > 0
        assert on == off
        assert all(state == on[0] for state in on)

    @pytest.mark.parametrize("mode", ["messages", "updates", "debug", "custom", "checkpoints", "tasks"])
    def test_streams_show_nothing_of_the_edges(self, lab: Lab, mode: str) -> None:
        def shown(overlap: str) -> list[Any]:
            model = lab.model(overlap=overlap)
            graph = lab.chain(model, THREE, checkpointer=InMemorySaver())
            parts = graph.stream(TASK, {"configurable": {"thread_id": "1"}}, stream_mode=mode)
            return [_without_ids(part) for part in parts]

        assert shown("on") == shown("off")

    def test_a_checkpointer_keeps_the_same_history(self, lab: Lab) -> None:
        def history(overlap: str) -> list[Any]:
            graph = lab.chain(lab.model(overlap=overlap), THREE, checkpointer=InMemorySaver())
            config = {"configurable": {"thread_id": "1"}}
            graph.invoke(TASK, config)
            return [(snapshot.values, snapshot.next) for snapshot in graph.get_state_history(config)]

        assert history("on") == history("off")

    def test_threads_do_not_mix_their_runs(self, lab: Lab) -> None:
        tasks = [{"task": f"Canary {number:03d} sings."} for number in range(8)]
        off = lab.chain(lab.model(overlap="off", speed=INSTANT), THREE)
        expected = [off.invoke(task) for task in tasks]
        graph = lab.chain(lab.model(), THREE)
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(graph.invoke, tasks)) == expected
        first_prompts = [lab.engines[0].tokenizer.decode(list(ids)) for ids in lab.prompts("writer")]
        assert sorted(text.count("Canary") for text in first_prompts) == [1] * 8
        assert lab.prefills() > 0

    def test_runs_on_one_event_loop_do_not_mix(self, lab: Lab) -> None:
        tasks = [{"task": f"Canary {number:03d} sings."} for number in range(8)]
        off = lab.chain(lab.model(overlap="off", speed=INSTANT), THREE)
        expected = [off.invoke(task) for task in tasks]
        graph = lab.chain(lab.model(), THREE)

        async def together() -> list[Any]:
            return await asyncio.gather(*(graph.ainvoke(task) for task in tasks))

        assert asyncio.run(together()) == expected
        assert lab.prefills() > 0


class TestShapes:
    def test_a_subgraph_streams_within_itself(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        inner = lab.chain(model, THREE)
        state = inner.builder.state_schema
        builder = StateGraph(state)
        builder.add_node("inner", inner)
        builder.add_edge(START, "inner")
        result = builder.compile().invoke(TASK)
        assert result == baseline(lab)
        assert edges_of(record) == ["critic", "editor"]

    def test_a_loop_streams_in_every_round(self, lab: Lab) -> None:
        class State(TypedDict, total=False):
            writer: str
            critic: str
            rounds: int

        def graph(overlap: str) -> tuple[Any, Recorder]:
            model = lab.model(overlap=overlap)
            record = lab.record(model)
            builder = StateGraph(State)
            nodes = {node: lab.prompt(node, reads) for node, reads in (("writer", "critic"), ("critic", "writer"))}
            for node, prompt in nodes.items():
                builder.add_node(node, agent_node(model, prompt=prompt, writes=node))
            builder.add_node("count", lambda state: {"rounds": state.get("rounds", 0) + 1})
            builder.add_edge(START, "writer")
            builder.add_edge("writer", "critic")
            builder.add_edge("critic", "count")
            builder.add_conditional_edges("count", lambda state: "writer" if state["rounds"] < 3 else "__end__")
            return builder.compile(), record

        off, _ = graph("off")
        on, record = graph("on")
        assert on.invoke({"critic": "Begin."}) == off.invoke({"critic": "Begin."})
        finished = [event.data["certificate"] for event in record.named("finish", "critic")]
        assert [certificate["upstream"] for certificate in finished] == ["writer"] * 3
        assert all(certificate["wasted"] == 0 for certificate in finished)

    def test_a_fan_out_over_static_edges_prefills_both(self, lab: Lab) -> None:
        class State(TypedDict, total=False):
            task: str
            writer: str
            left: str
            right: str

        def build(overlap: str) -> tuple[Any, Recorder]:
            model = lab.model(3, overlap=overlap)
            record = lab.record(model)
            builder = StateGraph(State)
            for node, reads in (("writer", "task"), ("left", "writer"), ("right", "writer")):
                builder.add_node(node, agent_node(model, prompt=lab.prompt(node, reads), writes=node))
            builder.add_edge(START, "writer")
            builder.add_edge("writer", "left")
            builder.add_edge("writer", "right")
            return builder.compile(), record

        off, _ = build("off")
        on, record = build("on")
        assert on.invoke(TASK) == off.invoke(TASK)
        assert edges_of(record) == ["left", "right"]
        assert {record.certificate(node)["device"] for node in ("left", "right")} == {"fake:1", "fake:2"}

    def test_sends_run_plain_and_right(self, lab: Lab) -> None:
        class State(TypedDict, total=False):
            task: str
            writer: str

        def build(overlap: str) -> Any:
            model = lab.model(overlap=overlap)
            builder = StateGraph(State)
            builder.add_node("writer", agent_node(model, prompt=lab.prompt("writer", "task"), writes="writer"))
            builder.add_node("critic", agent_node(model, prompt=lab.prompt("critic", "writer"), writes=lambda _: {}))
            builder.add_edge(START, "writer")
            builder.add_conditional_edges("writer", lambda s: [Send("critic", {"writer": s["writer"]})] * 2, ["critic"])
            return builder.compile()

        assert build("on").invoke(TASK) == build("off").invoke(TASK)

    def test_a_node_may_bind_settings_of_the_call(self, lab: Lab) -> None:
        model = lab.model()
        result = lab.chain(model.bind(max_tokens=20), THREE).invoke(TASK)
        assert lab.prefills() > 0
        assert {len(result[node]) for node in THREE} == {20}

    def test_a_message_list_in_the_state_streams(self, lab: Lab) -> None:
        from langgraph.graph import MessagesState

        def build(overlap: str) -> tuple[Any, Recorder]:
            model = lab.model(overlap=overlap)
            record = lab.record(model)
            builder = StateGraph(MessagesState)
            for node in ("writer", "critic"):
                prompt = lambda state, node=node: [  # noqa: E731
                    ("system", f"You are the {node}. Be brief."),
                    *state["messages"],
                    ("human", "Go on."),
                ]
                writes = lambda answer: {"messages": [AIMessage(answer.text, id="fixed")]}  # noqa: E731
                builder.add_node(node, agent_node(model, prompt=prompt, writes=writes))
            builder.add_edge(START, "writer")
            builder.add_edge("writer", "critic")
            return builder.compile(), record

        inputs = {"messages": [{"role": "user", "content": "Hello.", "id": "first"}]}
        off, _ = build("off")
        on, record = build("on")
        assert on.invoke(inputs) == off.invoke(inputs)
        assert record.certificate("critic")["streamed"] > 20

    def test_models_that_share_a_pool_share_edges(self, lab: Lab) -> None:
        model = lab.model()
        other = model.model_copy(update={"temperature": 0.5})
        graph = lab.chain(model)
        graph.nodes["critic"].bound.model = other
        record = lab.record(model)
        graph.invoke(TASK)
        assert record.certificate("critic")["upstream"] == "writer"

    def test_each_model_of_a_shared_pool_traces_its_own_calls(self, lab: Lab) -> None:
        model = lab.model()
        other = ChatPingPong(pool=model.pool)
        graph = lab.chain(model)
        graph.nodes["critic"].bound.model = other
        own, others = lab.record(model), lab.record(other)
        graph.invoke(TASK)
        assert {event.node for event in own.named("finish")} == {"writer"}
        assert {event.node for event in others.named("finish")} == {"critic"}
        assert own.named("append.started", "critic")  # the writer's call opened that edge
        assert others.certificate("critic")["upstream"] == "writer"
        assert {event.run for event in (*own.events, *others.events)} == {own.events[0].run}

    def test_a_pool_is_made_for_several_models(self) -> None:
        with engine_pool(devices=["fake:0", "fake:1"], max_model_len=400) as pool:
            first, second = (ChatPingPong(pool=pool, temperature=value) for value in (0.0, 1.0))
            assert first.invoke("Hello.").text == second.invoke("Hello.").text
            assert [engine.starts for engine in pool.engines] == [1, 1]
            with pytest.raises(PromptTooLong, match="holds 400"):
                first.invoke("x" * 500)
        with pytest.raises(UnknownSetting, match="Did you mean 'max_model_len'"):
            engine_pool(devices=["fake:0"], max_model_length=400)

    def test_a_downstream_on_another_pool_is_left_alone(self, lab: Lab) -> None:
        model, elsewhere = lab.model(), lab.model()
        graph = lab.chain(model)
        graph.nodes["critic"].bound.model = elsewhere
        record = lab.record(model)
        assert graph.invoke(TASK) == baseline(lab, ("writer", "critic"))
        assert not record.named("append.started")


def _without_ids(part: Any) -> Any:
    """What is shown, as text, without what differs from run to run: ids, times, and measurements."""
    if isinstance(part, tuple):
        if len(part) == 1:
            return part
        message, metadata = part
        return (
            message.content,
            message.usage_metadata and message.usage_metadata["input_tokens"],
            metadata["langgraph_node"],
        )
    keys = ("type", "step", "payload", "next", "values", "metadata", "name", "input", "result", "error", "triggers")
    if isinstance(part, dict) and "step" in part:
        return {key: _without_ids(part[key]) for key in keys if key in part}
    if isinstance(part, dict):
        return {
            key: _without_ids(value)
            for key, value in part.items()
            if key not in ("id", "config", "parent_config", "tasks")
        }
    return part
