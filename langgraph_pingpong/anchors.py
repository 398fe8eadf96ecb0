"""Anchors: beginnings of prompts that stay in the KV cache of every device for as long as their lease runs.

Where prompts can grow, an anchor is one that nobody closes: vLLM cannot take its blocks. Elsewhere it is asked for
again every few seconds, which keeps it among what was used last and brings it back if it was evicted all the same; at
once where the engine tells what it evicts. So it is brought back on an engine that was restarted, and on one whose
cache was emptied.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from langgraph_pingpong.engines.base import Appends, Engine, Request
from langgraph_pingpong.errors import AnchorTooLarge, CallRefused, EngineError
from langgraph_pingpong.health import FAILED, Health
from langgraph_pingpong.placement import block_keys

if TYPE_CHECKING:
    from langgraph_pingpong.loop import LoopThread

TOUCH_S = 5.0
"""How often an anchor is looked after on each device, in seconds."""

PAUSE_S = 0.25
"""How long it is left alone after that, in seconds: anchors that evict each other shall not keep a device busy."""

LEASE_S = 600.0
"""How long an anchor stays by default, in seconds."""


Computed = Callable[[int, Sequence[int], str | None], None]
"""Notes that an engine, given by its position, has computed a prompt under a salt."""


class Anchor:
    """A beginning of prompts that stays cached, until it is released or its lease ends.

    Use it in a `with` block, or call `release()`. Safe to use from any thread.
    """

    def __init__(self, anchors: Anchors, loop: LoopThread, kept: Kept) -> None:
        self._anchors, self._loop, self._kept = anchors, loop, kept
        self._timer: asyncio.TimerHandle | None = None

    @property
    def tokens(self) -> int:
        """How many tokens stay, on each device."""
        return len(self._kept.ids)

    @property
    def is_held(self) -> bool:
        """Whether its lease runs and it was not released."""
        return self in self._kept.holders

    @property
    def devices(self) -> list[str]:
        """The devices that hold it at this moment, as far as is known."""
        return [self._anchors.engines[index].device for index in sorted(self._kept.there)]

    def renew(self, lease_s: float = LEASE_S) -> None:
        """Let the lease run for so many seconds from now on. An anchor that was given back stays so."""
        self._loop.call_soon(self._anchors.renew, self, lease_s)

    def release(self) -> None:
        """Give it back: from now on it is cached like anything else. Safe to call twice."""
        self._loop.call_soon(self._anchors.release, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


@dataclass
class Kept:
    """The ids of one beginning, who holds it, and the tasks that look after it, one a device."""

    ids: tuple[int, ...]
    salt: str | None
    holders: set[Anchor] = field(default_factory=set)
    there: set[int] = field(default_factory=set)
    """The engines that hold it."""
    evicted: set[int] = field(default_factory=set)
    """The engines that held it, and told that they have evicted a part."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    looks: dict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """Set where it may be gone from an engine."""
    _keys: dict[int, frozenset[int]] = field(default_factory=dict)

    def keys(self, block_size: int) -> frozenset[int]:
        """Of its blocks, on an engine with blocks of this size."""
        if block_size not in self._keys:
            self._keys[block_size] = frozenset(block_keys(self.ids, block_size, self.salt))
        return self._keys[block_size]


class Anchors:
    """All anchors of a pool. Equal ones are kept once. Used on the pool's loop thread only."""

    def __init__(self, engines: Sequence[Engine], health: Health, computed: Computed) -> None:
        """Take the engines, what is known of them, and who notes what an engine has computed."""
        self.engines = engines
        self._health, self._computed = health, computed
        self._kept: dict[Hashable, Kept] = {}

    @property
    def tokens(self) -> int:
        """Tokens that anchors hold on each device, with a block each for the token behind, which vLLM may give it."""
        return sum(len(kept.ids) + self._grain for kept in self._kept.values())

    @property
    def cap(self) -> int | None:
        """Tokens that anchors may hold on each device; None where no engine tells how much it caches."""
        budgets = (engine.budget for engine in self.engines)
        return min((budget.anchor_cap for budget in budgets if budget.capacity is not None), default=None)

    @property
    def _grain(self) -> int:
        return max(engine.block_size for engine in self.engines)

    async def add(self, ids: Sequence[int], salt: str | None, lease_s: float, loop: LoopThread) -> Anchor:
        """Keep the whole blocks of `ids` on every device; returns when each that is up has computed them.

        Raises:
            CallRefused: there is no whole block, or the lease is none.
            AnchorTooLarge: anchors would hold more than they may.
        """
        grain = self._grain
        whole = tuple(ids[: len(ids) // grain * grain])
        if not whole:
            raise CallRefused(f"An anchor has at least {grain} tokens, a whole cache block, and this one {len(ids)}.")
        if not (isinstance(lease_s, int | float) and lease_s > 0):
            raise CallRefused(f"lease_s is a time in seconds, and not {lease_s}.")
        kept = self._kept.get((whole, salt)) or self._begin(whole, salt)
        anchor = Anchor(self, loop, kept)
        kept.holders.add(anchor)
        try:
            while not kept.there >= self._up():
                await asyncio.wait(kept.tasks, timeout=0.01)
                for ended in (task for task in kept.tasks if task.done()):
                    ended.result()
        except BaseException:
            self.release(anchor)
            raise
        self.renew(anchor, lease_s)
        return anchor

    def _up(self) -> set[int]:
        return {index for index in range(len(self.engines)) if self._health.is_up(index)}

    def _begin(self, ids: tuple[int, ...], salt: str | None) -> Kept:
        cap, held, longest = self.cap, self.tokens, min(engine.max_model_len for engine in self.engines)
        ratio = self.engines[0].budget.ratio
        if len(ids) >= longest:
            raise AnchorTooLarge(f"An anchor of {len(ids)} tokens leaves no room in a context of {longest}.")
        if cap is not None and held + len(ids) + self._grain > cap:
            raise AnchorTooLarge(
                f"An anchor of {len(ids)} tokens beside {held} that are held is more than the {cap} that anchors may "
                f"hold: {ratio:.0%} of the KV cache, and never so much that the longest prompt lacks room."
            )
        kept = self._kept[ids, salt] = Kept(ids, salt)
        self._count()
        kept.tasks = [asyncio.create_task(self._keep(index, kept)) for index in range(len(self.engines))]
        return kept

    def renew(self, anchor: Anchor, lease_s: float) -> None:
        """Let a lease run for so many seconds from now on."""
        if anchor.is_held:
            if anchor._timer is not None:
                anchor._timer.cancel()
            anchor._timer = asyncio.get_running_loop().call_later(lease_s, self.release, anchor)

    def release(self, anchor: Anchor) -> None:
        """Give an anchor back; what nobody holds any more is let go of."""
        kept = anchor._kept
        kept.holders.discard(anchor)
        if anchor._timer is not None:
            anchor._timer.cancel()
        if not kept.holders and self._kept.get((kept.ids, kept.salt)) is kept:
            del self._kept[kept.ids, kept.salt]
            self._count()
            for task in kept.tasks:
                task.cancel()

    def _count(self) -> None:
        for engine in self.engines:
            engine.budget.anchored = self.tokens

    def look(self) -> None:
        """Caches were emptied: bring all anchors back."""
        for kept in self._kept.values():
            kept.there.clear()
            for look in kept.looks.values():
                look.set()

    def lost(self, index: int, keys: frozenset[int] | None) -> None:
        """An engine told which blocks it has evicted; None: it may hold any, or none. Bring back what is concerned."""
        block_size = self.engines[index].block_size
        for kept in self._kept.values():
            if keys is None:
                kept.looks[index].set()
            elif index in kept.there and not keys.isdisjoint(kept.keys(block_size)):
                kept.there.discard(index)
                kept.evicted.add(index)
                kept.looks[index].set()

    async def _keep(self, index: int, kept: Kept) -> None:
        """Look after one anchor on one device until it is let go of.

        Whoever makes it is told what stands against it. From then on an engine that takes no more at the moment, or
        fails at it, is asked again.
        """
        opened: Appends | None = None
        look = kept.looks[index]
        borne: tuple[type[EngineError], ...] = FAILED
        try:
            while True:
                look.clear()
                with contextlib.suppress(*borne), self._health.watching(index, hint=True):
                    opened = await self._hold(index, kept, opened)
                borne = (EngineError,)
                await asyncio.sleep(min(PAUSE_S, TOUCH_S))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(look.wait(), TOUCH_S)
        finally:
            kept.there.discard(index)
            if opened is not None:
                opened.let_go()

    async def _hold(self, index: int, kept: Kept, opened: Appends | None) -> Appends | None:
        """See that an engine holds it; returns the open prompt, None where the engine keeps none."""
        if not self._health.is_up(index):
            kept.there.discard(index)
            kept.evicted.discard(index)
            return None
        if opened is not None and opened.is_open:
            kept.there.add(index)
            kept.evicted.discard(index)
            return opened
        engine = self.engines[index]
        if not engine.budget.anchors_fit:  # pulls are under way, and no new ones begin: soon
            kept.looks[index].set()
            return None
        was_there = index in kept.there | kept.evicted
        kept.evicted.discard(index)
        opened = engine.open_appends(kept.salt, keep=True)
        found = await opened.append(kept.ids) if opened else None
        if found is None:
            opened, found = None, await engine.prefill(Request(kept.ids, cache_salt=kept.salt))
        self._computed(index, kept.ids, kept.salt)
        kept.there.add(index)
        gone = len(kept.ids) - engine.block_size - (found or 0)  # of a whole prompt the last block is computed anew
        if was_there and found is not None and gone > 0:
            self._health.emit("anchor.rewarmed", index, tokens=gone)
        return opened
