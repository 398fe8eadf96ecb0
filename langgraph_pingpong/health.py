"""Engines that failed: taken out, restarted in the background, put back."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langgraph_pingpong.engines.base import Engine
from langgraph_pingpong.errors import EngineDead, PingPongError, ServerBusy, ServerFailed
from langgraph_pingpong.placement import Placement
from langgraph_pingpong.trace import Trace

logger = logging.getLogger(__name__)

FAILED = (EngineDead, ServerFailed)
"""Errors that tell of the engine. Others tell of the request, which would fail elsewhere as well."""

MAX_TRIES = 3
"""How often the restart of an engine may fail. A server is asked for as long as the pool lives."""

FIRST_PAUSE_S = 1.0
"""The pause after the first try, in seconds; each is twice the one before."""

MAX_PAUSE_S = 30.0
"""The longest pause between two tries, in seconds."""


class Health:
    """Knows which engines of a pool are up, and brings back the others. Used on the pool's loop thread only."""

    def __init__(self, engines: Sequence[Engine], placement: Placement) -> None:
        self.traces: weakref.WeakSet[Trace] = weakref.WeakSet()
        """Who is told what happens to engines."""
        self.closed = False
        self._engines = engines
        self._placement = placement
        self._causes: dict[int, Exception] = {}
        self._out_of_use: dict[int, str] = {}
        """What became of engines that are not restarted any more."""
        self.lives = [0] * len(engines)
        """How often each engine was started."""
        self._restarts: dict[int, asyncio.Task[None]] = {}

    def serves(self, index: int) -> None:
        """An engine was started."""
        engine = self._engines[index]
        self.lives[index] += 1
        self._placement.came_up(index, engine.block_size, engine.cache_tokens)

    def is_up(self, index: int) -> bool:
        """Whether an engine serves, as far as is known."""
        return self._placement.places[index].up

    def check_in_use(self, index: int) -> None:
        """See that an engine serves, or may serve again.

        Raises:
            EngineDead: it is not restarted any more.
        """
        if index in self._out_of_use:
            raise EngineDead(self._out_of_use[index])

    @contextmanager
    def watching(self, index: int, *, hint: bool = False) -> Iterator[None]:
        """Take the engine at `index` out if what is asked of it here shows that it failed.

        That a server is busy shows so only to an answer: a `hint` waits for answers, as it should.

        Raises:
            EngineDead: it was shut down because the pool was closed.
        """
        life = self.lives[index]
        try:
            yield
        except FAILED as error:
            if self.closed:
                raise EngineDead("The engines were closed while the call was running.") from error
            waits = hint and isinstance(error, ServerBusy)
            if life == self.lives[index] and not waits:  # another life: it is back already
                self.failed(index, error)
            raise

    def failed(self, index: int, error: Exception) -> None:
        """An engine failed: it gets no leases until its restart succeeded, which begins now."""
        if self.closed or not self._placement.places[index].up:
            return
        self._placement.went_down(index)
        self._causes[index] = error
        self.emit("engine.died", index, error=message_of(error))
        self._restarts[index] = asyncio.create_task(self._bring_back(index))

    def causes(self) -> dict[str, str]:
        """Why engines are down, by device."""
        return {self._engines[index].device: message_of(error) for index, error in sorted(self._causes.items())}

    def emit(self, name: str, index: int, **data: Any) -> None:
        """Tell every model that has used the pool."""
        for trace in list(self.traces):
            trace.emit(name, run="", node="", device=self._engines[index].device, **data)

    async def _bring_back(self, index: int) -> None:
        pause, tries = FIRST_PAUSE_S, 0
        while (error := await self._restart(index)) is not None:
            tries += not isinstance(error, ServerFailed)
            if tries >= MAX_TRIES:
                self._give_up(index, error)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
        self._causes.pop(index)
        self.serves(index)
        self.emit("engine.restarted", index)

    async def _restart(self, index: int) -> Exception | None:
        try:
            await self._engines[index].restart()
        except Exception as error:  # noqa: BLE001 - whatever keeps an engine down must not end the watch
            return error
        return None

    def _give_up(self, index: int, error: Exception) -> None:
        device, why = self._engines[index].device, message_of(error)
        self._out_of_use[index] = f"The engine on {device} is out of use: {MAX_TRIES} restarts failed. {why}"
        self._causes[index] = EngineDead(self._out_of_use[index])
        logger.warning("%s", self._out_of_use[index])
        self.emit("engine.gave_up", index, error=why)

    async def close(self) -> None:
        """Restart nothing any more; returns when nothing is under way."""
        self.closed = True
        for task in self._restarts.values():
            task.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)


def message_of(error: Exception) -> str:
    """What an error says, without the hint."""
    return str(error.args[0]) if isinstance(error, PingPongError) and error.args else f"{type(error).__name__}: {error}"
