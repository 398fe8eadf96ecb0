"""`pingpong run --live`: lanes of devices and the progress of agents on the terminal, while the graph runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.text import Text

from langgraph_pingpong.cli.screen import Screen
from langgraph_pingpong.viz.layout import WHAT, colours_of
from langgraph_pingpong.viz.timeline import Kind, Lane, Span, Timeline, timeline_of

if TYPE_CHECKING:
    from langgraph_pingpong.trace import Event

MARKS: Mapping[Kind, str] = {"decode": "█", "prefill": "▒", "append": "▄", "aborted": "·"}
"""How each kind of work looks; its colour is the agent's."""

_SHORTEST_MS = 25
"""What one character stands for at the start of a run; twice as much whenever the lanes are full."""

_INDENT = 2


class LiveScreen(Screen):
    """A screen with a lane for each device and a line for each agent. The lanes stay when the run is over."""

    def __init__(self, console: Console, count_tokens: Callable[[str], int]) -> None:
        self._events: list[Event] = []  # before what follows, which draws once
        super().__init__(console, count_tokens)

    def __call__(self, event: Event) -> None:
        """Take note of an event; called in the engines' thread."""
        super().__call__(event)
        self._events.append(event)

    def _draw(self) -> Group:
        timeline = timeline_of(list(self._events), until=time.monotonic())
        colours = colours_of([timeline])
        agents = [self._agent(node, colours[node]) for node in timeline.nodes]
        return Group(*lanes(timeline, self._console.width), Text(), *agents)

    def _agent(self, node: str, colour: str) -> Text:
        return Text.assemble(
            (node or "-", colour), (f" · {self._doing(node)}", "dim"), overflow="ellipsis", no_wrap=True
        )

    def _doing(self, node: str) -> str:
        """What an agent does now, or did last."""
        mine = [answer for answer in list(self._answers.values()) if answer.node == node]
        if mine and not mine[-1].complete:
            return mine[-1].progress(self._count_tokens)
        if waiting := self._waiting.get(node):
            return waiting
        return mine[-1].summary() if mine else ""

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        timeline = timeline_of(self._events)
        self._console.print(Group(*lanes(timeline, self._console.width), Text()))


def lanes(timeline: Timeline, width: int) -> Iterator[Text]:
    """The lanes as lines of text, at most `width` characters wide, and what their characters mean."""
    margin = max((len(device) for device in timeline.devices), default=0) + _INDENT
    cells = max(width - margin, 1)
    cell_ms = _SHORTEST_MS * 2 ** max(0, math.ceil(math.log2(max(timeline.end, 1) / _SHORTEST_MS / cells)))
    colours = colours_of([timeline])
    for lane in timeline.lanes(timeline.devices):
        yield from _lane(lane, margin, cell_ms, colours)
    kinds = {span.kind for span in timeline.spans}
    legend = [f"{mark} {WHAT[kind]}" for kind, mark in MARKS.items() if kind in kinds]
    scale = f"{timeline.end:,.0f} ms, {cell_ms:,} a character"
    yield Text(" · ".join([scale, *legend]), style="dim", overflow="ellipsis", no_wrap=True)


def _lane(lane: Lane, margin: int, cell_ms: float, colours: Mapping[str, str]) -> Iterator[Text]:
    # Always a row for work ahead: what is below must not jump when the first append comes.
    for place, row in enumerate([*lane.calls, *(lane.ahead or [[]])]):
        label = lane.device if place == 0 else ""
        yield Text.assemble(label.ljust(margin), _row(row, cell_ms, colours), overflow="crop", no_wrap=True)


def _row(row: Sequence[Span], cell_ms: float, colours: Mapping[str, str]) -> Text:
    text = Text()
    for span in row:
        # To a thousandth, so that what begins where another ends has no character in common with it for a rounding.
        begin = max(int(round(span.start / cell_ms, 3)), len(text))
        end = math.ceil(round(span.end / cell_ms, 3))
        text.append(" " * (begin - len(text)))
        text.append(MARKS[span.kind] * max(end - begin, 0), style=colours[span.node])
    return text
