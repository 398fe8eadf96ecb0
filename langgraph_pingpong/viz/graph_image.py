"""A picture of a graph as PNG or SVG, drawn with matplotlib: nothing leaves the machine."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from langgraph_pingpong.edges.known import Source
from langgraph_pingpong.viz.graph_layout import Layout, Route, lay_out
from langgraph_pingpong.viz.graph_parts import Edge, Node, Picture
from langgraph_pingpong.viz.graph_rows import Box, Point, Size
from langgraph_pingpong.viz.graph_style import DEVICES, EDGES, FAINT, INK, NODE_FILL, NODE_RIM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAME, _SMALL = 11.0, 8.5
"""Sizes of letters, in points."""

_MARGIN, _LINE, _SAMPLE = 16.0, 12.0, 34.0
"""Round the picture, of a line of small letters, and of a line in the legend; points."""

_DPI = 160


def image(picture: Picture, form: Literal["png", "svg"]) -> bytes:
    """The picture as the content of a file, on white; the same picture gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    layout = _layout(picture)
    legend = picture.legend
    width = max(layout.width, _SAMPLE + 8 + max((_width(text, _SMALL) for *_, text in legend), default=0))
    width, height = width + 2 * _MARGIN, layout.height + 2 * _MARGIN + _legend_height(legend)
    figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    _draw(axes, picture, layout, _MARGIN + (width - 2 * _MARGIN - layout.width) / 2)
    _draw_legend(axes, legend, layout.height + 2 * _MARGIN)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pingpong", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=form, dpi=_DPI, metadata={"Date": None} if form == "svg" else {"Software": None})
    return buffer.getvalue()


def _layout(picture: Picture) -> Layout:
    sizes = {name: _size(node) for name, node in picture.nodes.items()}
    edges = [(edge.source, edge.target) for edge in picture.edges]
    return lay_out(sizes, edges, [_label_size(edge.lines) for edge in picture.edges])


def _size(node: Node) -> Size:
    if node.is_end:
        return _width(node.title, _SMALL) + 24, 20.0
    width = max(_width(node.title, _NAME), _width(node.where, _SMALL))
    return max(width + 26, 76.0), 44.0 if node.where else 32.0


def _label_size(lines: Sequence[str]) -> Size:
    if not lines:
        return 4.0, 0.0
    return max(_width(line, _SMALL) for line in lines) + 8, len(lines) * _LINE + 2


def _width(text: str, size: float) -> float:
    """How wide a text is, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0])


# -- drawing -------------------------------------------------------------------------------------------------


def _draw(axes: Axes, picture: Picture, layout: Layout, left: float) -> None:
    at = (left, _MARGIN)
    for name, box in sorted(layout.subgraphs.items(), key=lambda each: each[0].count(":")):
        _draw_subgraph(axes, name.rpartition(":")[2], box.moved(*at))
    tints = _tints(picture.nodes.values())
    routes = [_moved(layout.routes[number], *at) for number in range(len(picture.edges))]
    for edge, route in zip(picture.edges, routes, strict=True):
        _draw_edge(axes, edge, route)
    for edge, route in zip(picture.edges, routes, strict=True):
        _draw_label(axes, edge, route)
    for name, node in picture.nodes.items():
        _draw_node(axes, node, layout.boxes[name].moved(*at), tints)


def _moved(route: Route, right: float, down: float) -> Route:
    x, y = route.label
    return Route(tuple((x + right, y + down) for x, y in route.points), (x + right, y + down))


def _tints(nodes: Iterable[Node]) -> dict[str, str]:
    """What the nodes of each device are filled with. Where a node may yet run is not shown by colour."""
    devices = sorted({node.devices[0] for node in nodes if node.ran and len(node.devices) == 1})
    return {device: DEVICES[place % len(DEVICES)] for place, device in enumerate(devices)}


def _draw_node(axes: Axes, node: Node, box: Box, tints: dict[str, str]) -> None:
    if node.is_end:
        _round_box(axes, box, box.height / 2, facecolor=NODE_RIM, edgecolor=NODE_RIM)
        _write(axes, (box.x, box.y), node.title, _SMALL, "white")
        return
    fill = tints.get(node.where, NODE_FILL) if node.ran else NODE_FILL
    _round_box(axes, box, 7, facecolor=fill, edgecolor=NODE_RIM)
    _write(axes, (box.x, box.y - (7 if node.where else 0)), node.title, _NAME, INK)
    if node.where:
        _write(axes, (box.x, box.y + 9), node.where, _SMALL, FAINT)


def _draw_subgraph(axes: Axes, title: str, box: Box) -> None:
    _round_box(axes, box, 9, facecolor="#fbfcfd", edgecolor="#c3ccd5", linestyle=(0, (4, 3)))
    left, top = box.x - box.width / 2, box.y - box.height / 2
    _write(axes, (left + 10, top + 11), title, _SMALL, FAINT, ha="left")


def _round_box(axes: Axes, box: Box, radius: float, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = box.x - box.width / 2, box.y - box.height / 2
    shape = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(FancyBboxPatch(corner, box.width, box.height, shape, linewidth=1, **style))


def _write(axes: Axes, at: Point, text: str, size: float, colour: str, **options: Any) -> None:
    """A text that is nothing else: matplotlib would set what stands between dollar signs as a formula."""
    place = {"ha": "center", "va": "center_baseline", **options}
    axes.text(*at, text, size=size, color=colour, parse_math=False, **place)


def _draw_edge(axes: Axes, edge: Edge, route: Route) -> None:
    from matplotlib.patches import PathPatch, Polygon

    style, points = EDGES[edge.prompt_source], list(route.points)
    head = 4.5 + 1.3 * style.width
    is_loop = edge.source == edge.target
    (x, y), way = points[-1], (0.0 if is_loop else 1.0 if points[-1][1] > points[-2][1] else -1.0)
    side = head * 0.45
    if is_loop:
        corners = [(x, y), (x + head, y - side), (x + head, y + side)]
    else:
        corners = [(x, y), (x - side, y - way * head), (x + side, y - way * head)]
        points[-1] = (x, y - way * head * 0.8)
    path = loop_path(points) if is_loop else _path(points)
    _draw_line(axes, PathPatch(path, fill=False), edge.prompt_source, edge.conditional)
    axes.add_patch(Polygon(corners, closed=True, facecolor=style.colour, linewidth=0))


def _draw_line(axes: Axes, line: Any, source: Source | None, conditional: bool) -> None:
    style = EDGES[source]
    line.set(edgecolor=style.colour, linewidth=style.width, capstyle="butt")
    if conditional:
        line.set_linestyle((0, (5 / style.width, 3.5 / style.width)))
    axes.add_patch(line)


def _path(points: Sequence[Point]) -> Any:
    """Through all points, vertically at each; straight where one lies below the other."""
    from matplotlib.path import Path

    vertices, codes = [points[0]], [Path.MOVETO]
    for (x, y), (to_x, to_y) in pairwise(points):
        middle = (y + to_y) / 2
        vertices += [(x, middle), (to_x, middle), (to_x, to_y)]
        codes += [Path.CURVE4] * 3
    return Path(vertices, codes)


def loop_path(points: Sequence[Point]) -> Any:
    """Out of a node's side and back, by way of the point beside it."""
    from matplotlib.path import Path

    (x, low), (reach, _), (_, high) = points
    curve = [(x, low), (2 * reach - x, low), (2 * reach - x, high), (x + 6, high)]
    return Path(curve, [Path.MOVETO, *[Path.CURVE4] * 3])


def _draw_label(axes: Axes, edge: Edge, route: Route) -> None:
    (x, y), lines = route.label, edge.lines
    colour = EDGES[edge.prompt_source].colour if edge.prompt_source else FAINT
    options: dict[str, Any] = {"ha": "left"} if edge.source == edge.target else {}
    if not options and lines:
        width, height = _label_size(lines)
        _round_box(axes, Box(x, y, width, height), 3, facecolor="white", edgecolor="none")
    for number, line in enumerate(lines):
        source = edge.prompt_source is not None and line == edge.prompt_source
        weight = {"weight": "bold"} if source else {}
        down = (number - (len(lines) - 1) / 2) * _LINE
        _write(axes, (x, y + down), line, _SMALL, colour if source else INK, **options, **weight)


# -- legend --------------------------------------------------------------------------------------------------


def _legend_height(legend: Sequence[Any]) -> float:
    return len(legend) * (_LINE + 3) if legend else 0.0


def _draw_legend(axes: Axes, legend: Sequence[tuple[Source | None, bool, str]], top: float) -> None:
    from matplotlib.patches import PathPatch

    for number, (source, conditional, text) in enumerate(legend):
        y = top + number * (_LINE + 3)
        line = PathPatch(_straight((_MARGIN, y), (_MARGIN + _SAMPLE, y)), fill=False)
        _draw_line(axes, line, source, conditional)
        _write(axes, (_MARGIN + _SAMPLE + 8, y), text, _SMALL, INK, ha="left")


def _straight(start: Point, end: Point) -> Any:
    from matplotlib.path import Path

    return Path([start, end])
