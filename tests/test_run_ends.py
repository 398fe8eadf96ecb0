"""A run is over with its outermost graph, wherever in it the model was called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.config import get_config
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.edges import langgraph_internals
from langgraph_pingpong.edges.book import Shaping
from langgraph_pingpong.planning import Planner, planner_of
from tests.attentive import attentive
from tests.conftest import Lab, edges_on, leases_on, wait_until


class State(TypedDict, total=False):
    task: str
    a: str
    b: str


Node = Callable[[State], Any]


def calling(model: ChatPingPong, reads: str, writes: str) -> Node:
    return lambda state: {writes: model.invoke(f"You are the {writes}. " * 20 + state[reads]).text}


def within(node: Any, name: str = "call", **settings: Any) -> Any:
    """A graph of one node."""
    return StateGraph(State).add_node(name, node, **settings).add_edge(START, name).compile()


def row(first: Any, second: Any) -> Any:
    builder = StateGraph(State).add_node("first", first).add_node("second", second)
    builder.add_conditional_edges("first", lambda state: END if "stop" in state["task"] else "second", ["second", END])
    return builder.add_edge(START, "first").compile()


def subgraphs(model: ChatPingPong) -> Any:
    return row(within(calling(model, "task", "a")), within(calling(model, "a", "b")))


def deep_subgraphs(model: ChatPingPong) -> Any:
    return row(within(within(calling(model, "task", "a")), "mid"), within(within(calling(model, "a", "b")), "mid"))


def with_a_timeout(model: ChatPingPong) -> Any:
    """What schedules tasks is wrapped for such a node, which has to be asynchronous."""

    async def first(state: State) -> dict[str, Any]:
        return {"a": (await model.ainvoke("You are the a. " + state["task"])).text}

    return within(within(first), "first", timeout=60)


def called_by_hand(model: ChatPingPong) -> Any:
    inner = within(calling(model, "task", "a"))
    return within(lambda state: inner.invoke(state) | inner.invoke(state))


def tasks(model: ChatPingPong) -> Any:
    @task
    def ask(prompt: str) -> str:
        return str(model.invoke(prompt).text)

    @entrypoint()
    def flow(state: State) -> State:
        return {"b": ask(ask(state["task"]).result()).result()}

    return flow


def tasks_in_a_node(model: ChatPingPong) -> Any:
    return within(tasks(model), "flow_node")


def subgraph_in_a_task(model: ChatPingPong) -> Any:
    inner = subgraphs(model)

    @task
    def ask(state: State) -> Any:
        return inner.invoke(state)

    @entrypoint()
    def flow(state: State) -> Any:
        return ask(state).result()

    return flow


SHAPES = [subgraphs, deep_subgraphs, called_by_hand, tasks, tasks_in_a_node, subgraph_in_a_task]


def is_over(model: ChatPingPong) -> bool:
    assert model.pool is not None
    return not (model.pool.open_runs or planner_of(model.pool)._books or edges_on(model.pool) or leases_on(model.pool))


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_kept_of_a_run_of_any_shape(shape: Any, overlap: Any, lab: Lab) -> None:
    model = lab.model(overlap=overlap)
    graph = shape(model)
    for number in range(3):
        graph.invoke({"task": f"number {number}"})
        wait_until(lambda: is_over(model), 2, "end of the run")


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("shape", [subgraphs, with_a_timeout])
def test_nor_of_an_asynchronous_one(shape: Any, overlap: Any, lab: Lab) -> None:
    model = lab.model(overlap=overlap)
    graph = shape(model)
    for number in range(2):
        asyncio.run(graph.ainvoke({"task": f"number {number}"}))
        wait_until(lambda: is_over(model), 2, "end of the run")


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_run_is_not_over_with_a_subgraph(overlap: Any, lab: Lab) -> None:
    model = lab.model(overlap=overlap)
    seen: list[int] = []

    def between(state: State) -> dict[str, str]:
        assert model.pool is not None
        seen.append(model.pool.open_runs)
        return {"b": ""}

    row(within(calling(model, "task", "a")), between).invoke({"task": "number"})
    assert seen == [1]


def test_runs_one_after_the_other_start_alike(lab: Lab) -> None:
    model = lab.model()
    recorder = lab.record(model)
    graph = subgraphs(model)
    for number in range(4):
        graph.invoke({"task": f"number {number}"})
        wait_until(lambda: is_over(model), 2, "end of the run")
    assert [event.device for event in recorder.named("generate.started", "call")] == ["fake:0", "fake:1"] * 4


def test_an_edge_out_of_a_subgraph_ends_with_the_run(lab: Lab) -> None:
    model = lab.model()
    recorder = lab.record(model)
    graph = subgraphs(model)
    for number in range(3):
        graph.invoke({"task": f"number {number}"})
    graph.invoke({"task": "stop now"})
    assert recorder.wait_for("edge.dropped", within_s=2).data["reason"] == "run ended"
    wait_until(lambda: is_over(model), 2, "end of the run")


def test_no_edge_leaves_a_call_that_outlives_its_run(lab: Lab) -> None:
    """A synchronous node cannot be interrupted; its answer's first token comes when the run was cancelled."""
    model = lab.model(speed={"prefill_speed": 2000.0})
    record, builder = lab.record(model), StateGraph(State)
    builder.add_node("first", calling(model, "task", "a")).add_node("second", calling(model, "a", "b"))
    graph = builder.add_edge(START, "first").add_edge("first", "second").add_edge("second", END).compile()
    for number in range(2):
        graph.invoke({"task": f"Number {number}."})
    assert record.named("append.started", "second")
    record.events.clear()

    async def cancelled() -> None:
        run = asyncio.create_task(graph.ainvoke({"task": "Number 3."}))
        await asyncio.to_thread(record.wait_for, "generate.started", "first")
        run.cancel()
        await asyncio.wait([run])

    asyncio.run(cancelled())
    record.wait_for("finish", "first")
    assert not record.named("append.started")
    assert edges_on(model.pool) == []
    wait_until(lambda: leases_on(model.pool) == 0, 2, "the place given back")


def graph_and_call_in_a_node(model: ChatPingPong) -> Any:
    """A function that invokes a graph, and then calls the model itself."""
    inner, own = within(calling(model, "task", "a")), calling(model, "a", "b")
    return within(lambda state: own(inner.invoke({"task": state["task"]})), "node")


def graph_and_task_in_a_flow(model: ChatPingPong) -> Any:
    inner, own = within(calling(model, "task", "a")), task(calling(model, "a", "b"), name="node")
    return entrypoint()(lambda given: own(inner.invoke(given)).result())


@pytest.mark.parametrize("shape", [graph_and_call_in_a_node, graph_and_task_in_a_flow])
def test_an_edge_from_a_graph_to_the_function_that_runs_it_does_not_end_with_the_graph(shape: Any, lab: Lab) -> None:
    model = attentive(lab.model())
    recorder = lab.record(model)
    graph = shape(model)
    for number in range(2):
        graph.invoke({"task": f"number {number}"})
    wait_until(lambda: is_over(model), 2, "end of the run")
    assert not recorder.named("edge.dropped")
    certificate = recorder.certificate("node")
    assert (certificate["upstream"], certificate["wasted"]) == ("call", 0)
    assert certificate["streamed"] > 0


def test_nothing_is_planned_for_a_node_that_is_over(lab: Lab) -> None:
    """It may leave an answer early, and go on while the plan of that answer begins."""
    model = lab.model()
    seen: list[Any] = []
    within(lambda state: seen.append(langgraph_internals.running_task(get_config()))).invoke({"task": "number"})
    template = model._serving().template
    planned = Planner().begin(seen[0], [], template, Shaping(), lambda model, more: None)
    assert not asyncio.run(planned.plan())


def test_a_graph_around_that_cannot_be_found_ends_with_the_subgraph(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert langgraph_internals.usable()
    monkeypatch.setattr("langgraph_pingpong.edges.langgraph_loops.loop_of", lambda call: call.moved)
    model = lab.model()
    assert subgraphs(model).invoke({"task": "number"})["b"]
    wait_until(lambda: is_over(model), 2, "end of the run")
