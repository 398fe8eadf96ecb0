"""Who computed what when: the bars, arrows and first tokens of a timeline, from the events of a trace.

Times are in ms from the first event on. How a timeline looks is in `viz/timeline_png.py` and `viz/timeline_html.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from langgraph_pingpong.trace import Event

Kind = Literal["append", "prefill", "decode", "aborted"]
"""A piece of a prompt ahead of its call; a call's own prompt; an answer; an answer that was begun and aborted."""

AHEAD: tuple[Kind, ...] = ("append", "aborted")
"""What is done before a call comes. It has rows of its own, below those of calls."""

_NAMED = re.compile(r"overlap-(on|off|same-device)-")
"""How `pingpong run --trace` begins the names of runs."""


@dataclass(frozen=True, slots=True)
class Span:
    """One bar: from `start` to `end` (ms) on a device, for a node in a run of its graph.

    `tokens` are those of the prompt, of its piece up to there, or of the answer; None where that is not known.
    """

    run: str
    device: str
    kind: Kind
    node: str
    start: float
    end: float
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """An upstream's text reaches a downstream's prompt: a piece of it, or `whole` when the downstream is called."""

    source: Span
    target: Span
    leaves: float
    arrives: float
    whole: bool


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an answer, `ttft_ms` after the moment its upstream had finished."""

    device: str
    node: str
    at: float
    ttft_ms: float
    span: Span


@dataclass(frozen=True, slots=True)
class Lane:
    """What one device did: rows of bars that do not overlap, those of calls before those of work ahead."""

    device: str
    calls: Sequence[Sequence[Span]]
    ahead: Sequence[Sequence[Span]]


@dataclass(frozen=True)
class Timeline:
    """The bars of one or more runs, in the order of their beginnings, and what connects them."""

    title: str
    spans: Sequence[Span] = ()
    flows: Sequence[Flow] = ()
    first_tokens: Sequence[FirstToken] = ()

    @property
    def end(self) -> float:
        """When the last bar ends, in ms."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def nodes(self) -> list[str]:
        """Every node that has a bar, in the order of their first calls."""
        calls = [span.node for span in self.spans if span.kind not in AHEAD]
        return list(dict.fromkeys([*calls, *(span.node for span in self.spans)]))

    @property
    def devices(self) -> list[str]:
        """Every device that did something, by name."""
        return sorted({span.device for span in self.spans})

    def lanes(self, devices: Iterable[str]) -> list[Lane]:
        """A lane for each of these devices."""
        return [self._lane(device, [span for span in self.spans if span.device == device]) for device in devices]

    def _lane(self, device: str, spans: Sequence[Span]) -> Lane:
        calls = _rows(span for span in spans if span.kind not in AHEAD)
        return Lane(device, calls or [[]], _rows(span for span in spans if span.kind in AHEAD))


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """As few rows as bars need that must not overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        free = next((row for row in rows if row[-1].end <= span.start), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows


def timeline_of(events: Sequence[Event], title: str = "", until: float | None = None) -> Timeline:
    """The timeline of events, in the order they happened.

    Args:
        events: those of a trace; events of several runs may alternate.
        title: what is written above it.
        until: where bars end that are not over (s, monotonic); None is the last event of their run.
    """
    if not events:
        return Timeline(title)
    reader = _Reader(events[0].t, _upstreams(events))
    for event in events:
        reader.take(event)
    reader.cut(until)
    spans = sorted(reader.spans, key=lambda span: (span.start, span.end))
    return Timeline(title, spans, reader.flows(), reader.first_tokens())


def runs_of(events: Iterable[Event], name: str) -> dict[str, list[Event]]:
    """Events by what a timeline of them is called: runs that were compared are told apart, others are not."""
    parts: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        named = _NAMED.match(event.run)
        parts[f"overlap {named[1]}" if named else name].append(event)
    order = {"overlap off": 0}
    return {part: parts[part] for part in sorted(parts, key=lambda part: order.get(part, 1))}


def _upstreams(events: Iterable[Event]) -> dict[tuple[str, str], str]:
    """The upstreams that certificates tell, for traces whose appends do not."""
    certified = ((event, event.data["certificate"]["upstream"]) for event in events if event.name == "finish")
    return {(event.run, event.node): upstream for event, upstream in certified if upstream}


@dataclass
class _Text:
    """A text under way: from an upstream's answer to the prompt of a downstream. Times in ms."""

    run: str
    upstream: str
    downstream: str
    leaves: float
    arrives: float
    append: Span | None


@dataclass
class _Reader:
    """Reads events one by one. What has begun waits in `_open`, by kind, run and node, for its end."""

    start: float
    upstreams: Mapping[tuple[str, str], str]
    spans: list[Span] = field(default_factory=list)
    _open: defaultdict[tuple[Kind, str, str], list[Span]] = field(default_factory=lambda: defaultdict(list))
    _appends: defaultdict[tuple[str, str, str], list[Span]] = field(default_factory=lambda: defaultdict(list))
    _finished: defaultdict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    _claimed: dict[tuple[str, str], str] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _texts: list[_Text] = field(default_factory=list)
    _firsts: list[tuple[Event, float]] = field(default_factory=list)
    _by_node: defaultdict[tuple[str, str], list[Span]] = field(default_factory=lambda: defaultdict(list))

    def take(self, event: Event) -> None:
        """Take note of one event; those that no bar depends on are passed over."""
        self._last[event.run] = self._ms(event.t)
        if (handle := _HANDLERS.get(event.name)) is not None:
            handle(self, event)

    def cut(self, until: float | None) -> None:
        """No more events: what is not over ends here."""
        for waiting in self._open.values():
            for span in waiting:
                end = self._last[span.run] if until is None else self._ms(until)
                self.spans.append(replace(span, end=end))
        for span in self.spans:
            self._by_node[span.run, span.node].append(span)

    def flows(self) -> list[Flow]:
        """The texts whose both ends have a bar."""
        found = []
        for text in self._texts:
            source = self._at(text.run, text.upstream, ("decode",), text.leaves)
            target = text.append or self._at(text.run, text.downstream, ("prefill", "decode"), text.arrives)
            if source is not None and target is not None:
                found.append(Flow(source, target, text.leaves, text.arrives, whole=text.append is None))
        return found

    def first_tokens(self) -> list[FirstToken]:
        """The first tokens whose answer has a bar."""
        found = []
        for event, at in self._firsts:
            if (span := self._at(event.run, event.node, ("decode",), at)) is not None:
                found.append(FirstToken(span.device, event.node, at, event.data["ttft_ms"], span))
        return found

    def _at(self, run: str, node: str, kinds: Sequence[Kind], at: float) -> Span | None:
        """The bar of a node at a time; of two that meet there, the later one."""
        mine = (span for span in self._by_node[run, node] if span.kind in kinds and span.start <= at <= span.end)
        return max(mine, key=lambda span: span.start, default=None)

    def _ms(self, t: float) -> float:
        return (t - self.start) * 1000

    # -- what begins and ends ------------------------------------------------------------------------------

    def _begin(self, kind: Kind, event: Event, tokens: int | None = None, since: float | None = None) -> None:
        now = self._ms(event.t)
        span = Span(event.run, event.device, kind, event.node, now if since is None else since, now, tokens)
        self._open[kind, event.run, event.node].append(span)

    def _take(self, kind: Kind, event: Event, device: str) -> Span | None:
        """What waits longest for its end, on that device if any does there."""
        waiting = self._open[kind, event.run, event.node]
        if not waiting:
            return None
        there = [span for span in waiting if span.device == device]
        span = (there or waiting)[0]
        waiting.remove(span)
        return span

    def _end(self, kind: Kind, event: Event, tokens: int | None = None) -> Span | None:
        begun = self._take(kind, event, event.device)
        if begun is None:
            return None
        span = replace(begun, end=self._ms(event.t), tokens=begun.tokens if tokens is None else tokens)
        self.spans.append(span)
        return span

    def _append_started(self, event: Event) -> None:
        self._answer_dropped(event)
        self._begin("append", event, event.data["tokens"])

    def _append_ended(self, event: Event) -> None:
        if (span := self._end("append", event)) is not None:
            self._appends[event.run, event.node, event.device].append(span)

    def _edge_claimed(self, event: Event) -> None:
        """Of its appends, those that hold more than the static prefix brought words of the upstream."""
        self._append_ended(event)
        appends = self._appends.pop((event.run, event.node, event.device), [])
        upstream = event.data.get("upstream") or self.upstreams.get((event.run, event.node))
        if upstream is None:
            return
        self._claimed[event.run, event.node] = upstream
        for span in appends:
            if (span.tokens or 0) > event.data["static"]:
                self._texts.append(_Text(event.run, upstream, event.node, span.start, span.start, span))

    def _edge_dropped(self, event: Event) -> None:
        self._append_ended(event)
        self._answer_dropped(event)
        self._appends.pop((event.run, event.node, event.device), None)

    def _answer_begun(self, event: Event) -> None:
        self._answer_dropped(event)
        self._begin("aborted", event, event.data["prompt_tokens"])

    def _answer_dropped(self, event: Event) -> None:
        """An edge does one thing at a time: what it does next ends an answer, too. Older traces tell no other end."""
        self._end("aborted", event)

    def _called(self, event: Event) -> None:
        """A call begins; if it takes over an answer that was begun ahead, that is where its bar begins."""
        begun = self._take("aborted", event, event.device)
        self._begin("prefill", event, event.data["prompt_tokens"], begun.start if begun else None)
        self._handed_over(event)

    def _handed_over(self, event: Event) -> None:
        """The whole text of the upstream: that of the edge, or whoever finished last before this call."""
        finished = self._finished[event.run]
        upstream = self._claimed.pop((event.run, event.node), None) or max(
            finished, key=lambda node: finished[node], default=None
        )
        if upstream in finished:
            at = finished[upstream]
            self._texts.append(_Text(event.run, upstream, event.node, at, self._ms(event.t), None))

    def _first_token(self, event: Event) -> None:
        self._end("prefill", event)
        self._begin("decode", event)
        self._firsts.append((event, self._ms(event.t)))

    def _finish(self, event: Event) -> None:
        self._end("decode", event, event.data["certificate"]["output_tokens"])
        self._finished[event.run][event.node] = self._ms(event.t)

    def _failed(self, event: Event) -> None:
        for kind in ("prefill", "decode"):
            if self._end(kind, event) is not None:
                return

    def _moved(self, event: Event) -> None:
        """An answer goes on elsewhere, since its engine failed."""
        for kind in ("prefill", "decode"):
            if (left := self._take(kind, event, event.data["left"])) is not None:
                self.spans.append(replace(left, end=self._ms(event.t)))
                self._begin(kind, event, left.tokens)
                return


_HANDLERS: Mapping[str, Callable[[_Reader, Event], None]] = {
    "append.started": _Reader._append_started,
    "append.complete": _Reader._append_ended,
    "append.failed": _Reader._append_ended,
    "finalize": _Reader._edge_claimed,
    "edge.dropped": _Reader._edge_dropped,
    "speculation.started": _Reader._answer_begun,
    "speculation.dropped": _Reader._answer_dropped,
    "generate.started": _Reader._called,
    "first_token": _Reader._first_token,
    "finish": _Reader._finish,
    "generate.failed": _Reader._failed,
    "failover": _Reader._moved,
}
