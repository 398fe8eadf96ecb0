"""Which prompt source tells what follows a node, as far as that can be told without running anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode

from langgraph_pingpong.edges.agents import model_of_agent
from langgraph_pingpong.edges.declared import AgentNode
from langgraph_pingpong.edges.langgraph_internals import declares_end, usable
from langgraph_pingpong.edges.langgraph_loops import site_of
from langgraph_pingpong.edges.learned import Site, memories_of
from langgraph_pingpong.edges.options import options_of
from langgraph_pingpong.edges.sequences import model_sequence

Source = Literal["declared", "dry run", "learned", "tools"]

IsOurs = Callable[[Any], bool]
"""Whether a model, perhaps bound to arguments, is one of this library."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node: `site` names the nodes around it and itself, `specs` are their objects in the compiled graphs.

    `graph` is the compiled graph that it is a node of.
    """

    site: Site
    specs: tuple[Any, ...]
    graph: Any

    @property
    def spec(self) -> Any:
        """Its own object in the compiled graph."""
        return self.specs[-1]


def places_of(graph: Any) -> dict[Site, Place]:
    """Every node of a compiled graph and of the graphs within it, however deep."""
    graphs = {(): graph, **{tuple(name.split("|")): inner for name, inner in graph.get_subgraphs(recurse=True)}}
    places: dict[Site, Place] = {}
    for around, inner in graphs.items():
        specs = tuple(graphs[around[:depth]].nodes[name] for depth, name in enumerate(around))
        for name, spec in inner.nodes.items():
            places[*around, name] = Place((*around, name), (*specs, spec), inner)
    return places


def model_of(place: Place) -> Any:
    """The model of a node that declares its prompt; None for any other."""
    node = place.spec.bound
    declared = node if isinstance(node, AgentNode) else model_sequence(node)
    return declared.model if declared else model_of_agent(node)


def told(before: Place, after: Place, conditional: bool, is_ours: IsOurs) -> Source | None:
    """The source that tells the prompt of `after` from the first run on, while the node `before` it speaks.

    `conditional` says that only conditional edges or commands lead there.
    """
    if not usable() or _is_off(after) or not _tells_outcome(before, is_ours):
        return None
    depth = len(before.site) - 1
    if after.site[:depth] != before.site[:-1] or _breaks(before, after) or not _is_entered(after, depth):
        return None
    dry_run = options_of(before.spec).dry_run
    if conditional and not declares_end(before.spec, after.site[depth]) and not dry_run:
        return None
    if (model := model_of(after)) is not None:
        return "declared" if is_ours(model) else None
    return "dry run" if any(options_of(spec).dry_run for spec in after.specs[depth:]) else None


def reads_tools(place: Place, behind: Place, is_ours: IsOurs) -> bool:
    """Whether a node that has an edge to the node `behind` it and one back is asked again with results of tools."""
    ours = (model := model_of(place)) is not None and is_ours(model)
    broken = _breaks(place, behind) or _breaks(behind, place)
    return usable() and ours and isinstance(behind.spec.bound, ToolNode) and not (broken or _is_off(place))


def learned(places: Mapping[Site, Place]) -> Iterator[tuple[Place, Place]]:
    """Pairs of these nodes of which earlier runs of their graph have seen the second call after the first."""
    for place in places.values():
        for memory in memories_of(place.spec):
            for call, follower in memory.followed():
                after = places.get(site_of(follower.site))
                if site_of(call.site) == place.site and after is not None and not _is_off(after):
                    yield place, after


def _is_off(place: Place) -> bool:
    return any(options_of(spec).off for spec in place.specs)


def _tells_outcome(place: Place, is_ours: IsOurs) -> bool:
    """Whether it is known what the node returns, given what its model says."""
    node = place.spec.bound
    if isinstance(node, AgentNode):
        return is_ours(node.model)
    sequence = model_sequence(node)
    return bool(sequence and sequence.tells_update and is_ours(sequence.model)) or options_of(place.spec).dry_run


def _breaks(before: Place, after: Place) -> bool:
    """Whether a breakpoint lies between the two."""
    graph, name = before.graph, after.site[len(before.site) - 1]
    pairs = ((graph.interrupt_after_nodes, before.site[-1]), (graph.interrupt_before_nodes, name))
    return any(points == "*" or node in (points or ()) for points, node in pairs)


def _is_entered(place: Place, depth: int) -> bool:
    """Whether the graphs around a node, from a depth on, are nodes themselves and begin anew in every run."""
    around = [spec.bound for spec in place.specs[depth:-1]]
    return all(isinstance(graph, CompiledStateGraph) and graph.checkpointer is not True for graph in around)
