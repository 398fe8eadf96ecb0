"""Graphs whose next node is chosen while they run: Command, conditional edges, routers, loops."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, StateGraph
from langgraph.managed import RemainingSteps
from langgraph.types import Command
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.scene import Scene, Texts, ask, failing_with, scenario, tasks


def speaker(model: ChatPingPong, role: str, reads: str, writes: str, effects: list[str]) -> Any:
    """An ordinary node: reads one key, asks the model, writes another key."""

    def node(state: Any) -> dict[str, str]:
        effects.append(role)
        return {writes: model.invoke(ask(role, state[reads])).text}

    return node


@scenario("writer -Command-> critic")
def command_goto(model: ChatPingPong) -> Scene:
    """A node that returns `Command(goto, update)` and has no edge."""
    effects: list[str] = []

    def writer(state: Texts) -> Command[Literal["critic"]]:
        effects.append("writer")
        return Command(goto="critic", update={"draft": model.invoke(ask("writer", state["task"])).text})

    builder = StateGraph(Texts).add_node("writer", writer).add_edge(START, "writer")
    builder.add_node("critic", speaker(model, "critic", "draft", "notes", effects))
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> critic, and writer -Command-> editor", parallel=True)
def command_beside_an_edge(model: ChatPingPong) -> Scene:
    """`goto` adds a route: the edge's target runs as well."""
    effects: list[str] = []

    def writer(state: Texts) -> Command[Literal["editor"]]:
        return Command(goto="editor", update={"draft": model.invoke(ask("writer", state["task"])).text})

    builder = StateGraph(Texts).add_node("writer", writer).add_edge(START, "writer").add_edge("writer", "critic")
    builder.add_node("critic", speaker(model, "critic", "draft", "notes", effects))
    builder.add_node("editor", speaker(model, "editor", "draft", "final", effects))
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> critic | editor")
def conditional_edge(model: ChatPingPong) -> Scene:
    """The next node depends on what the writer said."""
    effects: list[str] = []

    def by_text(state: Texts) -> Literal["critic", "editor"]:
        effects.append("by text")
        return "critic" if sum(map(ord, state["draft"])) % 2 else "editor"

    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("critic", speaker(model, "critic", "draft", "notes", effects))
    builder.add_node("editor", speaker(model, "editor", "draft", "final", effects))
    builder.add_edge(START, "writer").add_conditional_edges("writer", by_text)
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer (declared) -> critic (declared) | end", declared=("critic",))
def conditional_end(model: ChatPingPong) -> Scene:
    """Declared nodes behind a conditional edge that may also end the graph."""
    effects: list[str] = []

    def enough(state: Texts) -> str:
        effects.append("enough")
        return "stop" if len(state["task"]) > 50 else "go on"

    writer = agent_node(model, prompt=lambda state: ask("writer", state["task"]), writes="draft")
    critic = agent_node(model, prompt=lambda state: ask("critic", state["draft"]), writes="notes")
    builder = StateGraph(Texts).add_node("writer", writer).add_node("critic", critic).add_edge(START, "writer")
    builder.add_conditional_edges("writer", enough, {"stop": END, "go on": "critic"})
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> critic | editor | clerk -> poet, declared", declared=("critic", "editor", "clerk", "poet"))
def conditional_edge_of_declared_nodes(model: ChatPingPong) -> Scene:
    """Three declared nodes behind a conditional edge, each taken in one round, which lead to the same node."""
    effects: list[str] = []

    def by_task(state: Texts) -> Literal["critic", "editor", "clerk"]:
        effects.append("by task")
        return "critic" if "two lines" in state["task"] else "editor" if "List" in state["task"] else "clerk"

    def node(role: str, reads: str, writes: str) -> Any:
        return agent_node(model, prompt=lambda state: ask(role, state[reads]), writes=writes)

    builder = StateGraph(Texts).add_node("writer", node("writer", "task", "draft")).add_edge(START, "writer")
    builder.add_conditional_edges("writer", by_task).add_node("poet", node("poet", "notes", "final"))
    for name in ("critic", "editor", "clerk"):
        builder.add_node(name, node(name, "draft", "notes")).add_edge(name, "poet")
    return Scene(builder.compile(), tasks(), effects)


@scenario(
    "router -> poet | scholar | clerk -> editor",
    replies={"two lines": "poet", "List three": "scholar", "Why is": "clerk"},
)
def router(model: ChatPingPong) -> Scene:
    """A model call picks one of three targets, which lead to the same node."""
    effects: list[str] = []
    experts = ("poet", "scholar", "clerk")

    def route(state: Texts) -> Texts:
        effects.append("router")
        return {"plan": model.invoke(ask("router", state["task"])).text}

    builder = StateGraph(Texts).add_node("router", route).add_edge(START, "router")
    builder.add_conditional_edges("router", lambda state: state["plan"], list(experts))
    for name in experts:
        builder.add_node(name, speaker(model, name, "plan", "draft", effects)).add_edge(name, "editor")
    builder.add_node("editor", speaker(model, "editor", "draft", "final", effects))
    return Scene(builder.compile(), tasks(), effects)


@scenario("start -> writer | critic")
def conditional_start(model: ChatPingPong) -> Scene:
    """The first node depends on the input."""
    effects: list[str] = []
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("critic", speaker(model, "critic", "task", "notes", effects))
    builder.add_conditional_edges(START, lambda state: "writer" if "tide" in state["task"] else "critic")
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> some of critic, editor, clerk", parallel=True)
def conditional_several(model: ChatPingPong) -> Scene:
    """A conditional edge that returns a list of targets, with a second conditional edge beside it."""
    effects: list[str] = []

    def some(state: Texts) -> list[str]:
        return ["critic", "editor"] if len(state["task"]) % 2 else ["editor"]

    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    for name, writes in (("critic", "notes"), ("editor", "final"), ("clerk", "plan")):
        builder.add_node(name, speaker(model, name, "draft", writes, effects))
    builder.add_edge(START, "writer").add_conditional_edges("writer", some, ["critic", "editor"])
    builder.add_conditional_edges("writer", lambda state: "clerk", ["clerk"])
    return Scene(builder.compile(), tasks(), effects)


class Revisions(TypedDict, total=False):
    """A draft, and how often it was revised."""

    task: str
    draft: str
    notes: str
    log: Annotated[list[str], operator.add]
    left: RemainingSteps


@scenario("writer <-> critic, until accepted")
def loop_until_accepted(model: ChatPingPong) -> Scene:
    """A writer and a critic take turns until the third draft."""
    effects: list[str] = []

    def writer(state: Revisions) -> dict[str, Any]:
        effects.append("writer")
        before = f"\nDraft:\n{state['draft']}\nNotes:\n{state['notes']}" if "notes" in state else ""
        draft = model.invoke(ask("writer", state["task"] + before)).text
        return {"draft": draft, "log": [draft]}

    builder = StateGraph(Revisions).add_node("writer", writer).add_edge(START, "writer").add_edge("writer", "critic")
    builder.add_node("critic", speaker(model, "critic", "draft", "notes", effects))
    builder.add_conditional_edges("critic", lambda state: END if len(state["log"]) == 3 else "writer")
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer <-> critic, declared", declared=("critic",))
def loop_of_declared_nodes(model: ChatPingPong) -> Scene:
    """The same loop of declared nodes."""

    def writer_prompt(state: Revisions) -> Any:
        return ask("writer", f"{state['task']}\n{state.get('draft', '')}\n{state.get('notes', '')}")

    writer = agent_node(model, prompt=writer_prompt, writes=lambda answer: {"draft": answer.text, "log": [answer.text]})
    critic = agent_node(model, prompt=lambda state: ask("critic", state["draft"]), writes="notes")
    builder = StateGraph(Revisions).add_node("writer", writer).add_node("critic", critic)
    builder.add_edge(START, "writer").add_edge("writer", "critic")
    builder.add_conditional_edges("critic", lambda state: END if len(state["log"]) == 2 else "writer")
    return Scene(builder.compile(), tasks())


@scenario("writer -> writer -> ...")
def loop_with_command(model: ChatPingPong) -> Scene:
    """A node that sends itself back to itself."""
    effects: list[str] = []

    def writer(state: Revisions) -> Command[Literal["writer", "__end__"]]:
        effects.append("writer")
        draft = model.invoke(ask("writer", state.get("draft") or state["task"])).text
        goto = "writer" if len(state.get("log", [])) < 2 else END
        return Command(goto=goto, update={"draft": draft, "log": [draft]})

    return Scene(StateGraph(Revisions).add_node("writer", writer).add_edge(START, "writer").compile(), tasks(), effects)


@scenario("writer <-> critic, without an end")
def recursion_limit_hit(model: ChatPingPong) -> Scene:
    """A loop that runs into the recursion limit."""
    effects: list[str] = []
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("critic", speaker(model, "critic", "draft", "task", effects))
    builder.add_edge(START, "writer").add_edge("writer", "critic").add_edge("critic", "writer")
    return Scene(
        builder.compile(), tasks(), effects, config={"recursion_limit": 3}, story=failing_with(GraphRecursionError)
    )


@scenario("writer -> writer -> ... until two steps are left")
def remaining_steps(model: ChatPingPong) -> Scene:
    """A managed value: the node sees how many steps are left, and puts it into its prompt."""
    effects: list[str] = []

    def writer(state: Revisions) -> dict[str, Any]:
        effects.append("writer")
        draft = model.invoke(ask("writer", f"{state.get('draft', '')}\n{state['left']} steps are left.")).text
        return {"draft": draft, "log": [draft]}

    builder = StateGraph(Revisions).add_node("writer", writer).add_edge(START, "writer")
    builder.add_conditional_edges("writer", lambda state: END if state["left"] <= 2 else "writer")
    return Scene(builder.compile(), tasks(), effects, config={"recursion_limit": 5})
