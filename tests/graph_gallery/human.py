"""A human in the loop, and time travel: graphs that stop and go on, or go back."""

from __future__ import annotations

import sqlite3
import time
from typing import Annotated, Any, Literal

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Overwrite, interrupt
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.branches import speaker
from tests.graph_gallery.scene import SYNC_WAYS, Doing, Scene, Texts, ask, scenario, tasks


def three(model: ChatPingPong, effects: list[str], **compiling: Any) -> CompiledStateGraph[Any, Any, Any, Any]:
    """writer -> critic -> editor."""
    nodes = ("writer", "task", "draft"), ("critic", "draft", "notes"), ("editor", "notes", "final")
    sequence = [(role, speaker(model, role, reads, writes, effects)) for role, reads, writes in nodes]
    compiling.setdefault("checkpointer", InMemorySaver())
    return StateGraph(Texts).add_sequence(sequence).add_edge(START, "writer").compile(**compiling)


@scenario("writer -> a human -> editor")
def interrupt_in_a_node(model: ChatPingPong) -> Scene:
    """A node without a model asks a human; the answer goes into the next prompt."""
    effects: list[str] = []

    def human(state: Texts) -> dict[str, str]:
        effects.append("human")
        return {"notes": interrupt({"judge": state["draft"]})}

    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("human", human).add_node("editor", speaker(model, "editor", "notes", "final", effects))
    builder.add_edge(START, "writer").add_edge("writer", "human").add_edge("human", "editor")

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.note("waits for", graph.get_state(round_.config).next)
        round_.run(Command(resume=f"Say more about {round_.way}."))

    graph = builder.compile(checkpointer=InMemorySaver())
    return Scene(graph, tasks(), effects, story)


@scenario("writer (calls, asks twice, calls) -> editor")
def interrupts_between_calls(model: ChatPingPong) -> Scene:
    """A node that calls the model, asks a human twice, and calls again: it runs three times in all."""
    effects: list[str] = []

    def writer(state: Texts) -> dict[str, str]:
        effects.append("writer")
        draft = model.invoke(ask("writer", state["task"])).text
        first, second = interrupt("a title?"), interrupt("an end?")
        return {"draft": model.invoke(ask("second writer", f"{first}\n{draft}\n{second}")).text}

    builder = StateGraph(Texts).add_node("writer", writer).add_edge(START, "writer").add_edge("writer", "editor")
    builder.add_node("editor", speaker(model, "editor", "draft", "final", effects))

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run(Command(resume="Low tide"))
        round_.run(Command(resume="The end"))

    return Scene(builder.compile(checkpointer=InMemorySaver()), tasks(), effects, story)


@scenario("writer -> review: approved? -> editor | writer")
def approve_or_reject(model: ChatPingPong) -> Scene:
    """A human sends the draft back once, then lets it pass, by `Command(goto)`."""
    effects: list[str] = []

    def review(state: Texts) -> Command[Literal["editor", "writer"]]:
        if interrupt(state["draft"]) == "yes":
            return Command(goto="editor")
        return Command(goto="writer", update={"task": f"{state['task']} Not like this: {state['draft']}"})

    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("review", review).add_node("editor", speaker(model, "editor", "draft", "final", effects))
    builder.add_edge(START, "writer").add_edge("writer", "review")

    def story(round_: Doing) -> None:
        for given in (round_.input, Command(resume="no"), Command(resume="yes")):
            round_.run(given)

    return Scene(builder.compile(checkpointer=InMemorySaver()), tasks(), effects, story)


@scenario("poet, scholar (both ask) -> join", parallel=True)
def interrupts_at_the_same_time(model: ChatPingPong) -> Scene:
    """Two nodes ask at once; both are answered by the ids of their interrupts."""
    effects: list[str] = []

    def node(role: str, writes: str) -> Any:
        def speak(state: Texts) -> dict[str, str]:
            return {writes: model.invoke(ask(role, f"{state['task']} {interrupt(role)}")).text}

        return speak

    builder = StateGraph(Texts).add_node("poet", node("poet", "draft")).add_node("scholar", node("scholar", "notes"))
    builder.add_node("editor", speaker(model, "editor", "notes", "final", effects))
    builder.add_edge(START, "poet").add_edge(START, "scholar").add_edge(["poet", "scholar"], "editor")
    graph = builder.compile(checkpointer=InMemorySaver())

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        asked = graph.get_state(round_.config).interrupts  # type: ignore[arg-type]
        round_.run(Command(resume={each.id: f"Think of {each.value}." for each in asked}))

    return Scene(graph, tasks(), effects, story)


@scenario("writer -> [critic asks] -> editor")
def interrupt_in_a_subgraph(model: ChatPingPong) -> Scene:
    """The question comes from within a subgraph, after a model call there."""
    effects: list[str] = []

    def critic(state: Texts) -> dict[str, str]:
        effects.append("critic")
        return {"notes": f"{state['notes']} {interrupt('agreed?')}"}

    inner = StateGraph(Texts).add_node("clerk", speaker(model, "clerk", "draft", "notes", effects))
    inner.add_node("critic", critic).add_edge(START, "clerk").add_edge("clerk", "critic")
    builder = StateGraph(Texts).add_node("writer", speaker(model, "writer", "task", "draft", effects))
    builder.add_node("review", inner.compile()).add_edge(START, "writer").add_edge("writer", "review")
    builder.add_node("editor", speaker(model, "editor", "notes", "final", effects)).add_edge("review", "editor")
    graph = builder.compile(checkpointer=InMemorySaver())

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.note("inside", graph.get_state(round_.config, subgraphs=True))  # type: ignore[arg-type]
        round_.run(Command(resume="agreed"))

    return Scene(graph, tasks(), effects, story)


@scenario("writer -> | critic -> editor")
def stop_before_a_node(model: ChatPingPong) -> Scene:
    """`interrupt_before`: the draft is looked at, then the run goes on."""
    effects: list[str] = []
    graph = three(model, effects, interrupt_before=["critic"])

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run(None)

    return Scene(graph, tasks(), effects, story)


@scenario("writer -> | critic -> | editor", declared=())
def stop_after_nodes_of_a_run(model: ChatPingPong) -> Scene:
    """`interrupt_after` given with the run, on declared nodes."""

    def node(role: str, reads: str, writes: str) -> Any:
        return agent_node(model, prompt=lambda state: ask(role, state[reads]), writes=writes)

    nodes = ("writer", "task", "draft"), ("critic", "draft", "notes"), ("editor", "notes", "final")
    builder = StateGraph(Texts).add_sequence([(role, node(role, reads, writes)) for role, reads, writes in nodes])

    def story(round_: Doing) -> None:
        for given in (round_.input, None, None):
            round_.run(given, interrupt_after=["writer", "critic"])

    return Scene(builder.add_edge(START, "writer").compile(checkpointer=InMemorySaver()), tasks(), story=story)


@scenario("writer -> | (draft edited) critic -> editor")
def edited_state(model: ChatPingPong) -> Scene:
    """`update_state` replaces the draft while the run is stopped."""
    effects: list[str] = []
    graph = three(model, effects, interrupt_before=["critic"])

    def story(round_: Doing) -> None:
        draft = round_.run(round_.input)["draft"]
        graph.update_state(round_.config, {"draft": f"{draft} (edited)"})  # type: ignore[arg-type]
        round_.run(None)

    return Scene(graph, tasks(), effects, story)


def go_back(graph: CompiledStateGraph[Any, Any, Any, Any]) -> Any:
    """A story: run, run again from before the critic, then from there with another draft."""

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        before = [s for s in graph.get_state_history(round_.config) if s.next == ("critic",)][-1]  # type: ignore[arg-type]
        round_.run(None, before.config)
        other = graph.update_state(before.config, {"draft": "Another draft."})
        round_.run(None, other)
        round_.note("state", graph.get_state(round_.config))  # type: ignore[arg-type]

    return story


@scenario("writer -> critic -> editor, again from the critic, again with another draft")
def time_travel_in_memory(model: ChatPingPong) -> Scene:
    """History, a run from an old checkpoint, and a fork of it, with `InMemorySaver`."""
    effects: list[str] = []
    graph = three(model, effects)
    return Scene(graph, tasks(), effects, go_back(graph))


@scenario("writer -> critic -> editor, again from the critic, again with another draft")
def time_travel_in_sqlite(model: ChatPingPong) -> Scene:
    """The same with `SqliteSaver`, which is for sync runs."""
    effects: list[str] = []
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    graph = three(model, effects, checkpointer=SqliteSaver(connection))
    return Scene(graph, tasks(), effects, go_back(graph), ways=SYNC_WAYS, close=connection.close)


class Turns(TypedDict, total=False):
    """A conversation as one growing text."""

    said: Annotated[str, lambda before, new: f"{before}\n{new}"]


@scenario("writer, three turns on one thread")
def turns_on_one_thread(model: ChatPingPong) -> Scene:
    """A conversation: the state of a thread is kept from run to run; then it is overwritten."""
    effects: list[str] = []

    def writer(state: Turns) -> dict[str, str]:
        effects.append("writer")
        return {"said": model.invoke(ask("writer", state["said"])).text}

    builder = StateGraph(Turns).add_node("writer", writer).add_edge(START, "writer")

    def story(round_: Doing) -> None:
        for said in (round_.input, "And the crabs?", Overwrite("Start again.")):
            round_.run({"said": said})

    return Scene(builder.compile(checkpointer=InMemorySaver()), [task["task"] for task in tasks()], effects, story)


@scenario("clerk, critic (fails once) -> editor, run again", parallel=True, pure=False)
def resumed_after_an_error(model: ChatPingPong) -> Scene:
    """One of two nodes fails after its model call; the second run repeats only that one."""
    effects: list[str] = []

    def clerk(state: Texts) -> dict[str, str]:
        effects.append("clerk")
        return {"draft": state["task"].upper()}

    def critic(state: Texts) -> dict[str, str]:
        effects.append("critic")
        notes = model.invoke(ask("critic", state["task"])).text
        if effects.count("critic") == 1:
            time.sleep(0.1)  # until the other node has ended
            raise ValueError("the critic fell asleep")
        return {"notes": notes}

    builder = StateGraph(Texts).add_node("clerk", clerk).add_node("critic", critic)
    builder.add_edge(START, "clerk").add_edge(START, "critic")
    builder.add_node("editor", speaker(model, "editor", "draft", "final", effects))
    builder.add_edge(["clerk", "critic"], "editor")

    def story(round_: Doing) -> None:
        round_.run(round_.input, raises=ValueError)
        round_.run(None)

    return Scene(builder.compile(checkpointer=InMemorySaver()), tasks(), effects, story)


@scenario("writer -> critic -> editor, three durabilities")
def durabilities(model: ChatPingPong) -> Scene:
    """Checkpoints written at once, meanwhile, or at the end only."""
    effects: list[str] = []
    graph = three(model, effects)

    def story(round_: Doing) -> None:
        for durability in ("sync", "async", "exit"):
            thread = {"configurable": {"thread_id": f"{round_.config['configurable']['thread_id']} {durability}"}}
            round_.run(round_.input, thread, durability=durability)

    return Scene(graph, tasks(), effects, story, ways=("invoke", "stream", "astream"))
