"""What can be seen from outside: custom events, tags, callbacks, usage; and many runs at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.tracers.context import collect_runs
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from langgraph.types import StreamWriter

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.branches import speaker
from tests.graph_gallery.chains import chain
from tests.graph_gallery.running import CallbackCounter
from tests.graph_gallery.scene import TASKS, Doing, Scene, Texts, ask, scenario, tasks


def pair(model: ChatPingPong, effects: list[str]) -> Any:
    """writer -> critic."""
    writer = ("writer", speaker(model, "writer", "task", "draft", effects))
    return chain(writer, ("critic", speaker(model, "critic", "draft", "notes", effects)))


def declared_pair(model: ChatPingPong) -> Any:
    """writer -> critic, declared."""
    writer = agent_node(model, prompt=lambda state: ask("writer", state["task"]), writes="draft")
    critic = agent_node(model, prompt=lambda state: ask("critic", state["draft"]), writes="notes")
    return chain(("writer", writer), ("critic", critic))


@scenario("writer -> critic, custom events")
def custom_events(model: ChatPingPong) -> Scene:
    """`get_stream_writer` and an injected writer, before, while and after the model speaks."""

    def writer(state: Texts) -> dict[str, str]:
        write = get_stream_writer()
        write({"started": state["task"]})
        pieces = []
        for chunk in model.stream(ask("writer", state["task"])):
            pieces.append(chunk.text)
            if len(pieces) % 20 == 0:
                write({"said": len(pieces)})
        return {"draft": "".join(pieces)}

    def critic(state: Texts, writer: StreamWriter) -> dict[str, str]:
        notes = model.invoke(ask("critic", state["draft"])).text
        writer({"notes": notes})
        return {"notes": notes}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks())


@scenario("writer (nostream) -> critic (tagged)")
def tags(model: ChatPingPong) -> Scene:
    """A model that stays out of the messages stream, and one with tags and a callback of its own."""
    effects: list[str] = []
    hidden = model.with_config(tags=["nostream"])

    def writer(state: Texts) -> dict[str, str]:
        return {"draft": hidden.invoke(ask("writer", state["task"])).text}

    def critic(state: Texts) -> dict[str, str]:
        counter = CallbackCounter()
        loud = model.with_config(tags=["loud"], callbacks=[counter], run_name="loud")
        notes = loud.invoke(ask("critic", state["draft"])).text
        effects.extend(sorted(counter.seen))
        return {"notes": notes}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks(), effects)


@scenario("writer -> critic, watched", declared=("critic",))
def tracers_and_usage(model: ChatPingPong) -> Scene:
    """Usage callback and `collect_runs`: what was prefilled ahead must show in neither."""
    graph = declared_pair(model)

    def story(round_: Doing) -> None:
        with get_usage_metadata_callback() as usage, collect_runs() as runs:
            round_.run(round_.input)
        totals = {name: (each["input_tokens"], each["output_tokens"]) for name, each in usage.usage_metadata.items()}
        round_.note("usage", totals)
        round_.note("runs", sorted(run.name for run in runs.traced_runs))

    return Scene(graph, tasks(), story=story)


@scenario("writer -> critic, three inputs at once", parallel=True)
def graph_batch(model: ChatPingPong) -> Scene:
    """`batch` and `abatch` on the graph."""
    effects: list[str] = []
    graph = pair(model, effects)

    def story(round_: Doing) -> None:
        if round_.way == "invoke":
            round_.note("batch", graph.batch(tasks(), round_.config))
        else:
            round_.note("abatch", asyncio.run(graph.abatch(tasks(), {**round_.config, "max_concurrency": 2})))

    return Scene(graph, tasks(), effects, story, ways=("invoke", "ainvoke", "invoke"))


@scenario("writer -> critic (declared), in four threads", parallel=True, declared=("critic",))
def several_threads(model: ChatPingPong) -> Scene:
    """Runs of one graph from several threads at once."""
    graph = declared_pair(model)

    def story(round_: Doing) -> None:
        with ThreadPoolExecutor(4) as threads:
            given = [{"task": f"{task} ({round_.way})"} for task in (*TASKS, "And now?")]
            round_.note("results", list(threads.map(lambda each: graph.invoke(each, round_.config), given)))

    return Scene(graph, tasks(), story=story, ways=("invoke", "ainvoke"))


@scenario("writer -> critic (declared), three runs in one loop", parallel=True, declared=("critic",))
def several_tasks(model: ChatPingPong) -> Scene:
    """Async runs of one graph at once, as a web server makes them."""
    graph = declared_pair(model)

    async def all_at_once(config: Any) -> list[Any]:
        return await asyncio.gather(*(graph.ainvoke(given, config) for given in tasks()))

    def story(round_: Doing) -> None:
        round_.note("results", asyncio.run(all_at_once(round_.config)))

    return Scene(graph, tasks(), story=story, ways=("ainvoke", "ainvoke"))


@scenario("writer -> critic, declared and plain, in eight threads", parallel=True, declared=("critic",))
def two_graphs_in_eight_threads(model: ChatPingPong) -> Scene:
    """Sixteen runs at once, of a declared and of a learned graph whose nodes have the same names."""
    effects: list[str] = []
    graphs = declared_pair(model), pair(model, effects)

    def story(round_: Doing) -> None:
        given = [(graph, {"task": f"Number {number} of {round_.way}."}) for number in range(8) for graph in graphs]
        with ThreadPoolExecutor(8) as threads:
            results = threads.map(lambda each: each[0].invoke(each[1], round_.config), given)
            round_.note("results", list(results))

    return Scene(graphs[0], tasks(), effects, story, ways=("invoke", "stream", "ainvoke"))


@scenario("writer -> critic (nostream) -> editor, declared", declared=("critic", "editor"))
def nostream_of_declared_nodes(model: ChatPingPong) -> Scene:
    """A declared node whose words are kept out of the messages stream; its prompt is prefilled all the same."""
    hidden = model.with_config(tags=["nostream"])

    def node(model: Any, role: str, reads: str, writes: str) -> Any:
        return agent_node(model, prompt=lambda state: ask(role, state[reads]), writes=writes)

    nodes = ("writer", node(model, "writer", "task", "draft")), ("critic", node(hidden, "critic", "draft", "notes"))
    return Scene(chain(*nodes, ("editor", node(model, "editor", "notes", "final"))), tasks())


@scenario("writer -> critic, and editor -> clerk on the same model")
def two_graphs_on_one_model(model: ChatPingPong) -> Scene:
    """Two graphs in turn, whose first nodes have the same name and another prompt."""
    effects: list[str] = []
    first = pair(model, effects)
    writer = ("writer", speaker(model, "second writer", "task", "plan", effects))
    other = chain(writer, ("critic", speaker(model, "second critic", "plan", "final", effects)))

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run(round_.input, graph=other)

    return Scene(first, tasks(), effects, story)


@scenario("writer -> critic, and a call outside of any graph")
def calls_outside_a_graph(model: ChatPingPong) -> Scene:
    """The model is also used on its own, before and after the graph."""
    effects: list[str] = []
    graph = pair(model, effects)

    def story(round_: Doing) -> None:
        task = model.invoke(ask("planner", round_.input["task"])).text
        round_.run({"task": task})
        round_.note("alone", asyncio.run(model.ainvoke(ask("editor", task))))

    return Scene(graph, tasks(), effects, story)


@scenario("writer -> critic (declared), left after the first node")
def left_early(model: ChatPingPong) -> Scene:
    """A stream that is closed before the graph has ended; then the thread is run to its end."""
    effects: list[str] = []

    def clerk(state: Texts) -> dict[str, str]:
        effects.append("clerk")
        return {"final": state["notes"]}

    writer = agent_node(model, prompt=lambda state: ask("writer", state["task"]), writes="draft")
    critic = agent_node(model, prompt=lambda state: ask("critic", state["draft"]), writes="notes")
    builder = StateGraph(Texts).add_sequence([("writer", writer), ("critic", critic), ("clerk", clerk)])
    graph = builder.add_edge(START, "writer").add_edge("clerk", END).compile(checkpointer=InMemorySaver())

    def story(round_: Doing) -> None:
        stream = graph.stream(round_.input, round_.config, stream_mode="updates")  # type: ignore[arg-type]
        round_.note("first", next(iter(stream)))
        stream.close()  # type: ignore[attr-defined]
        round_.run(None)

    return Scene(graph, tasks(), effects, story)


@scenario("writer -> critic, one stream mode at a time")
def single_stream_modes(model: ChatPingPong) -> Scene:
    """Each stream mode on its own, without subgraphs, and the second form of stream parts."""
    effects: list[str] = []
    graph = pair(model, effects)

    def story(round_: Doing) -> None:
        for mode in ("values", "updates", "messages", "custom", "debug", "tasks"):
            round_.note(mode, list(graph.stream(round_.input, round_.config, stream_mode=mode)))
        round_.note("version 2", list(graph.stream(round_.input, round_.config, stream_mode=["values"], version="v2")))
        round_.note("result 2", graph.invoke(round_.input, round_.config, version="v2"))

    return Scene(graph, tasks(), effects, story, ways=("stream", "stream"))
