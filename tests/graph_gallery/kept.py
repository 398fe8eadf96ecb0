"""Runs kept in SQLite: gone on with from another loop, another connection, another graph object."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.branches import speaker
from tests.graph_gallery.scene import Doing, Scene, Texts, ask, scenario, tasks


def with_a_human(model: ChatPingPong, effects: list[str]) -> StateGraph[Any, Any, Any, Any]:
    """writer -> a human -> editor -> critic."""

    def human(state: Texts) -> dict[str, str]:
        effects.append("human")
        return {"notes": interrupt({"judge": state["draft"]})}

    nodes = ("writer", speaker(model, "writer", "task", "draft", effects)), ("human", human)
    last = (
        ("editor", agent_node(model, prompt=lambda state: ask("editor", state["notes"]), writes="final")),
        ("critic", agent_node(model, prompt=lambda state: ask("critic", state["final"]), writes="plan")),
    )
    return StateGraph(Texts).add_sequence([*nodes, *last]).add_edge(START, "writer")


@scenario("writer -> a human -> editor -> critic, gone on with by another graph object", declared=("critic",))
def resumed_by_another_graph(model: ChatPingPong) -> Scene:
    """The run stops at a question; another graph, on another connection to the file, goes on with it."""
    effects: list[str] = []
    folder = tempfile.TemporaryDirectory()
    graph = with_a_human(model, effects).compile()

    def part(round_: Doing, given: Any) -> None:
        with SqliteSaver.from_conn_string(str(Path(folder.name) / "runs.sqlite")) as saver:
            own = with_a_human(model, effects).compile(checkpointer=saver)
            round_.run(given, graph=own)
            round_.note("next", own.get_state(round_.config).next)  # type: ignore[arg-type]

    def story(round_: Doing) -> None:
        part(round_, round_.input)
        part(round_, Command(resume=f"Say more about {round_.way}."))

    return Scene(graph, tasks(), effects, story, ways=("invoke", "stream", "events3"), close=folder.cleanup)


@scenario("writer -> a human -> editor -> critic, in async SQLite, with time travel", declared=("critic",))
def async_sqlite(model: ChatPingPong) -> Scene:
    """`AsyncSqliteSaver`: stop, go on, go back to the question, answer otherwise; each in a loop of its own."""
    effects: list[str] = []
    folder = tempfile.TemporaryDirectory()
    graph = with_a_human(model, effects).compile()

    async def part(round_: Doing, given: Any, back: bool = False) -> None:
        async with AsyncSqliteSaver.from_conn_string(str(Path(folder.name) / "runs.sqlite")) as saver:
            own = with_a_human(model, effects).compile(checkpointer=saver)
            config: Any = round_.config
            if back:
                history = [state async for state in own.aget_state_history(config)]
                config = {**config, **next(state for state in history if state.next == ("human",)).config}
            modes: Any = ["values", "updates", "messages", "checkpoints"]
            round_.note("parts", [each async for each in own.astream(given, config, stream_mode=modes)])
            round_.note("history", [state async for state in own.aget_state_history(round_.config)])  # type: ignore[arg-type]

    def story(round_: Doing) -> None:
        asyncio.run(part(round_, round_.input))
        asyncio.run(part(round_, Command(resume="Say more.")))
        asyncio.run(part(round_, None, back=True))
        asyncio.run(part(round_, Command(resume="Say less.")))

    return Scene(graph, tasks(), effects, story, ways=("astream", "astream"), close=folder.cleanup)


@scenario("writer -> critic -> editor, one thread of SQLite, two graphs in turn", declared=("critic", "editor"))
def graphs_that_share_a_thread(model: ChatPingPong) -> Scene:
    """Two graph objects of the same nodes go on with one conversation by turns."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)

    def build() -> Any:
        nodes = ("writer", "task", "draft"), ("critic", "draft", "notes"), ("editor", "notes", "final")
        builder = StateGraph(Texts)
        builder.add_sequence([(role, _declared(model, role, reads, writes)) for role, reads, writes in nodes])
        return builder.add_edge(START, "writer").compile(checkpointer=SqliteSaver(connection))

    first, second = build(), build()

    def story(round_: Doing) -> None:
        for number, graph in enumerate((first, second, first)):
            round_.run({"task": f"{round_.input['task']} ({number})"}, graph=graph)

    return Scene(first, tasks(), story=story, ways=("invoke", "stream"), close=connection.close)


def _declared(model: ChatPingPong, role: str, reads: str, writes: str) -> Any:
    return agent_node(model, prompt=lambda state: ask(role, state[reads]), writes=writes)
