"""`custom_events=True`: what happens is told in the custom stream of a graph, to whoever asks, and changes nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_stream_writer
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from langgraph_pingpong import custom_events
from langgraph_pingpong.custom_events import ITEMS, to_item
from langgraph_pingpong.edges import running_task
from langgraph_pingpong.errors import EngineDead
from langgraph_pingpong.trace import Event, Trace
from tests.conftest import Lab, edges_on, wait_until

TASK = {"task": "Say what a tide pool is."}
COMMON = ("type", "run", "node", "device", "t")
PAGE = Path(__file__).parent.parent / "docs" / "events.md"


class State(TypedDict, total=False):
    task: str
    first: str
    second: str


def talking(model: Any, *, then: Callable[[Any], Any] = lambda state: {}, **add: Any) -> Any:
    """Two functions that write items of their own around their calls, and whatever comes `then`."""

    def node(reads: str, writes: str) -> Callable[[State], Any]:
        def speak(state: Any) -> Any:
            get_stream_writer()({"mine": f"{writes} begins"})
            text = model.invoke(f"You are the {writes}. {'Be short. ' * 20}\n{state[reads]}").text
            get_stream_writer()({"mine": f"{writes} ends"})
            return {writes: text}

        return speak

    builder = StateGraph(State)
    builder.add_node("first", node("task", "first"), **add)
    builder.add_node("second", node("first", "second"))
    builder.add_node("then", then)
    builder.add_edge(START, "first").add_edge("first", "second").add_edge("second", "then").add_edge("then", END)
    return builder.compile()


def types_of(items: list[Any]) -> list[str]:
    return [item["type"] for item in items if "type" in item]


def ours(items: list[Any]) -> list[Any]:
    return [item for item in items if "type" in item]


def check_chain(items: list[dict[str, Any]]) -> None:
    """The items of a run of writer and critic, in the order in which things happen."""
    assert all(set(item) == {*COMMON, *dict(ITEMS.values())[item["type"]]} for item in items)
    assert json.loads(json.dumps(items)) == items
    assert len({item["run"] for item in items}) == 1
    assert [item["t"] for item in items] == sorted(item["t"] for item in items)
    calls = [(item["type"], item["node"]) for item in items if "append" not in item["type"]]
    assert calls == [
        ("pingpong.call", "writer"),
        ("pingpong.first_token", "writer"),
        ("pingpong.finish", "writer"),
        ("pingpong.finalize", "critic"),
        ("pingpong.call", "critic"),
        ("pingpong.first_token", "critic"),
        ("pingpong.finish", "critic"),
    ]
    appends = [item for item in items if item["type"] == "pingpong.append"]
    assert len(appends) > 1
    assert all((item["node"], item["upstream"], item["device"]) == ("critic", "writer", "fake:1") for item in appends)
    finalized = next(item for item in items if item["type"] == "pingpong.finalize")
    certificate = items[-1]["certificate"]
    assert all(finalized[name] == certificate[name] for name in ("static", "streamed", "wasted", "ready", "upstream"))
    assert certificate["streamed"] > 0


# -- who asks, hears -------------------------------------------------------------------------------------------


def test_a_stream_tells_what_happens(lab: Lab) -> None:
    graph = lab.chain(lab.model(custom_events=True, speculate=False))
    check_chain(list(graph.stream(TASK, stream_mode="custom")))


async def test_an_async_stream_tells_what_happens(lab: Lab) -> None:
    graph = lab.chain(lab.model(custom_events=True, speculate=False))
    check_chain([item async for item in graph.astream(TASK, stream_mode="custom")])


def test_words_of_an_app_and_ours_share_the_stream(lab: Lab) -> None:
    graph = talking(lab.model(custom_events=True))
    graph.invoke(TASK)  # learns
    items = list(graph.stream(TASK, stream_mode="custom"))
    mine = [item["mine"] for item in items if "mine" in item]
    assert mine == ["first begins", "first ends", "second begins", "second ends"]
    assert types_of(items).count("pingpong.finish") == 2 and "pingpong.append" in types_of(items)
    order = [item.get("mine") or f"{item['node']} {item['type']}" for item in items]
    for node in ("first", "second"):
        inside = order[order.index(f"{node} begins") : order.index(f"{node} ends")]
        assert {f"{node} pingpong.{what}" for what in ("call", "first_token", "finish")} <= set(inside)


def test_two_runs_at_once_hear_of_themselves_only(lab: Lab) -> None:
    graph = lab.chain(lab.model(custom_events=True))

    async def run() -> list[Any]:
        return [item async for item in graph.astream(TASK, stream_mode="custom")]

    async def both() -> list[list[Any]]:
        return await asyncio.gather(run(), run(), graph.ainvoke(TASK))

    one, two, _ = asyncio.run(both())
    names = [{item["run"] for item in items} for items in (one, two)]
    assert [len(each) for each in names] == [1, 1] and names[0] != names[1]


def test_subgraphs_are_told_by_their_namespace(lab: Lab) -> None:
    model = lab.model(custom_events=True)
    builder = StateGraph(TypedDict("Outer", {"task": str, "writer": str, "critic": str}))
    builder.add_node("inner", lab.chain(model)).add_edge(START, "inner")
    graph = builder.compile()
    items = list(graph.stream(TASK, stream_mode="custom", subgraphs=True))
    assert {namespace[0].partition(":")[0] for namespace, _ in items} == {"inner"}
    assert {len(namespace) for namespace, _ in items} == {1}
    assert types_of([item for _, item in items]).count("pingpong.finish") == 2
    # As with items of an app's own: of subgraphs one hears by asking for them.
    assert list(graph.stream(TASK, stream_mode="custom")) == []


def test_a_subgraph_that_a_node_streams_by_itself(lab: Lab) -> None:
    inner = lab.chain(lab.model(custom_events=True))
    seen: list[Any] = []

    def node(state: Any) -> Any:
        seen.extend(inner.stream(TASK, stream_mode="custom"))
        return {}

    outer = StateGraph(State).add_node("node", node).add_edge(START, "node").compile()
    assert list(outer.stream(TASK, stream_mode="custom")) == []
    assert types_of(seen).count("pingpong.finish") == 2


def test_functional_tasks(lab: Lab) -> None:
    model = lab.model(custom_events=True)

    @task
    def ask(text: str) -> str:
        return model.invoke(text).text

    @entrypoint()
    def flow(text: str) -> str:
        return ask(text).result()

    told = [(item["type"], item["node"]) for item in flow.stream("Hello", stream_mode="custom")]
    assert told == [(f"pingpong.{what}", "ask") for what in ("call", "first_token", "finish")]


def test_a_node_with_a_time_limit(lab: Lab) -> None:
    """LangGraph closes the writer of such a node with the node; what its edges do later is told all the same."""
    model = lab.model(custom_events=True, speculate=False)
    graph = lab.chain(model, add={"writer": {"timeout": 30.0}, "critic": {"timeout": 30.0}})

    async def run() -> list[Any]:
        return [item async for item in graph.astream(TASK, stream_mode="custom")]

    check_chain(asyncio.run(run()))


def test_what_goes_wrong_is_told(lab: Lab) -> None:
    broken = lab.engine("fake:0", fail_generate=RuntimeError("lost"), fail_after_tokens=40)
    graph = lab.chain(lab.model([broken, lab.engine("fake:1")], custom_events=True))
    items: list[Any] = []
    with pytest.raises(RuntimeError, match="lost"):
        keep(items, graph.stream(TASK, stream_mode="custom"))
    (dropped,) = [item for item in items if item["type"] == "pingpong.edge_dropped"]
    assert (dropped["node"], dropped["upstream"], dropped["reason"]) == ("critic", "writer", "upstream did not finish")

    deaf = lab.engine("fake:1", fail_prefill=RuntimeError("deaf"))
    graph = lab.chain(lab.model([lab.engine("fake:0"), deaf], custom_events=True))
    items = list(graph.stream(TASK, stream_mode="custom"))
    (failed,) = [item for item in items if item["type"] == "pingpong.append_failed"]
    assert (failed["node"], failed["upstream"], failed["error"]) == ("critic", "writer", "RuntimeError: deaf")
    assert items[-1]["certificate"]["fallback"] == "RuntimeError: deaf"


def test_an_answer_that_moves_is_told(lab: Lab) -> None:
    model = lab.model(custom_events=True)
    model.trace.subscribe(lambda event: event.name == "first_token" and lab.engines[0].die())
    items = list(lab.chain(model, ("writer",)).stream(TASK, stream_mode="custom"))
    (moved,) = [item for item in items if item["type"] == "pingpong.failover"]
    assert (moved["node"], moved["device"], moved["left"]) == ("writer", "fake:1", "fake:0")
    assert items[-1]["certificate"]["device"] == "fake:1"


def keep(seen: list[Any], items: Iterator[Any]) -> None:
    """What comes before an error, too."""
    for item in items:
        seen.append(item)


# -- who does not, does not ------------------------------------------------------------------------------------


def all_streams(graph: Any) -> Iterator[Any]:
    modes = ["values", "updates", "messages", "custom", "tasks"]
    for mode, item in graph.stream(TASK, stream_mode=modes):
        if mode == "custom":
            yield mode, item
        elif mode == "messages":
            yield mode, item[0].text, item[1]["langgraph_node"]
        elif mode == "tasks":
            yield mode, item["name"], item.get("input"), item.get("result")
        else:
            yield mode, item


def test_without_the_setting_the_custom_stream_is_the_apps_own(lab: Lab) -> None:
    off = list(all_streams(talking(lab.model())))
    assert [item for mode, *item in off if mode == "custom"] == [
        [{"mine": "first begins"}],
        [{"mine": "first ends"}],
        [{"mine": "second begins"}],
        [{"mine": "second ends"}],
    ]


def test_with_it_all_else_in_the_streams_is_the_same(lab: Lab) -> None:
    off, on = (list(all_streams(talking(lab.model(custom_events=setting)))) for setting in (False, True))
    assert [item for item in on if not (item[0] == "custom" and "type" in item[1])] == off
    assert len(on) > len(off)


def test_a_run_that_does_not_ask_is_told_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = lab.chain(lab.model(custom_events=True))
    asked: list[str] = []
    monkeypatch.setattr(custom_events, "to_item", lambda event: asked.append(event.name))
    plain = lab.chain(lab.model())
    assert list(plain.stream(TASK, stream_mode="custom")) == [] and asked == []
    for mode in ("values", "updates", "messages"):
        assert not [item for item in graph.stream(TASK, stream_mode=mode) if isinstance(item, dict) and "type" in item]


def test_calls_outside_a_graph_are_as_ever(lab: Lab) -> None:
    assert lab.model(custom_events=True).invoke("Hello").text == lab.model().invoke("Hello").text


# -- the end of a run, and failures ------------------------------------------------------------------------------


def test_a_stream_that_is_left_early(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    model = lab.model(custom_events=True)
    graph = lab.chain(model)

    async def leave() -> None:
        stream = graph.astream(TASK, stream_mode="custom")
        async for item in stream:
            if item["type"] == "pingpong.append":
                break
        await stream.aclose()

    with caplog.at_level(logging.WARNING):
        asyncio.run(leave())
        wait_until(lambda: not edges_on(model.pool), 5, "end of the edges")
    assert not caplog.records
    assert graph.invoke(TASK) == lab.chain(lab.model()).invoke(TASK)


def test_an_edge_that_outlives_the_loop_of_its_run(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Its caller's event loop is closed when it is dropped."""
    model = lab.model(custom_events=True)
    record = lab.record(model)
    writers: list[Any] = []

    def keep(state: Any, config: RunnableConfig) -> Any:
        writers.append(custom_events.streamed(Trace(), running_task(config)))
        return {}

    graph = talking(model, then=keep)

    async def run() -> list[Any]:
        return [item async for item in graph.astream(TASK, stream_mode="custom")]

    items = asyncio.run(run())
    with caplog.at_level(logging.WARNING):
        writers[0].emit("edge.dropped", run="r", node="n", device="d", upstream="u", reason="late", wasted=0)
    assert not caplog.records
    assert len(ours(items)) == len([event for event in record.events if event.name in ITEMS])


def test_nothing_of_a_run_is_kept(lab: Lab) -> None:
    model = lab.model(custom_events=True)
    graph = lab.chain(model)
    made: list[weakref.ref[Any]] = []
    original = Trace.also_to

    def remembering(self: Trace, sink: Any) -> Trace:
        trace = original(self, sink)
        made.extend([weakref.ref(trace), weakref.ref(sink)])
        return trace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trace, "also_to", remembering)
        list(graph.stream(TASK, stream_mode="custom"))
    assert len(made) == 4
    wait_until(lambda: not edges_on(model.pool), 5, "end of the edges")

    def gone() -> bool:
        gc.collect()
        return not any(each() for each in made)

    wait_until(gone, 5, "end of the traces")
    assert set(model.pool.health.traces) == {model.trace}


def test_engines_that_die_are_told_once_to_who_listens(lab: Lab) -> None:
    model = lab.model(custom_events=True)
    record = lab.record(model)
    list(lab.chain(model).stream(TASK, stream_mode="custom"))
    pool = model.pool

    async def die() -> None:
        pool.health.failed(0, EngineDead("gone"))

    pool.loop.run(die())
    assert len(record.named("engine.died")) == 1


def test_where_langgraph_is_not_understood_the_call_runs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def moved(task: Any) -> Any:
        raise KeyError("__pregel_runtime")

    monkeypatch.setattr(custom_events, "custom_stream", moved)
    graph = lab.chain(lab.model(custom_events=True))
    assert list(graph.stream(TASK, stream_mode="custom")) == []
    assert "cannot be streamed" in caplog.text


# -- the page that describes them --------------------------------------------------------------------------------


def test_events_that_are_of_no_use_to_a_front_end_are_left_out() -> None:
    assert to_item(Event("append.started", 1.0, "r", "n", "d", {"tokens": 1})) is None
    item = to_item(Event("generate.started", 1.0, "r", "n", "d", {"prompt_tokens": 1, "prompt_sha256": "x"}))
    assert item == {"type": "pingpong.call", "run": "r", "node": "n", "device": "d", "t": 1.0, "prompt_tokens": 1}


def test_the_page_names_every_item_and_its_fields() -> None:
    rows = re.findall(r"^\| `(pingpong\.\w+)` \|[^|]*\| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: tuple(re.findall(r"`(\w+)`", fields)) for name, fields in rows} == dict(ITEMS.values())
