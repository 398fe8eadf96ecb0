"""Items in rows: which row each gets, in what order they stand there, and where.

What is linked over several rows has a place in each between. Orders are chosen so that few links cross; positions are
as near to those of the neighbours as the widths allow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import fmean

Point = tuple[float, float]
Size = tuple[float, float]

ACROSS, DOWN = 22.0, 15.0
"""Gaps between neighbours of a row, and between rows, in points."""

SWEEPS = 12
"""How often orders and positions are gone through, down and up."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box by its middle and its size."""

    x: float
    y: float
    width: float
    height: float

    def moved(self, right: float, down: float) -> Box:
        """The same box elsewhere."""
        return Box(self.x + right, self.y + down, self.width, self.height)


@dataclass(frozen=True, slots=True)
class Link:
    """An edge within a level, from above to below."""

    upper: Hashable
    lower: Hashable
    edge: int


@dataclass(frozen=True, slots=True)
class _Between:
    """A place of a link in a row that it crosses."""

    edge: int
    row: int


class Rows:
    """Items with links that all lead down. Items stand in even rows, labels of links in odd ones.

    `sides` names items that belong into the first row ('top') or the last one ('bottom').
    """

    def __init__(
        self,
        items: Mapping[Hashable, Size],
        links: Sequence[Link],
        sides: Mapping[Hashable, str],
        labels: Mapping[int, Size],
    ) -> None:
        row_of = _row_of(items, links, sides)
        self._sizes: dict[Hashable, Size] = dict(items)
        self._rows: list[list[Hashable]] = [[] for _ in range(max(row_of.values(), default=0) + 1)]
        self._places: dict[int, list[Hashable]] = {}
        self._labels: dict[int, Hashable] = {}
        self.bands: dict[Hashable, tuple[float, float]] = {}
        """From where to where the row of each item reaches, once it is placed."""
        for item, row in row_of.items():
            self._rows[row].append(item)
        for link in links:
            self._add_places(link, row_of[link.upper], row_of[link.lower], labels)
        self._above: dict[Hashable, list[Hashable]] = {item: [] for item in self._sizes}
        self._below: dict[Hashable, list[Hashable]] = {item: [] for item in self._sizes}
        for link in links:
            for upper, lower in pairwise([link.upper, *self._places[link.edge], link.lower]):
                self._below[upper].append(lower)
                self._above[lower].append(upper)

    def places(self, edge: int) -> Sequence[Hashable]:
        """What stands for a link in the rows that it crosses, from above."""
        return self._places[edge]

    def label_place(self, edge: int) -> Hashable | None:
        """That of them where its label is; None if it has none here."""
        return self._labels.get(edge)

    def place(self, margin: float, top: float, at_least: float) -> tuple[dict[Hashable, Box], float, float]:
        """Boxes of all items and places, and the width and height of the whole, margins included."""
        self._order()
        middles = self._middles()
        left = min((middles[item] - self._sizes[item][0] / 2 for item in middles), default=0.0)
        right = max((middles[item] + self._sizes[item][0] / 2 for item in middles), default=0.0)
        width = max(right - left + 2 * margin, at_least)
        shift, y = (width - right - left) / 2, top
        boxes: dict[Hashable, Box] = {}
        for row in self._rows:
            height = max((self._sizes[item][1] for item in row), default=0.0)
            for item in row:
                own = height if isinstance(item, _Between) else self._sizes[item][1]
                self.bands[item] = y, y + height
                boxes[item] = Box(middles[item] + shift, y + height / 2, self._sizes[item][0], own)
            y += height + DOWN
        return boxes, width, y - DOWN + margin

    def _add_places(self, link: Link, first: int, last: int, labels: Mapping[int, Size]) -> None:
        places = [_Between(link.edge, row) for row in range(first + 1, last)]
        middle = (len(places) - 1) // 4 * 2  # an odd row, near the middle
        for number, place in enumerate(places):
            self._sizes[place] = labels.get(link.edge, (4.0, 0.0)) if number == middle else (4.0, 0.0)
            self._rows[place.row].append(place)
        self._places[link.edge] = list(places)
        if link.edge in labels:
            self._labels[link.edge] = places[middle]

    # -- order -----------------------------------------------------------------------------------------------

    def _order(self) -> None:
        """Sort each row by where the neighbours stand, down and up, and keep what crosses least."""
        best, fewest = [list(row) for row in self._rows], self._crossings()
        for sweep in range(SWEEPS):
            down = sweep % 2 == 0
            near = self._above if down else self._below
            for before, row in pairwise(self._rows if down else self._rows[::-1]):
                _sort(row, near, {item: place for place, item in enumerate(before)})
            if (crossings := self._crossings()) < fewest:
                best, fewest = [list(row) for row in self._rows], crossings
        self._rows = best

    def _crossings(self) -> int:
        count = 0
        for upper, lower in pairwise(self._rows):
            at = {item: place for place, item in enumerate(lower)}
            ends = [at[below] for item in upper for below in sorted(self._below[item], key=at.__getitem__)]
            count += sum(one > other for place, one in enumerate(ends) for other in ends[place + 1 :])
        return count

    # -- positions -------------------------------------------------------------------------------------------

    def _middles(self) -> dict[Hashable, float]:
        """Where each item stands from left to right, by its middle."""
        at: dict[Hashable, float] = {}
        for row in self._rows:
            at |= self._spread(row, lambda item: 0.0)

        def wanted(near: Iterable[Mapping[Hashable, Sequence[Hashable]]]) -> Callable[[Hashable], float]:
            return lambda item: fmean([at[other] for each in near for other in each[item]] or [at[item]])

        for _ in range(SWEEPS):
            for row in self._rows:
                at |= self._spread(row, wanted([self._above]))
            for row in self._rows[::-1]:
                at |= self._spread(row, wanted([self._below]))
        for row in self._rows:
            at |= self._spread(row, wanted([self._above, self._below]))
        return at

    def _spread(self, row: Sequence[Hashable], wanted: Callable[[Hashable], float]) -> dict[Hashable, float]:
        """Positions as near as can be to those wanted, in the sense of least squares, with the gaps kept."""
        offsets = [0.0]
        for one, other in pairwise(row):
            offsets.append(offsets[-1] + (self._sizes[one][0] + self._sizes[other][0]) / 2 + ACROSS)
        blocks: list[list[float]] = []
        for item, offset in zip(row, offsets, strict=False):
            blocks.append([wanted(item) - offset])
            while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
                last = blocks.pop()
                blocks[-1] += last
        values = [fmean(block) for block in blocks for _ in block]
        return {item: value + offset for item, value, offset in zip(row, values, offsets, strict=False)}


def _sort(row: list[Hashable], near: Mapping[Hashable, Sequence[Hashable]], at: Mapping[Hashable, int]) -> None:
    """Sort by the mean place of the neighbours; what has none keeps its place."""
    keys = {item: fmean([at[other] for other in near[item]] or [place]) for place, item in enumerate(row)}
    row.sort(key=keys.__getitem__)


def _row_of(items: Iterable[Hashable], links: Sequence[Link], sides: Mapping[Hashable, str]) -> dict[Hashable, int]:
    """The row of each item: two below the lowest of what leads to it."""
    above: dict[Hashable, list[Hashable]] = {item: [] for item in items}
    for link in links:
        above[link.lower].append(link.upper)

    @cache
    def row(item: Hashable) -> int:
        return max((row(upper) + 2 for upper in above[item]), default=0)

    rows = {item: row(item) for item in above}
    last = max(rows.values(), default=0)
    return {item: last if sides.get(item) == "bottom" else number for item, number in rows.items()}
