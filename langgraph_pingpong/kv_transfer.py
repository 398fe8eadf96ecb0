"""Brings KV from one engine to another before a prompt is computed: a hint, like a prefill.

The source is asked to keep the prompt's KV for one reader and answers with what becomes a handle (kv_handles.py). The
target reads it into its prefix cache. The answer is an ordinary request with the full prompt, which finds it there.
What goes wrong on the way costs time, and the prompt is computed; it is counted and told (`kv.failed`).

What was read under the wrong name would be served to whoever asks for that prompt. So if a check fails afterwards, the
target never again serves what it has cached by then. No check should ever fail so late: the handle sees to that before.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from langgraph_pingpong.engines.base import Engine, KvLost, KvPort, Request
from langgraph_pingpong.health import Health
from langgraph_pingpong.kv_handles import MARGIN_S, Generation, HandleRefused, KvHandle, prompt_digest
from langgraph_pingpong.kv_planner import MIN_TOKENS, KvPlanner, Pull, SeenBlocks
from langgraph_pingpong.placement import Placement

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Reading is given up after so many times what computing would take..."""

LEAST_S = 1.0
"""...but not before so many seconds."""

AT_ONCE = 8
"""So many prompts are read from one engine at once. More would each take longer, and outlive what is kept for them."""

TRY_BLOCKS = (4, 16)
"""How long the prompts are that are computed and read at the start, in cache blocks."""

TRY_S = 60.0
"""How long one of them may take, in seconds: two engines that never met exchange addresses first."""

Lost = Callable[[int, frozenset[int] | None], None]
"""As that of kv_planner.py, and is told first which engine it is, by its position."""


class KvTransfer:
    """Moves KV between the engines of a pool. Used on the pool's loop thread only."""

    def __init__(self, engines: Sequence[Engine], placement: Placement, health: Health, lost: Lost) -> None:
        """Take the engines, what is known of them, and who is told what they say they have lost."""
        self._engines = engines
        self._lost = lost
        self._placement = placement
        self._health = health
        self.planner = KvPlanner(placement, [engine.budget for engine in engines])
        self.counts: Counter[str] = Counter()
        """How often KV was `pulled`, and how often that failed, by reason."""
        self._turns = [asyncio.Semaphore(AT_ONCE) for _ in engines]
        self._resets = 0
        self._sources: dict[int, list[int]] = {}
        """By target, the engines that KV was read from rightly at the start."""
        self._locks: weakref.WeakValueDictionary[tuple[int, int], asyncio.Lock] = weakref.WeakValueDictionary()

    async def start(self) -> None:
        """Hear the engines that can, and try each pair, which also measures what reading and computing take."""
        able = [index for index, engine in enumerate(self._engines) if engine.kv is not None]
        for index in able:
            self._prepare(index)
        if len(able) < 2:
            return
        for target in able:
            self._sources[target] = [source for source in able if source != target and await self._try(source, target)]
        for index in able:
            await self._engines[index].reset_prefix_cache()
        self.was_reset()

    def was_reset(self) -> None:
        """The engines' prefix caches were emptied."""
        self._resets += 1

    def computed(self, tokens: int, seconds: float) -> None:
        """An engine computed so many tokens of a prompt, up to its first new one, in this time."""
        if self._sources and tokens >= MIN_TOKENS:
            self.planner.costs.prefill.observe(tokens, seconds)

    async def bring(self, target: int, request: Request) -> int:
        """Read what `target` lacks of a prompt from another engine, if that pays; returns how many tokens it was.

        Never raises but for the cancellation of its task.
        """
        if not self._sources.get(target):
            return 0
        plan = self._plan(target, request)
        if plan is None:
            return 0
        async with self._lock(target, request, plan):  # of two that lack the same, one reads and the other finds
            plan = self._plan(target, request)
            return await self._pull(target, request, plan) if plan is not None else 0

    # -- the start -----------------------------------------------------------------------------------------

    def _prepare(self, index: int) -> None:
        book = SeenBlocks(self._placement.places[index].held, partial(self._lost, index))
        self.planner.seen[index] = book if _port(self._engines[index]).listen(book) else None

    async def _try(self, source: int, target: int) -> bool:
        """Whether a pull between two engines gives what computing gives."""
        block, costs = self._engines[target].block_size, self.planner.costs
        try:
            for number, blocks in enumerate((TRY_BLOCKS[0], *TRY_BLOCKS)):  # the first is not measured: they meet
                salt = f"try {source} {target} {number}"
                request = Request(tuple(7 * i % 97 + 3 for i in range(blocks * block)), cache_salt=salt)
                began = time.monotonic()
                await self._engines[source].prefill(request)
                computed = time.monotonic()
                async with asyncio.timeout(TRY_S):
                    await self.read(target, request, await self.lend(source, request))
                if number:
                    costs.prefill.observe(blocks * block, computed - began)
                    costs.pull.observe(blocks * block, time.monotonic() - computed)
        except Exception as error:  # noqa: BLE001 - whatever it is, these two do without
            devices = self._engines[source].device, self._engines[target].device
            logger.warning("No KV goes from %s to %s: %s (%s)", *devices, _reason(error), error)
            return False
        return True

    # -- one pull ------------------------------------------------------------------------------------------

    def _plan(self, target: int, request: Request) -> Pull | None:
        ids, salt = request.prompt_token_ids, request.cache_salt
        return self.planner.plan(target, self._sources[target], ids, salt)

    def _lock(self, target: int, request: Request, plan: Pull) -> asyncio.Lock:
        """The same for prompts that lack the same on this engine."""
        begins = request.prompt_token_ids[: plan.tokens - plan.new + self._engines[target].block_size]
        return self._locks.setdefault((target, hash((request.cache_salt, begins))), asyncio.Lock())

    async def _pull(self, target: int, request: Request, plan: Pull) -> int:
        prefix = Request(request.prompt_token_ids[: plan.tokens], cache_salt=request.cache_salt)
        source, costs, began = plan.source, self.planner.costs, time.monotonic()
        try:
            with self._held(target, plan):
                patience = max(LEAST_S, PATIENCE * (costs.prefill.seconds(plan.new) or 0))
                async with asyncio.timeout(patience), self._turns[source]:
                    await self.read(target, prefix, await self.lend(source, prefix))
        except Exception as error:  # noqa: BLE001 - a pull is a hint: the prompt is computed
            self.counts[_reason(error)] += 1
            self._health.emit("kv.failed", target, source=self._engines[source].device, reason=_reason(error))
            return 0
        took = time.monotonic() - began
        costs.pull.observe(plan.new, took)
        self.counts["pulled"] += 1
        self._placement.computed(target, prefix.prompt_token_ids, prefix.cache_salt)
        told = {"source": self._engines[source].device, "tokens": plan.new, "ms": took * 1000}
        self._health.emit("kv.pulled", target, **told)
        return plan.new

    @contextmanager
    def _held(self, target: int, plan: Pull) -> Iterator[None]:
        """Both engines hold it; after a failure for as long as the source keeps it."""
        self._hold(target, plan, plan.tokens)
        try:
            yield
        except BaseException:
            keeps_s = _port(self._engines[plan.source]).lease_s
            asyncio.get_running_loop().call_later(keeps_s, self._hold, target, plan, -plan.tokens)
            raise
        self._hold(target, plan, -plan.tokens)

    def _hold(self, target: int, plan: Pull, tokens: int) -> None:
        for index in (plan.source, target):
            self._engines[index].budget.pulled += tokens

    async def lend(self, source: int, request: Request) -> KvHandle:
        """A handle on the KV of a prompt (whole blocks), which `source` keeps for one reader.

        Raises:
            KvLost, EngineError: it cannot.
        """
        port, generation, asked = _port(self._engines[source]), self._generation(source), time.monotonic()
        with self._health.watching(source):
            export = await port.export(request)
        digest = prompt_digest(request.prompt_token_ids, request.cache_salt)
        return KvHandle(source, generation, export, digest, asked + port.lease_s)

    async def read(self, target: int, request: Request, handle: KvHandle) -> None:
        """Read KV into the prefix cache of `target`, as that of this prompt.

        Raises:
            HandleRefused: the handle is not for this, any more; or what was read is not to be trusted, and will not be.
            KvLost, EngineError, TimeoutError: it could not be read.
        """
        source, port = handle.source, _port(self._engines[target])
        digest = prompt_digest(request.prompt_token_ids, request.cache_salt)
        engine_id = _port(self._engines[source]).engine_id
        export = handle.take(engine_id, self._generation(source), digest, time.monotonic())
        try:
            with self._health.watching(target):
                async with asyncio.timeout(handle.expires - MARGIN_S - time.monotonic()):
                    likeliest = await port.pull(request, export)
            handle.check(self._generation(source), likeliest, time.monotonic())
        except BaseException as error:
            # What is aborted is not cached, unless the abort went out so late that other KV may have come meanwhile.
            if isinstance(error, HandleRefused) or time.monotonic() >= handle.expires:
                port.distrust()
                self._placement.places[target].held.clear()
            raise

    def _generation(self, index: int) -> Generation:
        return self._health.lives[index], self._resets


def _port(engine: Engine) -> KvPort:
    if engine.kv is None:
        raise KvLost(f"The engine on {engine.device} gives no KV.")
    return engine.kv


def _reason(error: Exception) -> str:
    """In a few words, the same for all of a kind."""
    if isinstance(error, HandleRefused):
        return str(error)
    return {TimeoutError: "too slow", KvLost: "lost"}.get(type(error), "engine failed")
