"""Whether KV that another engine holds is worth reading: decisions on plain data, which kv_transfer.py carries out.

For each prompt there are three ways to have its KV where it is answered. What is there already is used, always. What
is missing is computed there, or read from the engine that holds most of it, if that takes less time. How long either
takes is measured: at the start, and with each prompt that is computed or read. A length nobody measured is told from
a straight line through the last OBSERVATIONS ones; without any, nothing is read.

What is kept for a reader and what is being read is held in both caches: nothing is read where either has no room for it
(kv_budget.py).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import StatisticsError, linear_regression

from langgraph_pingpong.kv_budget import KvBudget
from langgraph_pingpong.placement import HeldBlocks, Placement, block_keys

OBSERVATIONS = 32
"""So many measured times are remembered of each kind."""

MIN_TOKENS = 64
"""Less is not worth a reader's two requests, whatever was measured."""


class Line:
    """How long something takes by the number of tokens: the straight line through what was measured."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=OBSERVATIONS)

    def observe(self, tokens: int, seconds: float) -> None:
        """It took this long."""
        self._seen.append((tokens, seconds))

    def seconds(self, tokens: int) -> float | None:
        """How long it would take, in seconds; None if nothing was measured."""
        if not self._seen:
            return None
        lengths, times = zip(*self._seen, strict=True)
        try:
            line = linear_regression(lengths, times)
        except StatisticsError:  # one length only
            line = None
        if line is None or line.slope <= 0 or line.intercept < 0:
            return float(sum(times) / sum(lengths) * tokens)
        return float(line.slope * tokens + line.intercept)


@dataclass
class Costs:
    """What computing and reading KV was measured to take."""

    prefill: Line = field(default_factory=Line)
    pull: Line = field(default_factory=Line)

    def share(self, tokens: int) -> float:
        """What reading so many tokens takes, as a part of computing them; 1.0 where that is not less, or not known."""
        pull, prefill = self.pull.seconds(tokens), self.prefill.seconds(tokens)
        return min(1.0, pull / prefill) if pull is not None and prefill else 1.0


@dataclass(frozen=True, slots=True)
class Pull:
    """Reading a prefix from another engine: `tokens` from the beginning, of which `new` are missing here."""

    source: int
    tokens: int
    new: int


Lost = Callable[[frozenset[int] | None], None]
"""Is told the keys of blocks that an engine has evicted; None where nothing is known any more of what it holds."""


class SeenBlocks(HeldBlocks):
    """What an engine itself says that it holds. What it evicts is taken out of placement's book of it as well."""

    def __init__(self, held: HeldBlocks, lost: Lost = lambda keys: None) -> None:
        """Take placement's book, and who else is told what is `lost`."""
        super().__init__(sys.maxsize)
        self._held = held
        self._lost = lost

    def discard(self, keys: Iterable[int]) -> None:
        """Blocks were evicted."""
        gone = frozenset(keys)
        super().discard(gone)
        self._held.discard(gone)
        if gone:
            self._lost(gone)

    def clear(self) -> None:
        """Nothing is known to be cached any more, which is no eviction."""
        super().clear()
        self._held.clear()
        self._lost(None)


class KvPlanner:
    """Knows what each engine holds, and picks the source of what a prompt lacks."""

    def __init__(self, placement: Placement, budgets: Sequence[KvBudget]) -> None:
        """Take what is known of the engines, and the budgets of their caches."""
        self._placement = placement
        self._budgets = budgets
        self.costs = Costs()
        self.seen: list[SeenBlocks | None] = [None] * len(budgets)
        """By engine, what its own events say it holds; None where it gives none, and placement's book counts."""

    def plan(self, target: int, among: Iterable[int], ids: Sequence[int], salt: str | None) -> Pull | None:
        """What to read for a prompt on `target`, from one of the engines `among`; None if the rest is computed there.

        The last token of a prompt is always computed.
        """
        block = self._placement.places[target].block_size
        keys = block_keys(ids[: (len(ids) - 1) // block * block], block, salt)
        here = self._placement.places[target].held.count(keys)  # what is being computed there comes, too
        held = {source: self.holds(source, keys) for source in among if self._may_give(source, target)}
        pulls = [Pull(source, blocks * block, (blocks - here) * block) for source, blocks in held.items()]
        worth = [pull for pull in pulls if self._pays(pull) and self._fits(pull, target)]
        leases = self._placement.leases
        return max(worth, key=lambda pull: (self._saved(pull), -leases[pull.source]), default=None)

    def holds(self, index: int, keys: Sequence[int]) -> int:
        """How many blocks from the beginning of a prompt an engine can give, for sure where it tells."""
        seen = self.seen[index]
        return (self._placement.places[index].held if seen is None else seen).count(keys)

    def _may_give(self, source: int, target: int) -> bool:
        places = self._placement.places
        return source != target and places[source].up and places[source].block_size == places[target].block_size

    def _saved(self, pull: Pull) -> float:
        prefill, read = self.costs.prefill.seconds(pull.new), self.costs.pull.seconds(pull.new)
        return -math.inf if prefill is None or read is None else prefill - read

    def _pays(self, pull: Pull) -> bool:
        return pull.new >= MIN_TOKENS and self._saved(pull) > 0

    def _fits(self, pull: Pull, target: int) -> bool:
        return all(self._budgets[index].may_pull(pull.tokens) for index in (pull.source, target))
