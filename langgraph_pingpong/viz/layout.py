"""Where bars lie and which colours they have, the same in every form of a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from langgraph_pingpong.viz.timeline import Flow, Kind, Span, Timeline

_COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#7b61a8",
    "#8c6d46",
    "#66c2a5",
)
"""One for each agent, in turn; those of Okabe and Ito come first, which colour-blind people can tell apart."""

ABORTED = "#c8c8c8"

WHAT: dict[Kind, str] = {
    "decode": "answer",
    "prefill": "prompt, after the call",
    "append": "prompt, ahead of the call",
    "aborted": "answer begun in vain",
}
"""What each kind of bar is, in words."""

_CALL, _AHEAD, _GAP = 1.0, 0.6, 0.55
"""Heights of rows, and the gap between lanes, in units of a call's row."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its span, its middle from above, and its height, in units of a call's row."""

    span: Span
    y: float
    height: float


@dataclass(frozen=True)
class Panel:
    """The bars of a timeline, and from where to where the lane of each device reaches."""

    timeline: Timeline
    bars: dict[Span, Bar]
    lanes: dict[str, tuple[float, float]]

    @property
    def height(self) -> float:
        """Down to the end of the last lane."""
        return max((bottom for _, bottom in self.lanes.values()), default=0.0)

    def arrow(self, flow: Flow) -> tuple[float, float] | None:
        """From which height to which an arrow goes: between the edges of its bars that face each other."""
        source, target = self.bars[flow.source], self.bars[flow.target]
        if source.y == target.y:
            return None
        down = 1 if target.y > source.y else -1
        return source.y + down * source.height / 2, target.y - down * target.height / 2


def panels_of(timelines: Sequence[Timeline]) -> list[Panel]:
    """A panel for each timeline. All have a lane for each device that is in any of them."""
    devices = sorted({device for timeline in timelines for device in timeline.devices})
    return [_panel(timeline, devices) for timeline in timelines]


def _panel(timeline: Timeline, devices: Iterable[str]) -> Panel:
    bars: dict[Span, Bar] = {}
    lanes: dict[str, tuple[float, float]] = {}
    y = _GAP
    for lane in timeline.lanes(devices):
        top = y
        for rows, height in ((lane.calls, _CALL), (lane.ahead, _AHEAD)):
            for row in rows:
                bars |= {span: Bar(span, y + height / 2, height * 0.86) for span in row}
                y += height
        lanes[lane.device] = top, y
        y += _GAP
    return Panel(timeline, bars, lanes)


def colours_of(timelines: Iterable[Timeline]) -> dict[str, str]:
    """A colour for each agent of these timelines."""
    nodes = dict.fromkeys(node for timeline in timelines for node in timeline.nodes)
    return {node: _COLOURS[place % len(_COLOURS)] for place, node in enumerate(nodes)}


def tinted(colour: str, share: float) -> str:
    """A colour mixed with white: `share` is what is left of it."""
    return "#" + "".join(f"{round(255 - share * (255 - each)):02x}" for each in _rgb(colour))


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = _rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "white"


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))


def thinned(flows: Sequence[Flow], most: int) -> Iterator[Flow]:
    """Of the pieces that go from one answer to one prompt, at most so many; what is handed over whole stays."""
    by_edge: dict[tuple[Span, str], list[Flow]] = {}
    for flow in flows:
        if flow.whole:
            yield flow
        else:
            by_edge.setdefault((flow.source, flow.target.node), []).append(flow)
    for pieces in by_edge.values():
        step = -(-len(pieces) // most)
        yield from pieces[::step]
