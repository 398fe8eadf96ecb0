"""Prompts that are still growing: which parts are known, and whose words they wait for.

A downstream prompt is a row of segments: text that is known, and places where the answer of a call will stand. The
places are found by rendering the prompt with made-up answers, two for each call.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph_pingpong.tokens import ChatTemplate


@dataclass(frozen=True, slots=True)
class CallKey:
    """Which call of the model: `number` counts the calls of one task, `push` tells parallel `Send`s apart.

    `site` names the nodes of the enclosing graphs, then the node itself. Behind the name of a graph that a `Send` led
    to stands the position of that: of two that run at the same time, each has calls of its own.
    """

    site: tuple[str, ...]
    number: int = 0
    push: int | None = None

    @property
    def node(self) -> str:
        """The node that makes the call."""
        return self.site[-1]

    def __str__(self) -> str:
        """Tells the call from the others that its graph has under way."""
        return f"{'/'.join(self.site)}#{self.number}" + ("" if self.push is None else f"[{self.push}]")


@dataclass(frozen=True, slots=True)
class GraphSite:
    """Where a graph stands within a run, and the names of its nodes; the run's own stands at ()."""

    site: tuple[str, ...] = ()
    nodes: frozenset[str] = frozenset()

    def holds(self, key: CallKey) -> bool:
        """Whether a call is one of the graph's, and not of the function that runs it, whose site begins like theirs."""
        within = key.site[len(self.site) :]
        if not self.site:
            return True
        return key.site[: len(self.site)] == self.site and bool(within) and within[0].partition(":")[0] in self.nodes


RUN = GraphSite()
"""The run's own graph, with all within it."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, by the id that the model's answer gave it: it speaks like a call of the model."""

    id: str


@dataclass(frozen=True, slots=True)
class Stream:
    """A place where the answer of a call, or a tool's result, stands: as it is, or without white space at an end."""

    call: Hashable
    lstrip: bool = False
    rstrip: bool = False


Segment = str | Stream
"""Known text, or a place for an answer."""

SPEAKERS = (CallKey, ToolResult)
"""Who will speak in this run. A place of anything else is one that nobody fills."""

MAX_SUFFIX = 4000
"""Characters behind the answers of a prompt that are encoded again with each of their words."""


BLANK = "\n\n\n"
"""White space around a made-up answer: line breaks, which templates strip most, and more than they put there."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a made-up answer stands in a text."""

    start: int
    end: int
    stream: Stream


@dataclass
class Probes:
    """Made-up answers, two for each call.

    The second is what templates and prompts like to change: quotes, line breaks, doubled spaces, white space within
    and around it, letters beyond ASCII, length. What both leave as it is, is used as it is. The two share no first
    character, so that a common prefix of two renderings ends where the answer begins.
    """

    _texts: dict[Hashable, tuple[str, str]] = field(default_factory=dict)

    def of(self, call: Hashable, variant: int) -> str:
        """The made-up answer of a call, `variant` 0 or 1."""
        if call not in self._texts:
            mark = f"{len(self._texts):03}"
            long = f'Kx{mark} "second"  probe,\nwith\ttabs, naïve ünïcode 潮池 and more. ' + "It goes on. " * 160
            self._texts[call] = (f"Zq{mark} probe", f"{BLANK}{long}End {mark}{BLANK}")
        return self._texts[call][variant]

    def find(self, text: str, start: int, variant: int) -> _Place | None:
        """The first made-up answer in `text` from `start` on, with or without the white space around it."""
        places = [
            _place(call, text, at, texts[variant])
            for call, texts in self._texts.items()
            if (at := text.find(texts[variant].strip(), start)) >= 0
        ]
        return min(places, key=lambda place: place.start, default=None)


def _place(call: Hashable, text: str, at: int, answer: str) -> _Place:
    """The place of an answer whose first character that is not white space stands at `at`."""
    end = at + len(answer.strip())
    before, after = (BLANK if answer.startswith(BLANK) else ""), (BLANK if answer.endswith(BLANK) else "")
    lstrip, rstrip = not text.endswith(before, 0, at), not text.startswith(after, end)
    return _Place(at if lstrip else at - len(before), end if rstrip else end + len(after), Stream(call, lstrip, rstrip))


def prompt_segments(renderings: Sequence[str], probes: Probes) -> list[Segment]:
    """The segments of a prompt, from its renderings with the first and with the second made-up answers.

    Where the two part in any other way than by their answers, the segments end.
    """
    first, second = renderings
    segments: list[Segment] = []
    i = j = 0
    while True:
        a, b = probes.find(first, i, 0), probes.find(second, j, 1)
        if a is None or b is None or a.stream.call != b.stream.call or first[i : a.start] != second[j : b.start]:
            rest = first[i : i + common_prefix(first[i:], second[j:])]
            return [*segments, rest] if rest else segments
        segments += [first[i : a.start], b.stream]  # only the second has white space that may be stripped
        i, j = a.end, b.end


def agreed(rows: Sequence[Sequence[Segment]]) -> list[Segment]:
    """The longest beginning that all rows of segments share."""
    shared = list(rows[0])
    for row in rows[1:]:
        shared = _shared(shared, row)
    return shared


def _shared(a: Sequence[Segment], b: Sequence[Segment]) -> list[Segment]:
    segments: list[Segment] = []
    for x, y in zip(a, b, strict=False):
        if x != y:
            if isinstance(x, str) and isinstance(y, str):
                segments.append(x[: common_prefix(x, y)])
            break
        segments.append(x)
    return segments


def known_beginning(segments: Sequence[Segment]) -> list[Segment]:
    """The segments before the first place that waits for an answer."""
    first = next((i for i, segment in enumerate(segments) if isinstance(segment, Stream)), len(segments))
    return list(segments[:first])


class GrowingPrompt:
    """A downstream prompt whose answers are still coming: the ids of it that are final.

    Answers are taken in the order in which they stand in the prompt; what a later one says meanwhile waits.
    """

    def __init__(self, template: ChatTemplate, segments: Sequence[Segment]) -> None:
        self._growing = template.growing()
        self._segments = list(segments)
        unspoken = (i for i, s in enumerate(segments) if isinstance(s, Stream) and not isinstance(s.call, SPEAKERS))
        self._reach = next(unspoken, len(segments))
        self._heard: dict[Hashable, list[str]] = {s.call: [] for s in segments if isinstance(s, Stream)}
        self._used = 0  # pieces of the answer at the head that were looked at
        self._pending = ""  # what they said that may yet be stripped from its end
        self._begun = False  # whether any of it is in the ids
        self._ended: set[Hashable] = set()
        self._whole = bool(segments) and isinstance(last := segments[-1], str) and template.opens_answer(last)
        self._lost = False  # whether the rest cannot be known
        self._advance()
        self.static_tokens = len(self._growing.ids)
        """How many of the ids were known before any answer."""

    @property
    def calls(self) -> frozenset[Hashable]:
        """The calls whose answers the prompt holds."""
        return frozenset(self._heard)

    @property
    def reach(self) -> int:
        """How many segments lie before the first one that no call of this run will speak."""
        return self._reach

    @property
    def ids(self) -> Sequence[int]:
        """The final ids so far, a prefix of the downstream's prompt as far as can be known."""
        return self._growing.ids

    def if_ended(self) -> tuple[int, ...] | None:
        """All ids of the prompt if the answers that it waits for were complete as they are.

        None where the segments do not reach to where the next answer begins, or much text stands behind the answers,
        which would take long to encode.
        """
        if not self._whole or sum(len(text) for text in self._segments if isinstance(text, str)) > MAX_SUFFIX:
            return None
        ended = copy.copy(self)
        ended._growing = self._growing.fork()
        ended._segments = list(self._segments)
        ended._ended = {*self._heard}
        ended._advance()
        return None if ended._lost else (*ended.ids, *ended._growing.rest())

    def feed(self, call: Hashable, text: str) -> None:
        """Take more of the answer of a call."""
        if text and call in self._heard:
            self._heard[call].append(text)
            self._advance()

    def finish(self, call: Hashable) -> None:
        """The answer of a call is complete."""
        if call in self._heard:
            self._ended.add(call)
            self._advance()

    def _advance(self) -> None:
        """Move over every segment that is known to its end."""
        while self._segments:
            head = self._segments[0]
            if isinstance(head, str):
                self._growing.append(head, rendered=True)
            elif not self._take(head):
                return
            self._segments.pop(0)

    def _take(self, place: Stream) -> bool:
        """Take what the answer at the head said since; whether that was all of it."""
        pieces, ended = self._heard[place.call], place.call in self._ended
        text = self._pending + "".join(pieces[self._used :])
        if place.lstrip and not self._begun:
            text = text.lstrip("\n")
        known = text.rstrip() if place.rstrip else text
        self._used, self._pending = len(pieces), text[len(known) :]
        if (place.lstrip and not self._begun and known[:1].isspace()) or (ended and self._pending.strip("\n")):
            self._segments.clear()
            self._lost = True  # some templates strip line breaks only, some all white space: who knows
            return False
        if known:
            self._growing.append(known)
            self._begun = True
        if ended:  # the answer may stand in the prompt again
            self._used, self._pending, self._begun = 0, "", False
        return ended


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading elements are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
