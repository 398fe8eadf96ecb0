"""Pictures of graphs that show their streaming edges."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal, overload

from langgraph_pingpong.errors import ConfigError
from langgraph_pingpong.trace import Event, read_events

Format = Literal["mermaid", "png", "svg"]

Traced = str | os.PathLike[str] | Iterable[Event]
"""A file that a `JsonLines` sink or `pingpong run --trace` wrote, or the events themselves."""


@overload
def draw_streaming(graph: Any, format: Literal["mermaid", "svg"] = "mermaid", *, trace: Traced = ()) -> str: ...


@overload
def draw_streaming(graph: Any, format: Literal["png"], *, trace: Traced = ()) -> bytes: ...


def draw_streaming(graph: Any, format: Format = "mermaid", *, trace: Traced = ()) -> str | bytes:
    """Draw a compiled graph with its streaming edges; `graph.get_graph()` goes on drawing it as it always did.

    Each edge shows the prompt source that is known for it: declared, dry run, learned, or none. Each node shows the
    devices of its model, where it tells its model. With a trace, nodes show where they ran, and edges how many tokens
    were prefilled ahead and the time to first token (ms, since the upstream finished): the medians of all calls.
    A trace tells nodes by their names, so where two nodes of one name make several edges possible, nothing is shown.

    Args:
        graph: a compiled LangGraph graph; subgraphs are drawn in boxes.
        format: "mermaid" and "svg" give text, "png" gives bytes. All are made here, without a network.
        trace: events of runs of this graph, or the file that holds them.

    Raises:
        ConfigError: the graph is not compiled, or there is no such format.
        NotATrace: the file cannot be read, or holds something else.
    """
    if not hasattr(graph, "get_graph") or not hasattr(graph, "get_subgraphs"):
        raise ConfigError(f"draw_streaming needs a compiled graph, not {type(graph).__name__}: call compile() first.")
    if format not in ("mermaid", "png", "svg"):
        raise ConfigError(f"There is no format {format!r}: take 'mermaid', 'png' or 'svg'.")
    from langgraph_pingpong.viz.graph_parts import picture_of

    events = read_events(os.fspath(trace)) if isinstance(trace, str | os.PathLike) else trace
    picture = picture_of(graph, events)
    if format == "mermaid":
        from langgraph_pingpong.viz.graph_mermaid import mermaid

        return mermaid(picture)
    from langgraph_pingpong.viz.graph_image import image

    drawn = image(picture, format)
    return drawn if format == "png" else drawn.decode()
