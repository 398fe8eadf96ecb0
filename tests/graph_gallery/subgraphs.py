"""Graphs within graphs."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.branches import speaker
from tests.graph_gallery.chains import talk_inputs
from tests.graph_gallery.scene import Doing, Scene, Texts, ask, scenario, tasks


class Memo(TypedDict, total=False):
    """The state of a subgraph that shares no key with its parent."""

    text: str
    judged: str
    summary: str


def review(model: ChatPingPong, effects: list[str], **compiling: Any) -> Pregel[Any, Any, Any, Any]:
    """critic -> clerk over the keys of `Texts`."""
    builder = StateGraph(Texts).add_node("critic", speaker(model, "critic", "draft", "notes", effects))
    builder.add_node("clerk", speaker(model, "clerk", "notes", "plan", effects))
    return builder.add_edge(START, "critic").add_edge("critic", "clerk").compile(**compiling)


def memo(model: ChatPingPong, effects: list[str], **compiling: Any) -> Pregel[Any, Any, Any, Any]:
    """judge -> summarizer over the keys of `Memo`."""
    builder = StateGraph(Memo).add_node("judge", speaker(model, "judge", "text", "judged", effects))
    builder.add_node("summarizer", speaker(model, "summarizer", "judged", "summary", effects))
    return builder.add_edge(START, "judge").add_edge("judge", "summarizer").compile(**compiling)


@scenario("writer -> [critic -> clerk] -> editor")
def subgraph_as_node(model: ChatPingPong) -> Scene:
    """A compiled graph as a node, over the same keys."""
    effects: list[str] = []
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("review", review(model, effects))
    builder.add_node("editor", speaker(model, "editor", "plan", "final", effects))
    builder.add_edge(START, "writer").add_edge("writer", "review").add_edge("review", "editor")
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> [critic -> clerk] -> editor, declared", declared=("critic", "clerk"))
def subgraph_of_declared_nodes(model: ChatPingPong) -> Scene:
    """The same with declared nodes inside and outside."""

    def node(role: str, reads: str, writes: str) -> Any:
        return agent_node(model, prompt=lambda state: ask(role, state[reads]), writes=writes)

    inner = StateGraph(Texts).add_node("critic", node("critic", "draft", "notes"))
    inner.add_node("clerk", node("clerk", "notes", "plan")).add_edge(START, "critic").add_edge("critic", "clerk")
    nodes = ("writer", node("writer", "task", "draft")), ("review", inner.compile())
    builder = StateGraph(Texts).add_sequence([*nodes, ("editor", node("editor", "plan", "final"))])
    return Scene(builder.add_edge(START, "writer").compile(), tasks())


@scenario("writer -> function [judge -> summarizer] -> editor")
def subgraph_in_a_function(model: ChatPingPong) -> Scene:
    """A function that invokes a graph with another state, and translates both ways."""
    effects: list[str] = []
    inner = memo(model, effects)

    def ask_the_others(state: Texts) -> dict[str, str]:
        effects.append("ask the others")
        return {"notes": inner.invoke({"text": f"Draft: {state['draft']}"})["summary"]}

    nodes = ("writer", speaker(model, "writer", "task", "draft", effects)), ("others", ask_the_others)
    builder = StateGraph(Texts).add_sequence([*nodes, ("editor", speaker(model, "editor", "notes", "final", effects))])
    return Scene(builder.add_edge(START, "writer").compile(), tasks(), effects)


@scenario("writer -> [[critic -> clerk] -> poet] -> editor")
def nested_subgraphs(model: ChatPingPong) -> Scene:
    """Three levels, all compiled graphs as nodes."""
    effects: list[str] = []
    middle = StateGraph(Texts).add_node("review", review(model, effects))
    middle.add_node("poet", speaker(model, "poet", "plan", "final", effects))
    middle.add_edge(START, "review").add_edge("review", "poet")
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("middle", middle.compile(name="middle"))
    builder.add_node("editor", speaker(model, "editor", "final", "final", effects))
    builder.add_edge(START, "writer").add_edge("writer", "middle").add_edge("middle", "editor")
    return Scene(builder.compile(), tasks(), effects)


@scenario("[critic -> clerk] -> swap -> [critic -> clerk]")
def the_same_subgraph_twice(model: ChatPingPong) -> Scene:
    """One compiled graph as two nodes."""
    effects: list[str] = []
    inner = review(model, effects)
    nodes = ("first", inner), ("swap", lambda state: {"draft": state["plan"]}), ("second", inner)
    builder = StateGraph(Texts).add_sequence(nodes).add_edge(START, "first")
    return Scene(builder.compile(), [{"draft": task["task"]} for task in tasks()], effects)


@scenario("writer -> function [judge -> summarizer] twice -> end")
def subgraph_called_twice(model: ChatPingPong) -> Scene:
    """A function that invokes the same graph twice, the second time with the first result."""
    effects: list[str] = []
    inner = memo(model, effects, checkpointer=False)

    def twice(state: Texts) -> dict[str, str]:
        first = inner.invoke({"text": state["draft"]})["summary"]
        return {"notes": inner.invoke({"text": first})["summary"]}

    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("twice", twice).add_edge(START, "writer").add_edge("writer", "twice")
    return Scene(builder.compile(checkpointer=InMemorySaver()), tasks(), effects)


@scenario("writer -> [critic -Command(PARENT)-> editor | poet]")
def command_to_the_parent(model: ChatPingPong) -> Scene:
    """A node of a subgraph that sends its parent to another node, with an update."""
    effects: list[str] = []

    def critic(state: Texts) -> Command[Any]:
        effects.append("critic")
        notes = model.invoke(ask("critic", state["draft"])).text
        goto = "editor" if len(state["task"]) % 2 else "poet"
        return Command(graph=Command.PARENT, goto=goto, update={"notes": notes})

    inner = StateGraph(Texts).add_node("critic", critic).add_edge(START, "critic").compile()
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("review", inner, destinations=("editor", "poet"))
    builder.add_edge(START, "writer").add_edge("writer", "review")
    builder.add_node("editor", speaker(model, "editor", "notes", "final", effects))
    builder.add_node("poet", speaker(model, "poet", "notes", "final", effects))
    return Scene(builder.compile(), tasks(), effects)


class Collected(TypedDict, total=False):
    """Reports from several subgraphs."""

    task: str
    draft: str
    text: str
    summary: Annotated[list[str], operator.add]


@scenario("writer -Send-> [judge -> summarizer] x 2", parallel=True)
def subgraphs_by_send(model: ChatPingPong) -> Scene:
    """Two runs of a subgraph at the same time, each with another text."""
    effects: list[str] = []
    inner = memo(model, effects)

    def other_state(state: Any) -> dict[str, list[str]]:
        return {"summary": [inner.invoke(state)["summary"]]}

    def spread(state: Collected) -> list[Send]:
        return [Send("memo", {"text": f"{state['draft']} ({part})"}) for part in ("first half", "second half")]

    builder = StateGraph(Collected).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("memo", other_state).add_edge(START, "writer").add_conditional_edges("writer", spread, ["memo"])
    return Scene(builder.compile(), tasks(), effects)


@scenario("[critic -> clerk] beside [judge -> summarizer]", parallel=True)
def subgraphs_at_the_same_time(model: ChatPingPong) -> Scene:
    """Two different subgraphs in one superstep, one as a node and one in a function."""
    effects: list[str] = []
    inner = memo(model, effects)
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("review", review(model, effects))
    builder.add_node("memo", lambda state: {"final": inner.invoke({"text": state["draft"]})["summary"]})
    builder.add_edge(START, "writer").add_edge("writer", "review").add_edge("writer", "memo")
    return Scene(builder.compile(), tasks(), effects)


@scenario("[critic -> clerk] (keeps its state) -> editor, twice on one thread")
def subgraph_with_memory(model: ChatPingPong) -> Scene:
    """A subgraph with a memory of its own; every round has two turns on one thread."""
    effects: list[str] = []

    def critic(state: MessagesState) -> dict[str, Any]:
        effects.append("critic")
        return {"messages": [model.invoke(state["messages"])]}

    inner = StateGraph(MessagesState).add_node("critic", critic).add_edge(START, "critic").compile(checkpointer=True)
    builder = StateGraph(MessagesState).add_node("review", inner).add_node("editor", critic)
    builder.add_edge(START, "review").add_edge("review", "editor")

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run({"messages": [HumanMessage("And now in one word.", id="again")]})

    return Scene(builder.compile(checkpointer=InMemorySaver()), talk_inputs(), effects, story)
