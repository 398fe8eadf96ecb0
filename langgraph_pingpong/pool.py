"""Which device serves or prefills what. Choosing reserves: a lease counts from the moment it is handed out."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from langgraph_pingpong.engines.base import Engine
from langgraph_pingpong.errors import DeviceError, EngineDead
from langgraph_pingpong.loop import LoopThread


class Lease:
    """A reserved place on one engine, used on the pool's loop thread only."""

    def __init__(self, pool: EnginePool, index: int) -> None:
        self._pool = pool
        self.index = index
        """The engine's position in the pool."""
        self._held = True

    @property
    def engine(self) -> Engine:
        """The engine this lease is for."""
        return self._pool.engines[self.index]

    def release(self) -> None:
        """Give the place back. Safe to call twice."""
        if self._held:
            self._held = False
            self._pool._loads[self.index] -= 1


class EnginePool:
    """Engines on any number of devices, started once, on the library's own loop thread.

    Use it with `with` or `async with`, or let the first call start it; what is not closed is closed when the
    pool is collected or the interpreter exits.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Take engines that have not been started.

        Raises:
            DeviceError: there are none.
        """
        if not engines:
            raise DeviceError("A pool needs at least one engine.")
        self.engines = tuple(engines)
        self.runs: OrderedDict[int, Any] = OrderedDict()
        """The sessions on this pool; session.py fills it. They end with the pool."""
        self.planner: Any = None
        """What was learned from the runs on this pool; planning.py fills it."""
        self._loads = [0] * len(self.engines)
        self._loop = LoopThread()
        self._starting = threading.Lock()
        self._started = False
        self._finalizer = weakref.finalize(self, _shut_down, self.engines, self._loop)

    @property
    def loop(self) -> LoopThread:
        """The loop thread that every engine of this pool lives on."""
        return self._loop

    @property
    def closed(self) -> bool:
        """Whether the pool was closed; a closed pool stays closed."""
        return not self._finalizer.alive

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
            EngineDead: the pool was closed.
        """
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
        for engine in self.engines:
            await engine.start()

    def close(self) -> None:
        """Shut the engines down and end the loop thread. Safe to call twice."""
        self._finalizer()
        atexit.unregister(self._finalizer)

    def lease(self, preferred: int, avoid: int | None = None) -> Lease:
        """Reserve a place on the engine at position `preferred` (modulo the pool's size).

        If that is position `avoid`, the least loaded of the others is taken; with one engine there is no other.
        """
        size = len(self.engines)
        index = preferred % size
        if index == avoid and size > 1:
            index = min((i for i in range(size) if i != avoid), key=self._loads.__getitem__)
        self._loads[index] += 1
        return Lease(self, index)

    def least_loaded(self) -> int:
        """The position of the engine with the fewest leases, the first of several."""
        return min(range(len(self.engines)), key=self._loads.__getitem__)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix on every engine, for a cold start."""
        self.start()
        self._loop.run(self._reset())

    async def _reset(self) -> None:
        for engine in self.engines:
            await engine.reset_prefix_cache()

    def __repr__(self) -> str:
        """Devices with their leases, for example `<EnginePool cpu:0=1 cpu:1=0>`."""
        loads = " ".join(f"{e.device}={load}" for e, load in zip(self.engines, self._loads, strict=True))
        return f"<EnginePool {loads}{' closed' if self.closed else ''}>"

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


def _shut_down(engines: Sequence[Engine], loop: LoopThread) -> None:
    """Runs at close, at collection or at interpreter exit, whichever comes first."""
    if loop.is_current():  # collected while a callback ran here: the loop cannot wait for its own end
        threading.Thread(target=_shut_down, args=(engines, loop)).start()
        return
    loop.run(_stop_all(engines))
    loop.close()


async def _stop_all(engines: Sequence[Engine]) -> None:
    await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
