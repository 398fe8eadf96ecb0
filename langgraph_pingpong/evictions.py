"""What engines had cached and lost, and whether it was needed again.

Each prompt that was computed on an engine is noted, block by block. A later prompt that begins with blocks that were
computed there, and of which the engine finds fewer, tells what was evicted and needed again. What was evicted in all is
counted where the engine tells it (`KvPort.listen`). Elsewhere it follows from how many blocks went in and how many the
cache holds: an engine evicts when it is full, and not before. Blocks that the engine shares in other ways than by their
beginning are not known here, so that figure is an estimate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from langgraph_pingpong.engines.base import Engine
from langgraph_pingpong.placement import block_keys

MAX_BLOCKS = 1 << 18
"""Blocks that are remembered of an engine, the ones noted last."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Of one engine, in tokens: what its cache lost, and how much of that prompts needed again and computed anew."""

    evicted: int
    needed_again: int

    def to_dict(self) -> dict[str, int]:
        """As plain data."""
        return asdict(self)


class Evictions:
    """Watches the cache of one engine."""

    def __init__(self) -> None:
        self.block_size = 16
        self.capacity: int | None = None
        """Blocks that the cache holds, None where that is unknown."""
        self.tells = False
        """Whether the engine tells what it evicts."""
        self._told = 0
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._went_in = 0
        self._needed_again = 0

    def began(self, block_size: int, cache_tokens: int | None) -> None:
        """The engine serves, for the first time or again: its cache is empty."""
        self.block_size = block_size
        self.capacity = cache_tokens // block_size if cache_tokens else None
        self.was_emptied()

    def was_emptied(self) -> None:
        """All was forgotten on purpose, which is no eviction."""
        self._seen.clear()
        self._went_in = self._needed_again = self._told = 0

    def computed_before(self, ids: Sequence[int], salt: str | None) -> int:
        """How many tokens from the beginning of a prompt were computed here: what an endless cache would find."""
        usable = block_keys(ids[: len(ids) - 1], self.block_size, salt)  # vLLM computes the last token in any case
        known = next((number for number, key in enumerate(usable) if key not in self._seen), len(usable))
        return known * self.block_size

    def found(self, before: int, cached: int) -> int:
        """A prompt of which `before` tokens were computed here found `cached`; returns what was computed anew."""
        lost = max(0, before - cached)
        self._needed_again += lost
        self._went_in += lost // self.block_size
        return lost

    def computed(self, ids: Sequence[int], salt: str | None) -> None:
        """A prompt was computed, or found."""
        for key in block_keys(ids, self.block_size, salt):
            self._went_in += key not in self._seen
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_BLOCKS:
            self._seen.popitem(last=False)

    def evicted(self, blocks: int) -> None:
        """The engine told that it has evicted so many blocks."""
        self._told += blocks

    @property
    def lost(self) -> Evicted:
        """What was lost since the cache was empty."""
        if self.tells:
            return Evicted(self._told * self.block_size, self._needed_again)
        over = self._went_in - self.capacity if self.capacity is not None else 0
        needed = self._needed_again
        return Evicted(max(over * self.block_size, needed), needed)


class EvictionWatch:
    """Watches the caches of all engines of a pool."""

    def __init__(self, engines: Sequence[Engine], lives: Sequence[int]) -> None:
        """Take the engines, and how often each was started: a list that somebody else keeps up to date."""
        self._engines = engines
        self._lives = lives
        self._watched = [0] * len(engines)
        self._of = [Evictions() for _ in engines]

    def of(self, index: int) -> Evictions:
        """That of one engine, which forgets what was before the engine was started anew."""
        if self._watched[index] != self._lives[index]:
            self._watched[index] = self._lives[index]
            self._of[index].began(self._engines[index].block_size, self._engines[index].cache_tokens)
        return self._of[index]

    def were_emptied(self) -> None:
        """All caches were emptied on purpose."""
        for each in self._of:
            each.was_emptied()
