"""The colours of a picture of a graph, the same in every format; on edges they can be read on white and on black."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from langgraph_pingpong.edges.known import Source

INK, FAINT = "#1f2933", "#52606d"
NODE_FILL, NODE_RIM = "#f5f7fa", "#7b8794"


@dataclass(frozen=True, slots=True)
class EdgeStyle:
    """The colour and width (points) of an edge."""

    colour: str
    width: float


EDGES: Mapping[Source | None, EdgeStyle] = {
    "declared": EdgeStyle("#009e73", 2.6),
    "dry run": EdgeStyle("#2b8fd0", 2.6),
    "learned": EdgeStyle("#d55e00", 2.6),
    "tools": EdgeStyle("#b65f92", 2.6),
    None: EdgeStyle("#8895a3", 1.2),
}
"""By prompt source; the colours are those of Okabe and Ito, which colour-blind people can tell apart."""

DEVICES = ("#dff3ec", "#fdebd3", "#dcebf8", "#f6e1ec", "#eef0d8", "#e6e2f3", "#f1e5da", "#dfeef0")
"""What nodes are filled with once they ran, by device, in turn."""
