"""Options of nodes, kept beside the graph: nothing of them is seen in its config, state, streams or drawings."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from langgraph_pingpong.edges.saved import learn_in
from langgraph_pingpong.errors import ConfigError

Graph = TypeVar("Graph")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How the edges of one node behave."""

    dry_run: bool = False
    """Whether the node's function may be run on states that have not happened, up to its first model call."""
    off: bool = False
    """Whether nothing is prefilled for this node's prompts."""


_OPTIONS: weakref.WeakKeyDictionary[Any, NodeOptions] = weakref.WeakKeyDictionary()
_DEFAULT = NodeOptions()


def options_of(spec: Any) -> NodeOptions:
    """The options of a compiled graph's node; those of a graph that is gone are the default."""
    return _DEFAULT if spec is None else _OPTIONS.get(spec, _DEFAULT)


def streaming_edges(
    graph: Graph,
    *,
    dry_run: Collection[str] | bool = (),
    off: Collection[str] | bool = (),
    learned: str | os.PathLike[str] | None = None,
) -> Graph:
    """Set how streaming edges treat the nodes of a compiled graph; returns the same graph object.

    Args:
        graph: a compiled LangGraph graph.
        dry_run: nodes whose function is pure, True for all. They are run on made-up states and answers, so that prompts
            are known from the first run on: an upstream node to its end, a downstream node up to its first model
            call. An edge needs both of its nodes named, or declared by `agent_node`. Other models, tools,
            retrievers, writes to the store and functional tasks are stopped before they do anything; any other
            side effect of the function happens once more.
        off: nodes whose prompts are never prefilled, True for all.
        learned: a file that keeps what is learned of this graph and the graphs within it, so that the next process
            streams from its first run on. It is made when something was learned, and brought up to date within
            seconds and at the interpreter's exit; processes can share it. It holds text of prompts, for each tenant
            apart, and is readable for its owner only (mode 0600). One that is damaged or of another version is
            replaced, with a warning.

    Raises:
        ConfigError: the graph is not compiled, or has no node of that name; the file of `learned` holds something
            else, cannot be read, or has no folder.
    """
    nodes = getattr(graph, "nodes", None)
    if not isinstance(nodes, dict) or not hasattr(graph, "get_graph"):
        raise ConfigError(f"streaming_edges needs a compiled graph, not {type(graph).__name__}: call compile() first.")
    for option, names in (("dry_run", dry_run), ("off", off)):
        for name in _names(names, nodes):
            if name not in nodes:
                raise ConfigError(f"The graph has no node {name!r}; it has {', '.join(sorted(nodes))}.")
            _OPTIONS[nodes[name]] = replace(options_of(nodes[name]), **{option: True})
    if learned is not None:
        learn_in(graph, learned)
    return graph


def _names(names: Collection[str] | bool, nodes: dict[str, Any]) -> Collection[str]:
    if isinstance(names, bool):
        return list(nodes) if names else ()
    return (names,) if isinstance(names, str) else names
