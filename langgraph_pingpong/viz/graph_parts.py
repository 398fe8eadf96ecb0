"""What a picture of a graph shows: LangGraph's own drawing of it, and what is known of its streaming edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.edges.known import Place, Source, learned, model_of, places_of, reads_tools, told
from langgraph_pingpong.trace import Event

START, END = "__start__", "__end__"

Certificates = list[Mapping[str, Any]]

SOURCES: Mapping[Source, str] = {
    "declared": "declared: streams from the first run on",
    "dry run": "dry run: streams from the first run on",
    "learned": "learned: streams from the second run on",
    "tools": "tools: prefilled while tools run, from the first run on",
}
"""The prompt sources, and what each means for an edge."""

PLAIN = "no prompt source: nothing is prefilled"
CONDITIONAL = "conditional"


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its id in the drawing ('outer:inner' within a subgraph), its name, and the devices it runs on.

    Before a run these are all that its model has; after one, those that it ran on. Empty where that is not known.
    """

    id: str
    name: str
    devices: tuple[str, ...] = ()
    ran: bool = False

    @property
    def is_end(self) -> bool:
        """Whether it is the start or the end of the graph."""
        return self.name in (START, END)

    @property
    def title(self) -> str:
        """Its name as it is shown, on one line."""
        return self.name.strip("_") if self.is_end else " ".join(self.name.split())

    @property
    def where(self) -> str:
        """Its devices as they are shown; what it may be is told apart from what it was."""
        return (", " if self.ran else " or ").join(self.devices)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured on an edge, medians over its calls: tokens prefilled ahead, and the TTFT in ms."""

    calls: int
    tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge of LangGraph's drawing or, `between_calls`, from one call to the next over nodes that make none."""

    source: str
    target: str
    conditional: bool = False
    label: str = ""
    prompt_source: Source | None = None
    figures: Figures | None = None
    between_calls: bool = False

    @property
    def lines(self) -> list[str]:
        """What is written on it, line by line."""
        lines = [" ".join(self.label.split())] if self.label else []
        if self.prompt_source:
            lines.append(self.prompt_source)
        if self.figures:
            if self.prompt_source:
                lines.append(f"{self.figures.tokens:,} tokens ahead")
            lines.append(f"TTFT {self.figures.ttft_ms:,.0f} ms")
            if self.figures.calls > 1:
                lines.append(f"median of {self.figures.calls} calls")
        return lines


@dataclass(frozen=True, slots=True)
class Picture:
    """A graph as it is drawn."""

    nodes: Mapping[str, Node]
    edges: list[Edge]

    @property
    def legend(self) -> list[tuple[Source | None, bool, str]]:
        """The kinds of edges in it: the prompt source, whether conditional, and what that means."""
        used = {edge.prompt_source for edge in self.edges}
        entries = [(source, False, text) for source, text in SOURCES.items() if source in used]
        plain: list[tuple[Source | None, bool, str]] = [(None, False, PLAIN)] if None in used else []
        dashed: list[tuple[Source | None, bool, str]] = [(None, True, CONDITIONAL)]
        return [*entries, *plain, *(dashed if any(edge.conditional for edge in self.edges) else [])]


def picture_of(graph: Any, events: Iterable[Event] = ()) -> Picture:
    """A compiled graph as it stands or, given the events of its runs, with what these were like."""
    drawing = graph.get_graph(xray=True)
    places = {":".join(site): place for site, place in places_of(graph).items()}
    edges = _without_inner_ends(
        [Edge(e.source, e.target, e.conditional, "" if e.data is None else str(e.data)) for e in drawing.edges]
    )
    ends = {end for edge in edges for end in (edge.source, edge.target)}
    nodes = {
        node.id: Node(node.id, node.id.rpartition(":")[2], _devices(places.get(node.id)))
        for node in drawing.nodes.values()
        if node.id in ends or not _is_inner_end(node.id)
    }
    order = {name: number for number, name in enumerate(nodes)}
    edges.sort(key=lambda edge: (order[edge.source], order[edge.target]))
    edges = [*(_with_source(edge, places) for edge in edges), *_over_tools(edges, places)]
    picture = _with_learned(Picture(nodes, edges), places)
    runs = _runs(events)
    return _with_figures(picture, runs) if runs else picture


def _is_inner_end(name: str) -> bool:
    return name.endswith((f":{START}", f":{END}"))


def _without_inner_ends(edges: list[Edge]) -> list[Edge]:
    """Edges into a subgraph lead to its first nodes and those out of it come from its last ones."""
    while inner := next((edge.target for edge in edges if _is_inner_end(edge.target)), None):
        ways_in = [edge for edge in edges if edge.target == inner]
        ways_out = [edge for edge in edges if edge.source == inner]
        edges = [edge for edge in edges if inner not in (edge.source, edge.target)]
        edges += [_joined(one, other) for one in ways_in for other in ways_out]
    return list(dict.fromkeys(edges))


def _joined(one: Edge, other: Edge) -> Edge:
    return Edge(one.source, other.target, one.conditional or other.conditional, one.label or other.label)


def _is_ours(model: Any) -> bool:
    return isinstance(_unbound(model), ChatPingPong)


def _unbound(model: Any) -> Any:
    while hasattr(model, "bound"):
        model = model.bound
    return model


def _devices(place: Place | None) -> tuple[str, ...]:
    """All devices of a node's model, as far as both are told."""
    model = _unbound(model_of(place)) if place else None
    if not isinstance(model, ChatPingPong):
        return ()
    if model.pool is not None:
        return tuple(engine.device for engine in model.pool.engines)
    return tuple(model.devices or model.base_urls or ())


# -- prompt sources ------------------------------------------------------------------------------------------


def _with_source(edge: Edge, places: Mapping[str, Place]) -> Edge:
    before, after = places.get(edge.source), places.get(edge.target)
    if before is None or after is None:
        return edge
    return replace(edge, prompt_source=told(before, after, edge.conditional, _is_ours))


def _over_tools(edges: Sequence[Edge], places: Mapping[str, Place]) -> list[Edge]:
    """From a call that calls tools to the one that reads their results: one a node, whatever nodes its tools have."""
    pairs = {(edge.source, edge.target) for edge in edges}
    back = sorted(pair for pair in pairs if pair[::-1] in pairs and pair[0] in places and pair[1] in places)
    asked = dict.fromkeys(name for name, behind in back if reads_tools(places[name], places[behind], _is_ours))
    return [Edge(name, name, prompt_source="tools", between_calls=True) for name in asked]


def _with_learned(picture: Picture, places: Mapping[str, Place]) -> Picture:
    seen = {(":".join(before.site), ":".join(after.site)) for before, after in learned(_by_site(places))}
    edges = [
        replace(edge, prompt_source="learned")
        if edge.prompt_source is None and (edge.source, edge.target) in seen
        else edge
        for edge in picture.edges
    ]
    drawn = {(edge.source, edge.target) for edge in edges}
    over = sorted(pair for pair in seen - drawn if pair[0] in picture.nodes and pair[1] in picture.nodes)
    edges += [Edge(*pair, prompt_source="learned", between_calls=True) for pair in over]
    return replace(picture, edges=edges)


def _by_site(places: Mapping[str, Place]) -> dict[tuple[str, ...], Place]:
    return {place.site: place for place in places.values()}


# -- figures -------------------------------------------------------------------------------------------------


def _runs(events: Iterable[Event]) -> dict[str, Certificates]:
    """The certificates of each run, in their order."""
    runs: dict[str, Certificates] = {}
    for event in events:
        if event.name == "finish":
            runs.setdefault(event.run, []).append(event.data["certificate"])
    return runs


def _with_figures(picture: Picture, runs: Mapping[str, Certificates]) -> Picture:
    names: dict[str, list[str]] = {}
    for node in picture.nodes.values():
        names.setdefault(node.name, []).append(node.id)
    calls: dict[tuple[str, str], Certificates] = {}
    for certificates in runs.values():
        for pair, certificate in _placed(picture, names, certificates):
            calls.setdefault(pair, []).append(certificate)
    edges = [_measured(edge, calls.pop((edge.source, edge.target), [])) for edge in picture.edges]
    over = [_measured(Edge(*pair, between_calls=True), found) for pair, found in calls.items()]
    nodes = {key: _ran(node, names, runs) for key, node in picture.nodes.items()}
    return Picture(nodes, edges + over)


def _placed(
    picture: Picture, names: Mapping[str, list[str]], certificates: Certificates
) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """The edge of each call. A trace tells nodes by their names: where that leaves several edges, none is taken."""
    seen: set[str] = set()
    for certificate in certificates:
        name, upstream = certificate["node"], certificate["upstream"]
        before, after = names.get(upstream or "", []), names.get(name, [])
        drawn = [
            (edge.source, edge.target)
            for edge in picture.edges
            if edge.target in after and (not upstream or edge.source in before)
        ]
        if not upstream and name not in seen:  # the first of a loop comes from the start
            drawn = [pair for pair in drawn if pair[0] == START] or drawn
        if upstream and not drawn and len(before) == len(after) == 1:
            drawn = [(before[0], after[0])]
        seen.add(name)
        if len(drawn) == 1:
            yield drawn[0], certificate


def _measured(edge: Edge, found: Certificates) -> Edge:
    if not found:
        return edge
    tokens = round(median(each["static"] + each["streamed"] for each in found))
    figures = Figures(len(found), tokens, median(each["ttft_ms"] for each in found))
    sources = [each["source"] for each in found if each["source"]]
    return replace(edge, prompt_source=sources[-1] if sources else edge.prompt_source, figures=figures)


def _ran(node: Node, names: Mapping[str, list[str]], runs: Mapping[str, Certificates]) -> Node:
    """A node with the devices that it ran on, as far as its name tells it from others."""
    found = [each["device"] for certificates in runs.values() for each in certificates if each["node"] == node.name]
    if not found or len(names[node.name]) > 1:
        return node
    return replace(node, devices=tuple(dict.fromkeys(found)), ran=True)
