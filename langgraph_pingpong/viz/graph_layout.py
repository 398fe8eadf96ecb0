"""Where the nodes, edges and labels of a graph lie: in layers, from above, subgraphs in boxes of their own.

Nodes stand in every other row. Every edge has a place in each row that it crosses, and its label is the place in a row
between: so nothing lies on anything else. A subgraph is laid out by itself and takes the room of one node; edges that
cross its border run through ports there. Lengths are in points, y goes down.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from langgraph_pingpong.viz.graph_rows import Box, Link, Point, Rows, Size

PADDING, TITLE = 14.0, 16.0
"""Of the box round a subgraph, and what its title takes."""

LOOP = 30.0
"""What an edge from a node to itself takes beside the node, besides its label."""

_PORT = 14.0


@dataclass(frozen=True, slots=True)
class Route:
    """The way of an edge from its source to its target, straight or in curves that leave every point vertically."""

    points: tuple[Point, ...]
    label: Point


@dataclass
class Layout:
    """Where everything lies within `width` and `height`; `routes` are by the number of the edge."""

    width: float = 0.0
    height: float = 0.0
    boxes: dict[str, Box] = field(default_factory=dict)
    subgraphs: dict[str, Box] = field(default_factory=dict)
    routes: dict[int, Route] = field(default_factory=dict)


def lay_out(sizes: Mapping[str, Size], edges: Sequence[tuple[str, str]], labels: Sequence[Size]) -> Layout:
    """A place for every node and edge. A node's id names the subgraphs around it: 'outer:inner'."""
    loops: dict[str, Size] = {}
    for (source, target), (width, height) in zip(edges, labels, strict=True):
        if source == target:
            loops[source] = LOOP + width, height
    level = _lay_out_level(_Task(sizes, edges, labels, loops), "", [])
    layout = Layout(level.width, level.height, level.boxes, level.subgraphs)
    ways = _leave_ports(level)
    for number, (source, target) in enumerate(edges):
        if source == target:
            layout.routes[number] = _loop(layout.boxes[source])
        else:
            points, label = ways[number], level.labels[number]
            turned = points[::-1] if number in level.reversed else points
            layout.routes[number] = Route(tuple(turned), label)
    return layout


def _loop(box: Box) -> Route:
    right, reach = box.x + box.width / 2, box.height / 3
    points = (right, box.y + reach), (right + LOOP / 2, box.y), (right, box.y - reach)
    return Route(points, (right + LOOP - 2, box.y))


def _leave_ports(level: _Level) -> dict[int, list[Point]]:
    """Ways that leave and enter nodes side by side rather than all at the same point."""
    ways = {number: list(way) for number, way in level.ways.items()}
    sides: dict[tuple[str, int], list[int]] = {}
    for number, (upper, lower) in level.leaves.items():
        sides.setdefault((upper, 0), []).append(number)
        sides.setdefault((lower, -1), []).append(number)
    for (name, end), numbers in sides.items():
        box, following = level.boxes[name], 1 if end == 0 else -2
        numbers.sort(key=lambda number: ways[number][following])
        step = min(_PORT, 0.7 * box.width / len(numbers))
        for place, number in enumerate(numbers):
            x, y = (
                box.x + (place - (len(numbers) - 1) / 2) * step,
                box.y + (box.height if end == 0 else -box.height) / 2,
            )
            edge_of_row = level.bands[name][1 if end == 0 else 0]
            ways[number][end] = x, y
            if edge_of_row != y:  # straight on, until what stands beside the node is behind
                ways[number].insert(1 if end == 0 else len(ways[number]) - 1, (x, edge_of_row))
    return ways


# -- one level -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    sizes: Mapping[str, Size]
    edges: Sequence[tuple[str, str]]
    labels: Sequence[Size]
    loops: Mapping[str, Size]


@dataclass(frozen=True, slots=True)
class _Port:
    """Where an edge crosses the border of the subgraph that holds its node: at the top or at the bottom."""

    edge: int
    node: str
    side: Literal["top", "bottom"]


@dataclass
class _Level:
    """A graph or subgraph that is laid out. `ways` lead from above to below; `leaves` are the nodes at their ends.

    `bands` tell from where to where the row of each node reaches.
    """

    width: float = 0.0
    height: float = 0.0
    boxes: dict[str, Box] = field(default_factory=dict)
    subgraphs: dict[str, Box] = field(default_factory=dict)
    bands: dict[str, tuple[float, float]] = field(default_factory=dict)
    ways: dict[int, list[Point]] = field(default_factory=dict)
    labels: dict[int, Point] = field(default_factory=dict)
    leaves: dict[int, tuple[str, str]] = field(default_factory=dict)
    reversed: set[int] = field(default_factory=set)


def _lay_out_level(task: _Task, prefix: str, ports: Sequence[_Port]) -> _Level:
    children = list(dict.fromkeys(_child(name, prefix) for name in task.sizes if name.startswith(prefix)))
    links, backwards = _links(task, prefix, children, ports)
    inner = {
        child: _lay_out_level(task, f"{child}:", _ports(task, child, links))
        for child in children
        if child not in task.sizes
    }
    items: dict[Hashable, Size] = dict.fromkeys(ports, (2.0, 0.0))
    for child in children:
        items[child] = (inner[child].width, inner[child].height) if child in inner else _size(task, child)
    sides: dict[Hashable, str] = {port: port.side for port in ports}
    rows = Rows(items, links, sides, {link.edge: task.labels[link.edge] for link in links if not _is_port(link)})
    level = _Level(reversed=backwards)
    margin = (PADDING, PADDING + TITLE) if prefix else (0.0, 0.0)
    boxes, level.width, level.height = rows.place(*margin, at_least=_title_width(prefix))
    for child in children:
        if child in inner:
            _take_in(level, child, inner[child], boxes[child])
        else:
            level.boxes[child] = _resized(boxes[child], task.sizes[child])
            level.bands[child] = rows.bands[child]
    for link in links:
        _join(level, link, inner, boxes, rows)
    return level


def _is_port(link: Link) -> bool:
    return isinstance(link.upper, _Port) or isinstance(link.lower, _Port)


def _resized(box: Box, size: Size) -> Box:
    """A box of another size around the same middle."""
    return Box(box.x, box.y, *size)


def _size(task: _Task, name: str) -> Size:
    """The room that a node takes, with the loops beside it."""
    (width, height), (beside, loop_height) = task.sizes[name], task.loops.get(name, (0.0, 0.0))
    return width + 2 * beside, max(height, loop_height)


def _title_width(prefix: str) -> float:
    return 6.5 * len(prefix.strip(":").rpartition(":")[2]) + 2 * PADDING if prefix else 0.0


def _child(name: str, prefix: str) -> str:
    """What of a level a node is, or is within."""
    return prefix + name[len(prefix) :].partition(":")[0]


def _links(task: _Task, prefix: str, children: Sequence[str], ports: Sequence[_Port]) -> tuple[list[Link], set[int]]:
    """The edges of a level from above to below, and the numbers of those that were turned round for that."""
    pairs = {}
    for number, (source, target) in enumerate(task.edges):
        if source.startswith(prefix) and target.startswith(prefix):
            pair = _child(source, prefix), _child(target, prefix)
            if pair[0] != pair[1]:
                pairs[number] = pair
    backwards = _backwards(children, pairs)
    links = [Link(*(pair[::-1] if number in backwards else pair), number) for number, pair in pairs.items()]
    for port in ports:
        child = _child(port.node, prefix)
        links.append(Link(port, child, port.edge) if port.side == "top" else Link(child, port, port.edge))
    return links, backwards


def _backwards(children: Iterable[str], pairs: Mapping[int, tuple[str, str]]) -> set[int]:
    """The edges that close a circle, seen from the first node on."""
    out: dict[str, list[tuple[int, str]]] = {}
    for number, (source, target) in pairs.items():
        out.setdefault(source, []).append((number, target))
    found: set[int] = set()
    done: set[str] = set()
    for first in children:
        if first in done:
            continue
        stack = [(first, iter(out.get(first, ())))]
        open_nodes = {first: None}
        while stack:
            node, ahead = stack[-1]
            number, target = next(ahead, (-1, ""))
            if number < 0:
                stack.pop()
                open_nodes.pop(node)
                done.add(node)
            elif target in open_nodes:
                found.add(number)
            elif target not in done:
                open_nodes[target] = None
                stack.append((target, iter(out.get(target, ()))))
    return found


def _ports(task: _Task, child: str, links: Sequence[Link]) -> list[_Port]:
    """The ports of a subgraph: its edges to and from elsewhere, in the directions that they have there."""
    ports = []
    for link in links:
        if child in (link.upper, link.lower):
            node = next(name for name in task.edges[link.edge] if name.startswith(f"{child}:"))
            ports.append(_Port(link.edge, node, "bottom" if link.upper == child else "top"))
    return ports


def _take_in(level: _Level, child: str, inner: _Level, box: Box) -> None:
    """Put a subgraph that is laid out where its box lies."""
    right, down = box.x - inner.width / 2, box.y - inner.height / 2
    level.subgraphs[child] = box
    level.subgraphs |= {name: each.moved(right, down) for name, each in inner.subgraphs.items()}
    level.boxes |= {name: each.moved(right, down) for name, each in inner.boxes.items()}
    level.ways |= {number: _moved(way, right, down) for number, way in inner.ways.items()}
    level.labels |= {number: _moved([point], right, down)[0] for number, point in inner.labels.items()}
    level.bands |= {name: (top + down, bottom + down) for name, (top, bottom) in inner.bands.items()}
    level.leaves |= inner.leaves
    level.reversed |= inner.reversed


def _moved(points: Iterable[Point], right: float, down: float) -> list[Point]:
    return [(x + right, y + down) for x, y in points]


def _join(level: _Level, link: Link, inner: Mapping[str, _Level], boxes: Mapping[Hashable, Box], rows: Rows) -> None:
    """The whole way of a link: what lies in the subgraph above, what lies here, what lies in the one below."""
    above, upper = _end(link, link.upper, 0, inner, boxes)
    below, lower = _end(link, link.lower, 1, inner, boxes)
    for way, item in ((above, link.upper), (below, link.lower)):
        if isinstance(item, _Port):  # straight past what stands beside it
            way[:] = [(boxes[item].x, y) for y in rows.bands[item]]
    if link.upper in inner:
        above.append((above[-1][0], rows.bands[link.upper][1]))
    if link.lower in inner:
        below.insert(0, (below[0][0], rows.bands[link.lower][0]))
    between = [point for place in rows.places(link.edge) for point in through(boxes[place])]
    level.ways[link.edge] = [*above, *between, *below]
    level.leaves[link.edge] = upper, lower
    label = rows.label_place(link.edge)
    if label is not None:
        level.labels[link.edge] = boxes[label].x, boxes[label].y


def _end(
    link: Link, item: Hashable, end: Literal[0, 1], inner: Mapping[str, _Level], boxes: Mapping[Hashable, Box]
) -> tuple[list[Point], str]:
    """The way of a link within what is at its upper (0) or lower (1) end, and the node there, if it is known here."""
    box = boxes[item]
    if isinstance(item, str) and item in inner:
        level = inner[item]
        way = _moved(level.ways[link.edge], box.x - level.width / 2, box.y - level.height / 2)
        return way, level.leaves[link.edge][end]
    return [(box.x, box.y)], item if isinstance(item, str) else ""


def through(box: Box) -> list[Point]:
    """Straight down through a place in a row."""
    if not box.height:
        return [(box.x, box.y)]
    return [(box.x, box.y - box.height / 2), (box.x, box.y + box.height / 2)]
