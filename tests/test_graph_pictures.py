"""Pictures of graphs: what they claim of edges, and that they are drawn here, legibly, in every format."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send
from typer.testing import CliRunner
from typing_extensions import TypedDict

from graphs import five_agents, panel, research_agent, review_loop, router, subgraphs
from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine, agent_node, draw_streaming, streaming_edges
from langgraph_pingpong.cli import app
from langgraph_pingpong.errors import ConfigError, NotATrace
from langgraph_pingpong.trace import Event
from langgraph_pingpong.viz.graph_image import loop_path
from langgraph_pingpong.viz.graph_layout import Layout, Route, lay_out
from langgraph_pingpong.viz.graph_parts import Edge, Picture, picture_of
from langgraph_pingpong.viz.graph_rows import Box
from langgraph_pingpong.viz.graph_style import EDGES
from tests.attentive import attentive

HERE = Path(__file__).parent
GALLERY = {
    "five_agents": five_agents.build,
    "panel": panel.build,
    "research_agent": research_agent.build,
    "review_loop": review_loop.build,
    "router": router.build,
    "subgraphs": subgraphs.build,
}
TASK = {"task": "Explain tides.", "document": "The moon pulls at the sea."}


class State(TypedDict, total=False):
    task: str
    plan: str
    text: str


@pytest.fixture
def model() -> Iterator[ChatPingPong]:
    """A model on two modelled devices that end no answer before plans are ready."""
    with EnginePool([FakeEngine(f"fake:{index}") for index in range(2)]) as pool:
        yield attentive(ChatPingPong(pool=pool, max_tokens=60))


def declared(model: Any, reads: str, writes: str) -> Any:
    return agent_node(model, prompt=lambda state: f"You read {reads}. " * 5 + state.get(reads, ""), writes=writes)


def plain(model: Any, reads: str, writes: str) -> Any:
    return lambda state: {writes: model.invoke(f"You read {reads}. " * 5 + state[reads]).text}


def chain(first: Any, second: Any, **compiling: Any) -> Any:
    builder = StateGraph(State).add_node("planner", first).add_node("writer", second)
    builder.add_edge(START, "planner").add_edge("planner", "writer").add_edge("writer", END)
    return builder.compile(**compiling)


def edge(picture: Picture, source: str, target: str) -> Edge:
    (found,) = [each for each in picture.edges if (each.source, each.target) == (source, target)]
    return found


def source(graph: Any, before: str = "planner", after: str = "writer") -> str | None:
    return edge(picture_of(graph), before, after).prompt_source


# -- prompt sources --------------------------------------------------------------------------------------------


def test_declared_nodes_have_declared_edges(model: ChatPingPong) -> None:
    graph = chain(declared(model, "task", "plan"), declared(model, "plan", "text"))
    assert source(graph) == "declared"
    assert source(graph, "__start__", "planner") is None
    assert source(graph, "writer", "__end__") is None


def test_nodes_that_may_be_run_ahead_have_dry_run_edges(model: ChatPingPong) -> None:
    graph = chain(plain(model, "task", "plan"), plain(model, "plan", "text"))
    assert source(graph) is None
    streaming_edges(graph, dry_run={"writer"})
    assert source(graph) is None, "nobody knows what the planner returns"
    streaming_edges(graph, dry_run={"planner"})
    assert source(graph) == "dry run"


@pytest.mark.parametrize("why", ["off", "breakpoint before", "breakpoint after", "another model"])
def test_what_keeps_a_declared_edge_from_streaming(model: ChatPingPong, why: str) -> None:
    writer = FakeListChatModel(responses=["x"]) if why == "another model" else model
    breaks = {"breakpoint before": {"interrupt_before": ["writer"]}, "breakpoint after": {"interrupt_after": "*"}}
    graph = chain(declared(model, "task", "plan"), declared(writer, "plan", "text"), **breaks.get(why, {}))
    if why == "off":
        streaming_edges(graph, off={"writer"})
    assert source(graph) is None


def route(state: State) -> Literal["writer", "__end__"]:
    return "writer"


def send(state: State) -> list[Send]:
    return [Send("writer", state)]


@pytest.mark.parametrize(("path", "ends", "expected"), [(route, None, "declared"), (send, ["writer"], None)])
def test_of_conditional_edges_declared_ends_count(model: ChatPingPong, path: Any, ends: Any, expected: Any) -> None:
    builder = StateGraph(State).add_node("planner", declared(model, "task", "plan"))
    builder.add_node("writer", declared(model, "plan", "text")).add_edge(START, "planner")
    found = edge(picture_of(builder.add_conditional_edges("planner", path, ends).compile()), "planner", "writer")
    assert (found.conditional, found.prompt_source) == (True, expected)


def test_edges_are_learned_also_over_nodes_that_call_nothing(model: ChatPingPong) -> None:
    builder = StateGraph(State).add_node("planner", plain(model, "task", "plan")).add_node("layout", lambda state: {})
    builder.add_node("writer", plain(model, "plan", "text")).add_edge(START, "planner")
    graph = builder.add_edge("planner", "layout").add_edge("layout", "writer").compile()
    before = picture_of(graph)
    assert {each.prompt_source for each in before.edges} == {None}
    graph.invoke(TASK)
    until = time.monotonic() + 10  # learning goes on beside the run
    while (after := picture_of(graph)) == before and time.monotonic() < until:
        time.sleep(0.02)
    assert after.edges[:-1] == before.edges
    assert after.edges[-1] == Edge("planner", "writer", prompt_source="learned", between_calls=True)


@pytest.mark.parametrize("name", GALLERY)
def test_what_is_claimed_of_the_gallery_is_what_its_runs_certify(model: ChatPingPong, name: str) -> None:
    graph = GALLERY[name](model, brief_tokens=60)
    claimed = picture_of(graph)
    events: list[Event] = []
    with model.trace.subscribed(events.append):
        graph.invoke(TASK)
    certificates = [event.data["certificate"] for event in events if event.name == "finish"]
    names = {key: node.name for key, node in claimed.nodes.items()}
    sources = {(names[each.source], names[each.target]): each.prompt_source for each in claimed.edges}
    streamed = {(each["upstream"], each["node"]): each["source"] for each in certificates if each["upstream"]}
    assert streamed
    assert streamed == {pair: sources[pair] for pair in streamed}


# -- figures ---------------------------------------------------------------------------------------------------


def test_after_a_run_edges_show_what_the_certificates_say(model: ChatPingPong) -> None:
    graph = GALLERY["five_agents"](model, brief_tokens=60)
    events: list[Event] = []
    with model.trace.subscribed(events.append):
        graph.invoke(TASK)
    picture = picture_of(graph, events)
    for certificate in (event.data["certificate"] for event in events if event.name == "finish"):
        node = certificate["node"]
        (found,) = [each for each in picture.edges if each.target == node]
        assert found.figures is not None
        assert found.figures.tokens == certificate["static"] + certificate["streamed"]
        assert found.figures.ttft_ms == certificate["ttft_ms"]
        assert picture.nodes[node].devices == (certificate["device"],)
        assert picture.nodes[node].where == certificate["device"]
        ahead = f"{found.figures.tokens:,} tokens ahead"
        assert (ahead in found.lines) is (node != "researcher")
    assert edge(picture, "writer", "__end__").lines == []


@tool
def tide(place: str) -> str:
    """When the tide is low."""
    time.sleep(0.1)
    return f"Low tide in {place} is at four."


def asking_for_the_tide(prompt: str) -> str:
    call = json.dumps({"name": "tide", "arguments": {"place": "Oslo"}})
    return "It is at four." if "<tool_response>" in prompt else f"<tool_call>\n{call}\n</tool_call>"


def tool_loop(model: Any) -> Any:
    bound = model.bind_tools([tide])
    builder = StateGraph(MessagesState).add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([tide])).add_edge(START, "model")
    return builder.add_conditional_edges("model", tools_condition).add_edge("tools", "model").compile()


def test_a_run_that_called_tools_is_drawn() -> None:
    with EnginePool([FakeEngine(f"fake:{index}", reply=asking_for_the_tide) for index in range(2)]) as pool:
        model = ChatPingPong(pool=pool, max_tokens=200)
        graph, events = tool_loop(model), []
        with model.trace.subscribed(events.append):
            graph.invoke({"messages": [HumanMessage("Tell me of the sea. " * 20)]})
        loop = edge(picture_of(graph, events), "model", "model")
        assert (loop.prompt_source, loop.between_calls) == ("tools", True)
        assert loop.figures is not None and loop.figures.tokens > 0
        assert '|"tools<br/>' in draw_streaming(graph, trace=events)
        assert "tools: prefilled while tools run" in str(draw_streaming(graph, trace=events))
        assert EDGES["tools"].colour in str(draw_streaming(graph, "svg", trace=events))


def test_an_agent_reads_its_tools_from_the_first_run_on(model: ChatPingPong) -> None:
    graph = create_agent(model, [tide])
    assert source(graph, "model", "model") == "tools"
    streaming_edges(graph, off={"model"})
    assert [each for each in picture_of(graph).edges if each.prompt_source] == []


def test_a_node_whose_tools_have_several_nodes_has_one_loop(model: ChatPingPong) -> None:
    builder = StateGraph(MessagesState).add_node(
        "asker", agent_node(model, prompt=lambda s: s["messages"], writes="messages")
    )
    for name in ("tides", "winds"):
        builder.add_node(name, ToolNode([tide])).add_edge(name, "asker")
    builder.add_conditional_edges("asker", lambda state: "tides", ["tides", "winds"]).add_edge(START, "asker")
    assert source(builder.compile(), "asker", "asker") == "tools"


def finish(run: str, node: str, upstream: str | None, tokens: int, ttft_ms: float, device: str = "fake:0") -> Event:
    certificate = {"node": node, "upstream": upstream, "source": upstream and "declared", "static": tokens}
    certificate |= {"streamed": 0, "ttft_ms": ttft_ms, "device": device}
    return Event("finish", 0.0, run, node, device, {"certificate": certificate})


def test_of_several_calls_the_median_is_shown(model: ChatPingPong) -> None:
    graph = chain(declared(model, "task", "plan"), declared(model, "plan", "text"))
    events = [finish(str(n), "writer", "planner", 10 * n, n, f"fake:{n % 2}") for n in (1, 2, 9)]
    picture = picture_of(graph, events)
    assert edge(picture, "planner", "writer").lines == [
        "declared",
        "20 tokens ahead",
        "TTFT 2 ms",
        "median of 3 calls",
    ]
    assert picture.nodes["writer"].where == "fake:1, fake:0"
    assert picture.nodes["planner"].where == "fake:0 or fake:1"


def test_figures_that_may_be_of_another_edge_are_left_out(model: ChatPingPong) -> None:
    graph = review_loop.build(model, approve=True, brief_tokens=60)
    events = [finish("1", "writer", None, 0, 5.0), finish("1", "critic", "writer", 7, 6.0)]
    picture = picture_of(graph, [*events, finish("1", "writer", None, 0, 90.0)])
    assert edge(picture, "__start__", "writer").lines == ["TTFT 5 ms"]
    assert edge(picture, "writer", "critic").figures is not None
    assert [each.figures for each in picture.edges if each.target == "writer" and each.source != START] == [None, None]


# -- formats ---------------------------------------------------------------------------------------------------


def mermaid_folder() -> str:
    """A folder where node finds mermaid and jsdom."""
    folder = os.environ.get("PINGPONG_NODE_MODULES", str(HERE.parent))
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not all((Path(folder) / "node_modules" / name).is_dir() for name in ("mermaid", "jsdom")):
        pytest.skip("no mermaid here: npm install --prefix DIR mermaid jsdom; PINGPONG_NODE_MODULES=DIR")
    return folder


def parsed(folder: Path, *texts: str) -> list[dict[str, Any]]:
    """What the real mermaid reads."""
    modules, files = mermaid_folder(), []
    for number, text in enumerate(texts):
        files.append(folder / f"{number}.mmd")
        files[-1].write_text(text, encoding="utf-8")
    command = ["node", str(HERE / "parse_mermaid.mjs"), modules, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


NASTY = ['say "hi" <b>', "a[0](x){y}", "end", "$x$ and $y$", "#quot; `code` & more;", "subgraph", "ünï, 日本 --> c"]


def nasty(model: ChatPingPong) -> Any:
    builder = StateGraph(State)
    for name in NASTY:
        builder.add_node(name, declared(model, "task", "plan"))
    for before, after in pairwise([START, *NASTY, END]):
        builder.add_edge(before, after)
    return builder.compile()


def test_mermaid_reads_the_text_of_every_graph(model: ChatPingPong, tmp_path: Path) -> None:
    graphs = [build(model, brief_tokens=60) for build in GALLERY.values()] + [nasty(model)]
    read = parsed(tmp_path, *(draw_streaming(graph) for graph in graphs))
    for graph, result in zip(graphs, read, strict=True):
        picture = picture_of(graph)
        assert result.get("error") is None
        strokes = [each["stroke"] for each in result["edges"]]
        expected = [(each.conditional, each.prompt_source) for each in picture.edges]
        expected += [(conditional, source) for source, conditional, _ in picture.legend]
        assert strokes == ["dotted" if dashed else "thick" if source else "normal" for dashed, source in expected]


def test_names_stay_what_they_are_in_mermaid(model: ChatPingPong, tmp_path: Path) -> None:
    (result,) = parsed(tmp_path, draw_streaming(nasty(model)))
    shown = [node["text"].partition("<br>")[0] for node in result["nodes"]]
    entities = str.maketrans({char: f"ﬂ°°{ord(char)}¶ß" for char in '#"<>`&[]{}()|\\;'})
    assert [name.translate(entities) for name in NASTY] == shown[1 : len(NASTY) + 1]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a picture was not drawn here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["research_agent", "review_loop", "subgraphs"])
def test_png_and_svg_are_drawn_offline_and_always_alike(model: ChatPingPong, name: str) -> None:
    graph = GALLERY[name](model, brief_tokens=60)
    png, svg = draw_streaming(graph, "png"), draw_streaming(graph, "svg")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert (draw_streaming(graph, "png"), draw_streaming(graph, "svg")) == (png, svg)


def test_svg_shows_each_source_in_its_colour(model: ChatPingPong) -> None:
    graph = chain(plain(model, "task", "plan"), plain(model, "plan", "text"))
    assert "#2b8fd0" not in draw_streaming(graph, "svg")
    assert "#2b8fd0" in draw_streaming(streaming_edges(graph, dry_run=True), "svg")


def test_names_are_never_set_as_formulas(model: ChatPingPong) -> None:
    builder = StateGraph(State).add_node("$\\nothing$", declared(model, "task", "plan"))
    assert draw_streaming(builder.add_edge(START, "$\\nothing$").compile(), "png")


def test_langgraphs_own_drawing_stays_as_it_was(model: ChatPingPong) -> None:
    graph = GALLERY["subgraphs"](model, brief_tokens=60)
    before = graph.get_graph(xray=True).draw_mermaid(), graph.get_graph().to_json()
    draw_streaming(graph)
    draw_streaming(graph, "png")
    assert (graph.get_graph(xray=True).draw_mermaid(), graph.get_graph().to_json()) == before


def test_what_cannot_be_drawn_is_refused(model: ChatPingPong, tmp_path: Path) -> None:
    graph = chain(declared(model, "task", "plan"), declared(model, "plan", "text"))
    with pytest.raises(ConfigError, match=r"call compile\(\) first"):
        draw_streaming(StateGraph(State))
    with pytest.raises(ConfigError, match="no format 'gif'"):
        draw_streaming(graph, "gif")  # type: ignore[call-overload]
    with pytest.raises(NotATrace):
        draw_streaming(graph, trace=tmp_path / "none.jsonl")


# -- layout ----------------------------------------------------------------------------------------------------


@st.composite
def drawings(draw: st.DrawFn) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str]], list[Any]]:
    """Nodes of some sizes, some within subgraphs, edges between any of them, some with labels."""
    around = st.sampled_from(["", "a:", "b:", "a:c:"])
    names = [f"{draw(around)}{number}" for number in range(draw(st.integers(2, 9)))]
    sizes = {name: (draw(st.sampled_from([30.0, 90.0, 200.0])), draw(st.sampled_from([20.0, 44.0]))) for name in names}
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    edges = draw(st.lists(pairs, min_size=1, max_size=14, unique=True))
    return sizes, edges, [draw(st.sampled_from([(4.0, 0.0), (80.0, 38.0)])) for _ in edges]


def apart(one: Box, other: Box) -> bool:
    return (
        abs(one.x - other.x) >= (one.width + other.width) / 2 - 0.01
        or abs(one.y - other.y) >= (one.height + other.height) / 2 - 0.01
    )


def within(inner: Box, outer: Box) -> bool:
    return (
        abs(inner.x - outer.x) <= (outer.width - inner.width) / 2 + 0.01
        and abs(inner.y - outer.y) <= (outer.height - inner.height) / 2 + 0.01
    )


def text_box(route: Route, size: tuple[float, float], before: str, after: str) -> Box:
    """Where a label is: round its point, but beside a node that leads to itself."""
    x, y = route.label
    return Box(x + size[0] / 2 if before == after else x, y, *size)


def on_the_way(layout: Layout, number: int) -> Iterator[tuple[float, float]]:
    """Points on the curves of an edge, which are those of the image."""
    for (x, y), (to_x, to_y) in pairwise(layout.routes[number].points):
        for step in range(11):
            t = step / 10
            share = 3 * t * t - 2 * t**3
            yield x + (to_x - x) * share, y + (to_y - y) * (1.5 * t - 1.5 * t * t + t**3)


@settings(max_examples=150, deadline=None)
@given(drawings())
def test_nothing_lies_on_anything_else(drawing: Any) -> None:
    sizes, edges, labels = drawing
    layout = lay_out(sizes, edges, labels)
    whole = Box(layout.width / 2, layout.height / 2, layout.width, layout.height)
    texts = [text_box(layout.routes[number], size, *edges[number]) for number, size in enumerate(labels)]
    for one, other in combinations([*layout.boxes.values(), *texts], 2):
        assert apart(one, other)
    for name, box in layout.subgraphs.items():
        assert within(box, whole)
        for node, inner in layout.boxes.items():
            assert within(inner, box) if node.startswith(f"{name}:") else apart(inner, box)
    assert all(within(box, whole) for box in (*layout.boxes.values(), *texts))


@settings(max_examples=150, deadline=None)
@given(drawings())
def test_edges_pass_nodes_and_end_at_their_own(drawing: Any) -> None:
    sizes, edges, labels = drawing
    layout = lay_out(sizes, edges, labels)
    for number, (before, after) in enumerate(edges):
        if before == after:
            continue
        for name, box in layout.boxes.items():
            if name not in (before, after):
                assert all(apart(box, Box(*point, 0, 0)) for point in on_the_way(layout, number))
        for name, point in ((before, layout.routes[number].points[0]), (after, layout.routes[number].points[-1])):
            assert within(Box(*point, 0, 0), layout.boxes[name])


def test_the_label_of_a_loop_stands_beside_its_curve() -> None:
    layout = lay_out({"a": (90.0, 44.0)}, [("a", "a")], [(80.0, 50.0)])
    (loop,) = layout.routes.values()
    assert layout.boxes["a"].x + 45 < loop_path(loop.points).get_extents().x1 + 3 < loop.label[0]
    assert loop.label[0] + 80 <= layout.width


# -- the command -----------------------------------------------------------------------------------------------


def pingpong(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["graph", *arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize("suffix", ["svg", "png", "mmd"])
def test_the_command_writes_a_picture(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / "new" / f"graph.{suffix}"
    trace = HERE.parent / "docs" / "traces" / "demo-cpu.jsonl"
    arguments = ("--set", "brief_tokens=60", "--devices", "cuda:0,cuda:1", "--trace", str(trace))
    result = pingpong("graphs.five_agents", "--out", str(out), *arguments)
    assert (result.exit_code, result.output) == (0, f"Wrote {out}\n")
    beginnings = {"svg": b"<?xml", "png": b"\x89PNG", "mmd": b"flowchart TD"}
    assert out.read_bytes().startswith(beginnings[suffix])
    if suffix == "mmd":  # the run with overlap off, which is in this trace, too, had nothing ahead
        assert out.read_text().count("tokens ahead") == 4


def test_the_command_shows_mermaid_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "start", None)
    result = pingpong("graphs.router", "--devices", "cuda:0,cuda:1")
    assert result.exit_code == 0
    assert "cuda:0 or cuda:1" in result.output
    assert result.output.count('-.->|"declared"|') == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("graphs.nothing",), "no module 'graphs.nothing'"),
        (("graphs.router", "--set", "brief_tokens=5"), "A brief needs at least 50 tokens"),
        (("graphs.router", "--out", "x.gif"), "has to end in .svg, .png, .mmd"),
        (("graphs.router", "--trace", "none.jsonl"), "none.jsonl cannot be read"),
        (("graphs.router", "--out", "/dev/null/x.svg"), "cannot be written"),
    ],
)
def test_the_command_says_what_to_change(arguments: tuple[str, ...], message: str) -> None:
    result = pingpong(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
