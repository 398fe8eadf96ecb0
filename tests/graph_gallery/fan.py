"""Nodes at the same time: Send, fan-out, fan-in, and joins that wait."""

from __future__ import annotations

import json
import operator
from typing import Annotated, Any

from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.branches import speaker
from tests.graph_gallery.scene import ASYNC_WAYS, Scene, Texts, ask, scenario, tasks


class Survey(TypedDict, total=False):
    """Reports from several workers."""

    task: str
    draft: str
    reports: Annotated[list[str], operator.add]
    final: str


class Errand(TypedDict):
    """What a worker is sent."""

    topic: str
    draft: str


def reducer(model: ChatPingPong, effects: list[str]) -> Any:
    """A node that reads all reports."""

    def join(state: Survey) -> dict[str, str]:
        effects.append("join")
        return {"final": model.invoke(ask("join", "\n".join(state["reports"]))).text}

    return join


def worker(model: ChatPingPong, effects: list[str]) -> Any:
    """A node that gets an errand instead of the state."""

    def work(errand: Errand) -> dict[str, list[str]]:
        effects.append("worker")
        text = model.invoke(ask(f"worker for {errand['topic']}", errand["draft"])).text
        return {"reports": [f"{errand['topic']}: {text}"]}

    return work


@scenario("writer -Send-> 3 workers -> join", parallel=True)
def send_the_whole_draft(model: ChatPingPong) -> Scene:
    """Map-reduce: three workers get the whole draft, each another topic."""
    effects: list[str] = []

    def spread(state: Survey) -> list[Send]:
        return [Send("worker", {"topic": topic, "draft": state["draft"]}) for topic in ("style", "facts", "length")]

    builder = StateGraph(Survey).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("worker", worker(model, effects)).add_node("join", reducer(model, effects))
    builder.add_edge(START, "writer").add_conditional_edges("writer", spread, ["worker"]).add_edge("worker", "join")
    return Scene(builder.compile(), tasks(), effects)


@scenario(
    "planner -Send-> a worker per item -> join", parallel=True, replies={"the planner": '["crab", "kelp", "gull"]'}
)
def send_a_parsed_list(model: ChatPingPong) -> Scene:
    """Map-reduce over the items of a JSON list that the planner says."""
    effects: list[str] = []

    def spread(state: Survey) -> list[Send]:
        return [Send("worker", {"topic": topic, "draft": state["task"]}) for topic in json.loads(state["draft"])]

    builder = StateGraph(Survey).add_node("planner", speaker(model, "planner", "task", "draft", effects))
    builder.add_node("worker", worker(model, effects)).add_node("join", reducer(model, effects))
    builder.add_edge(START, "planner").add_conditional_edges("planner", spread, ["worker"]).add_edge("worker", "join")
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -Command(goto=[Send, Send])-> worker, worker", parallel=True)
def send_in_a_command(model: ChatPingPong) -> Scene:
    """Two errands and an update in one `Command`."""
    effects: list[str] = []

    def writer(state: Survey) -> Command[Any]:
        draft = model.invoke(ask("writer", state["task"])).text
        errands = [Send("worker", {"topic": topic, "draft": draft}) for topic in ("style", "facts")]
        return Command(update={"draft": draft}, goto=errands)

    builder = StateGraph(Survey).add_node("writer", writer, destinations=("worker",)).add_edge(START, "writer")
    builder.add_node("worker", worker(model, effects))
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> critic, editor, clerk", parallel=True)
def fan_out(model: ChatPingPong) -> Scene:
    """Three nodes read the same draft at the same time."""
    effects: list[str] = []
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    for name, writes in (("critic", "notes"), ("editor", "final"), ("clerk", "plan")):
        builder.add_node(name, speaker(model, name, "draft", writes, effects)).add_edge("writer", name)
    return Scene(builder.add_edge(START, "writer").compile(), tasks(), effects)


@scenario("writer -> critic, editor, clerk (declared)", parallel=True, declared=("critic", "editor", "clerk"))
def fan_out_of_declared_nodes(model: ChatPingPong) -> Scene:
    """The same with declared nodes."""

    def node(role: str, reads: str, writes: str) -> Any:
        return agent_node(model, prompt=lambda state: ask(role, state[reads]), writes=writes)

    builder = StateGraph(Texts).add_node("writer", node("writer", "task", "draft")).add_edge(START, "writer")
    for name, writes in (("critic", "notes"), ("editor", "final"), ("clerk", "plan")):
        builder.add_node(name, node(name, "draft", writes)).add_edge("writer", name)
    return Scene(builder.compile(), tasks())


@scenario("poet, scholar -> join", parallel=True)
def fan_in(model: ChatPingPong) -> Scene:
    """Two nodes at the same time, and one that reads both."""
    effects: list[str] = []

    def join(state: Texts) -> dict[str, str]:
        effects.append("join")
        return {"final": model.invoke(ask("join", f"{state['draft']}\n{state['notes']}")).text}

    builder = StateGraph(Texts).add_node("poet", speaker(model, "poet", "task", "draft", effects))
    builder.add_node("scholar", speaker(model, "scholar", "task", "notes", effects)).add_node("join", join)
    builder.add_edge(START, "poet").add_edge(START, "scholar").add_edge("poet", "join").add_edge("scholar", "join")
    return Scene(builder.compile(), tasks(), effects)


@scenario("poet, scholar -> join (async)", parallel=True)
def fan_in_async(model: ChatPingPong) -> Scene:
    """The same with async functions, joined by one edge from both."""
    effects: list[str] = []

    def node(role: str) -> Any:
        async def speak(state: Survey) -> dict[str, Any]:
            effects.append(role)
            return {"reports": [(await model.ainvoke(ask(role, state["task"]))).text]}

        return speak

    async def join(state: Survey) -> dict[str, str]:
        return {"final": (await model.ainvoke(ask("join", "\n".join(state["reports"])))).text}

    builder = StateGraph(Survey).add_node("poet", node("poet")).add_node("scholar", node("scholar"))
    builder.add_node("join", join).add_edge(START, "poet").add_edge(START, "scholar")
    return Scene(builder.add_edge(["poet", "scholar"], "join").compile(), tasks(), effects, ways=ASYNC_WAYS)


def unequal_branches(model: ChatPingPong, effects: list[str]) -> StateGraph[Any, Any, Any, Any]:
    """writer -> critic -> editor beside writer -> clerk."""
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("critic", speaker(model, "critic", "draft", "notes", effects)).add_edge("writer", "critic")
    builder.add_node("editor", speaker(model, "editor", "notes", "final", effects)).add_edge("critic", "editor")
    builder.add_node("clerk", speaker(model, "clerk", "draft", "plan", effects)).add_edge("writer", "clerk")
    return builder.add_edge(START, "writer")


def join_both(model: ChatPingPong, effects: list[str]) -> Any:
    """A node that reads the ends of both branches."""

    def join(state: Texts) -> dict[str, str]:
        effects.append("join")
        return {"task": model.invoke(ask("join", f"{state.get('plan')}\n{state.get('final')}")).text}

    return join


@scenario("writer -> (critic -> editor), clerk -> join (defer)", parallel=True)
def deferred_join(model: ChatPingPong) -> Scene:
    """Branches of unequal length, and a join with `defer=True`."""
    effects: list[str] = []
    builder = unequal_branches(model, effects).add_node("join", join_both(model, effects), defer=True)
    builder.add_edge("editor", "join").add_edge("clerk", "join").add_edge("join", END)
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> (critic -> editor), clerk -> join (waits for both)", parallel=True)
def waiting_join(model: ChatPingPong) -> Scene:
    """Branches of unequal length, and an edge from both."""
    effects: list[str] = []
    builder = unequal_branches(model, effects).add_node("join", join_both(model, effects))
    return Scene(builder.add_edge(["editor", "clerk"], "join").compile(), tasks(), effects)


@scenario("writer -> (critic -> editor), clerk -> join (twice)", parallel=True)
def join_that_runs_twice(model: ChatPingPong) -> Scene:
    """Branches of unequal length, and a join that runs for each."""
    effects: list[str] = []
    builder = unequal_branches(model, effects).add_node("join", join_both(model, effects))
    return Scene(builder.add_edge("editor", "join").add_edge("clerk", "join").compile(), tasks(), effects)
