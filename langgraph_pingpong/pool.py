"""Engines and who uses them. Choosing reserves: a lease counts from the moment it is handed out."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self

from langgraph_pingpong.anchors import Anchors
from langgraph_pingpong.engines.base import Appends, Delta, Engine, Request
from langgraph_pingpong.errors import DeviceError, EngineDead
from langgraph_pingpong.evictions import EvictionWatch
from langgraph_pingpong.going_first import GoingFirst
from langgraph_pingpong.health import FAILED, Health
from langgraph_pingpong.kv_budget import KV_POOL_RATIO
from langgraph_pingpong.kv_transfer import KvTransfer
from langgraph_pingpong.loop import FORKED, LoopThread
from langgraph_pingpong.placement import Placement
from langgraph_pingpong.speculation import Speculation


class Lease:
    """A reserved place on one engine, used on the pool's loop thread only.

    Requests go through it, so that the pool knows what each engine has cached, how fast it is, and when it fails.
    """

    def __init__(self, pool: EnginePool, index: int) -> None:
        self._pool = pool
        self.index = index
        """The engine's position in the pool."""
        self._life = pool.health.lives[index]
        self._held = True
        self._noted = False
        self.lost = 0
        """Tokens of this lease's prompts that were computed here before, and had to be computed anew."""
        self.pulled = 0
        """Tokens of the prompts of this lease that came from other engines."""

    @property
    def engine(self) -> Engine:
        """The engine this lease is for."""
        return self._pool.engines[self.index]

    @property
    def up(self) -> bool:
        """Whether the engine serves, as far as is known, and did so ever since it was leased."""
        pool, index = self._pool, self.index
        return pool._placement.places[index].up and pool.health.lives[index] == self._life

    async def bring(self, request: Request) -> None:
        """Have the KV of a prompt brought here from another engine, if that is less work than computing it."""
        self.pulled += await self._pool.kv.bring(self.index, request)

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """The engine's answer to a call; see `Engine.generate`."""
        self._pool.health.check_in_use(self.index)
        await self.bring(request)
        self._pool._placement.computed(self.index, request.prompt_token_ids, request.cache_salt)
        with self._pool._first[self.index].one_more() as through:
            known = self._pool.evictions.of(self.index).computed_before(request.prompt_token_ids, request.cache_salt)
            async with aclosing(self._generate(request, known)) as deltas:
                async for delta in deltas:
                    if self.engine.piece_tokens:  # from now on its steps carry prefills along
                        through()
                    yield delta

    async def answers_went_first(self) -> None:
        """Return when a prefill is in no answer's way on the engine.

        That is when none waits for its first token, and none runs at all where its steps carry nothing along.
        """
        await self._pool._first[self.index].are_through()

    async def _generate(self, request: Request, known: int = 0) -> AsyncGenerator[Delta]:
        """The engine's answer; `known` tokens of the prompt were computed there before."""
        index = self.index
        ids, salt = request.prompt_token_ids, request.cache_salt
        said: list[int] = []
        before: float | None = None
        watch = self._pool.evictions.of(index)
        began = time.monotonic()
        with self._pool.health.watching(index):
            async with aclosing(self.engine.generate(request)) as deltas:
                async for delta in deltas:
                    now = time.monotonic()
                    if before is None:
                        self._pool.kv.computed(len(ids) - (delta.num_cached_tokens or 0), now - began)
                    elif delta.token_ids:
                        self._pool._token_took(index, (now - before) / len(delta.token_ids), len(ids), now)
                    before = now
                    if delta.num_cached_tokens is not None:
                        self.lost += watch.found(known, delta.num_cached_tokens)
                    said += delta.token_ids if delta.index == 0 else ()
                    yield delta
        self._pool._computed(index, (*ids, *said[:-1]), salt)  # the last token was sampled and not computed

    async def prefill(self, request: Request) -> int | None:
        """Compute the KV cache of a prompt; see `Engine.prefill`."""
        index = self.index
        with self._pool.health.watching(index, hint=True):
            cached = await self.engine.prefill(request)
        if not self._noted:  # what it grows by is noted with its answer: an append should cost the same at any length
            self._noted = True
            self._pool._computed(index, request.prompt_token_ids, request.cache_salt)
        return cached

    async def append(self, appends: Appends, piece: Sequence[int], salt: str | None) -> int | None:
        """Compute the next piece of a prompt; see `Appends.append`."""
        begins = not appends.tokens
        with self._pool.health.watching(self.index, hint=True):
            found = await appends.append(piece)
        if begins and found is not None:  # not with each piece: the keys of all before it would be made again
            self._pool._computed(self.index, piece, salt)
        return found

    def begin(self, request: Request) -> Speculation | None:
        """Begin an answer before its call comes; None while another one that was begun there is under way."""
        begun = self._pool.begun
        if (other := begun.get(self.index)) is not None and not other.over:
            return None
        begun[self.index] = Speculation(self._generate, request)  # noted once a call takes it, not with each word
        return begun[self.index]

    def give_way(self, taken: Speculation | None) -> None:
        """A call is answered on the engine: what was begun there for another call is aborted, unless it was `taken`."""
        other = self._pool.begun.pop(self.index, None)
        if other is not None and other is not taken:
            other.stop()
        if taken is not None:
            ids, salt = taken.request.prompt_token_ids, taken.request.cache_salt
            self._pool._placement.computed(self.index, ids, salt)

    def move(self, failed: Collection[int], request: Request) -> bool:
        """Move to an engine that is up, for a request that others `failed`; whether there is one."""
        placement = self._pool._placement
        among = [index for index in range(len(self._pool.engines)) if index not in failed]
        index = placement.for_rest(self.index, among, request.prompt_token_ids, request.cache_salt, time.monotonic())
        if index is None:
            return False
        if self._held:
            placement.leases[self.index] -= 1
            placement.leases[index] += 1
        self.index, self._life = index, self._pool.health.lives[index]
        return True

    def held_tokens(self, ids: Sequence[int], salt: str | None) -> int:
        """How many tokens from the beginning of a prompt the engine has cached, as far as is known."""
        return self._pool._placement.held_tokens(ids, salt)[self.index]

    def release(self) -> None:
        """Give the place back. Safe to call twice."""
        if self._held:
            self._held = False
            self._pool._placement.leases[self.index] -= 1


class EnginePool:
    """Engines on any number of devices, started once, on the library's own loop thread.

    Use it with `with` or `async with`, or let the first call start it; what is not closed is closed when the
    pool is collected or the interpreter exits.
    """

    def __init__(self, engines: Sequence[Engine], kv_pool_ratio: float = KV_POOL_RATIO) -> None:
        """Take engines that have not been started, and the share of their KV cache that may be held (kv_budget.py).

        Raises:
            DeviceError: there are none.
        """
        if not engines:
            raise DeviceError("A pool needs at least one engine.")
        self.engines = tuple(engines)
        for engine in self.engines:
            engine.budget.ratio = kv_pool_ratio
        self.runs: OrderedDict[int, Any] = OrderedDict()
        """The sessions on this pool; session.py fills it. They end with the pool."""
        self.begun: dict[int, Speculation] = {}
        """By engine, the answer that was begun there last and that no call has taken."""
        self.planner: Any = None
        """What was learned from the runs on this pool; planning.py fills it."""
        self._placement = Placement(len(self.engines))
        self._first = [GoingFirst() for _ in self.engines]
        self.health = Health(self.engines, self._placement)
        """Which engines are up, and who is told of it."""
        self.evictions = EvictionWatch(self.engines, self.health.lives)
        """What each engine had cached and lost."""
        self._computed = partial(_note_computed, self._placement, self.evictions)  # without the pool: no circle
        self.anchors = Anchors(self.engines, self.health, self._computed)
        """The beginnings of prompts that stay cached."""
        lost = partial(_note_lost, self.evictions, self.anchors)
        self.kv = KvTransfer(self.engines, self._placement, self.health, lost)
        """What brings KV from one engine to another."""
        self._loop = LoopThread()
        self._starting = threading.Lock()
        self._started = False
        self._finalizer = weakref.finalize(self, _shut_down, self.engines, self.health, self._loop)

    @property
    def loop(self) -> LoopThread:
        """The loop thread that every engine of this pool lives on."""
        return self._loop

    @property
    def closed(self) -> bool:
        """Whether the pool was closed, or belongs to the process that this one was forked from; it stays so."""
        return not self._finalizer.alive or self._loop.is_elsewhere

    @property
    def started(self) -> bool:
        """Whether the engines run."""
        return self._started and not self.closed

    def start(self) -> None:
        """Start every engine, one after the other; returns at once when they run already.

        Raises:
            ConfigError: the settings cannot work on this machine.
            EngineStartFailed: an engine did not come up; those that did are shut down again.
            ServerFailed: a server cannot be used.
            EngineDead: the pool was closed, or belongs to another process.
        """
        if self._loop.is_elsewhere:  # the lock may be held by a thread that does not exist here
            raise EngineDead(FORKED)
        with self._starting:
            if self.closed:
                raise EngineDead("The engines were closed.")
            if self._started:
                return
            try:
                self._loop.run(self._start_engines())
            except BaseException:
                self.close()
                raise
            self._started = True
            # The last to be registered is the first to run: before multiprocessing ends the engines' processes.
            atexit.register(self._finalizer)

    async def _start_engines(self) -> None:
        # One after the other: a second engine takes the compiled code of the first from its cache, and memory is
        # measured by difference, which another engine starting meanwhile would spoil.
        for index, engine in enumerate(self.engines):
            await engine.start()
            self.health.serves(index)
        await self.kv.start()
        for index, seen in enumerate(self.kv.planner.seen):
            self.evictions.of(index).tells = seen is not None

    def close(self) -> None:
        """Shut the engines down and end the loop thread. Safe to call twice."""
        self._finalizer()
        atexit.unregister(self._finalizer)

    def lease(self, preferred: int, ids: Sequence[int] = (), salt: str | None = None) -> Lease:
        """Reserve a place for a call whose turn is at position `preferred` (modulo the pool's size).

        `ids` and `salt` are those of its prompt; placement.py says when another engine is taken.
        """
        return self._reserve(self._placement.for_call(preferred, ids, salt, time.monotonic()))

    def lease_ahead(
        self, upstream: Lease, ahead: int, ids: Sequence[int] = (), salt: str | None = None
    ) -> Lease | None:
        """Reserve a place for the edge to a prompt that begins with `ids`, `ahead` positions behind its upstream's.

        None if the call will do better without an edge; placement.py says when.
        """
        index = self._placement.for_edge(upstream.index, upstream.index + ahead, ids, salt, time.monotonic())
        return None if index is None else self._reserve(index)

    def lease_beside(self, upstream: Lease) -> Lease | None:
        """Reserve a place for an edge on the very device of its upstream; None if that failed."""
        return self._reserve(upstream.index) if upstream.up else None

    def _reserve(self, index: int) -> Lease:
        self._placement.leases[index] += 1
        return Lease(self, index)

    def start_of_run(self) -> int:
        """The position of the engine where the next run starts."""
        open_runs = [0] * len(self.engines)
        for run in self.runs.values():
            open_runs[run.start] += run.is_open
        return self._placement.start(open_runs, time.monotonic())

    def _token_took(self, index: int, seconds: float, prompt_tokens: int, now: float) -> None:
        if times := self._placement.token_took(index, seconds, prompt_tokens, now):
            self.health.emit("device.slow", index, times_slower=times)

    @property
    def open_runs(self) -> int:
        """How many runs of graphs may still call the model. May be asked from any thread."""
        return 0 if self.closed else sum(run.is_open for run in tuple(self.runs.values()))

    def memory(self) -> list[dict[str, Any]]:
        """What is known of each engine's KV cache, in tokens: how much it holds, anchors, and what was evicted."""
        return [
            {
                "device": engine.device,
                "cache_tokens": engine.cache_tokens,
                "anchored": self.anchors.tokens,
                "anchor_cap": self.anchors.cap,
                **self.evictions.of(index).lost.to_dict(),
            }
            for index, engine in enumerate(self.engines)
        ]

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix on every engine, for a cold start."""
        self.start()
        self._loop.run(self._reset())

    async def _reset(self) -> None:
        self._placement.forget_cached()
        self.evictions.were_emptied()
        self.kv.was_reset()
        for index, engine in enumerate(self.engines):
            if self._placement.places[index].up:  # one that is down comes back with nothing cached
                with contextlib.suppress(*FAILED), self.health.watching(index):
                    await engine.reset_prefix_cache()
        self.anchors.look()

    def __repr__(self) -> str:
        """Devices with their leases, for example `<EnginePool cpu:0=1 cpu:1=0(down)>`."""
        state = zip(self.engines, self._placement.leases, self._placement.places, strict=True)
        shown = " ".join(f"{engine.device}={leases}{'' if place.up else '(down)'}" for engine, leases, place in state)
        return f"<EnginePool {shown}{' closed' if self.closed else ''}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await asyncio.to_thread(self.close)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Engines are not copied: a copy of whatever holds the pool shares it."""
        return self


def _note_computed(
    placement: Placement, evictions: EvictionWatch, index: int, ids: Sequence[int], salt: str | None
) -> None:
    placement.computed(index, ids, salt)
    evictions.of(index).computed(ids, salt)


def _note_lost(evictions: EvictionWatch, anchors: Anchors, index: int, keys: frozenset[int] | None) -> None:
    evictions.of(index).evicted(len(keys or ()))
    anchors.lost(index, keys)


def _shut_down(engines: Sequence[Engine], health: Health, loop: LoopThread) -> None:
    """Runs at close, at collection or at interpreter exit, whichever comes first."""
    if loop.is_elsewhere:  # the engines are in use there
        return
    if loop.is_current():  # collected while a callback ran here: the loop cannot wait for its own end
        threading.Thread(target=_shut_down, args=(engines, health, loop)).start()
        return
    loop.run(_stop_all(engines, health))
    loop.close()


async def _stop_all(engines: Sequence[Engine], health: Health) -> None:
    await health.close()
    await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
