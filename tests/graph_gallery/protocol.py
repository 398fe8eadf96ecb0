"""`stream_events` in its third version: of graphs, and of the model within nodes."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from langgraph_pingpong import ChatPingPong
from tests.graph_gallery.agents import call, tide_tool, tool_user
from tests.graph_gallery.branches import speaker
from tests.graph_gallery.chains import chain, talk_inputs
from tests.graph_gallery.scene import ASYNC_WAYS, Doing, Scene, Texts, ask, scenario, tasks
from tests.graph_gallery.streaming import declared_pair

EVENT_WAYS = ("events3", "aevents3", "events3", "aevents3")


@scenario("writer -> critic (declared), events of version 3", declared=("critic",))
def third_events(model: ChatPingPong) -> Scene:
    """`stream_events` and `astream_events` with version 3, which drive the model by another method than `stream`."""
    return Scene(declared_pair(model), tasks(), ways=EVENT_WAYS)


@scenario("writer -> a human -> editor, events of version 3")
def third_events_with_an_interrupt(model: ChatPingPong) -> Scene:
    """The run stops in the middle of the events, and is resumed by them."""
    effects: list[str] = []

    def human(state: Texts) -> dict[str, str]:
        return {"notes": interrupt(state["draft"])}

    nodes = ("writer", speaker(model, "writer", "task", "draft", effects)), ("human", human)
    builder = StateGraph(Texts).add_sequence([*nodes, ("editor", speaker(model, "editor", "notes", "final", effects))])
    graph = builder.add_edge(START, "writer").compile(checkpointer=InMemorySaver())

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run(Command(resume="Say more."))

    return Scene(graph, tasks(), effects, story, ways=EVENT_WAYS)


@scenario("agent <-> tool, events of version 3", replies=tool_user(call("tide_time", place="Oslo")))
def third_events_of_an_agent(model: ChatPingPong) -> Scene:
    """Tool calls come as blocks of their own."""
    effects: list[str] = []
    agent = create_agent(model, [tide_tool(effects)], system_prompt="You are the researcher.")
    return Scene(agent, talk_inputs(), effects, ways=EVENT_WAYS)


@scenario("writer (model.stream_events) -> critic (model.astream_events)")
def third_events_inside_nodes(model: ChatPingPong) -> Scene:
    """Nodes that read the model's own events of version 3."""

    def writer(state: Texts) -> dict[str, str]:
        stream: Any = model.stream_events(ask("writer", state["task"]), version="v3")
        return {"draft": "".join(stream.text)}

    async def critic(state: Texts) -> dict[str, str]:
        stream: Any = await model.astream_events(ask("critic", state["draft"]), version="v3")
        pieces = [piece async for piece in stream.text]
        return {"notes": f"{len(pieces) > 1} {(await stream.output).text}"}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks(), ways=ASYNC_WAYS)


@scenario("writer -> critic (declared), three runs of events at once", parallel=True, declared=("critic",))
def third_events_at_once(model: ChatPingPong) -> Scene:
    """Several runs in one loop, each read to its end."""
    graph = declared_pair(model)

    async def output(given: Any, config: Any) -> Any:
        run: Any = await graph.astream_events(given, config, version="v3")
        return await run.output()

    async def all_at_once(config: Any) -> list[Any]:
        return await asyncio.gather(*(output(given, config) for given in tasks()))

    def story(round_: Doing) -> None:
        round_.note("results", asyncio.run(all_at_once(round_.config)))

    return Scene(graph, tasks(), story=story, ways=("ainvoke", "ainvoke"))
