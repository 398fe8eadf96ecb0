"""Answers that prefills wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack


class GoingFirst:
    """Answers on one engine that the prefills of edges wait for."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextlib.contextmanager
    def one_more(self) -> Iterator[Callable[[], None]]:
        """Hold prefills back until what is given is called, or the block is left."""
        held = ExitStack()
        held.callback(self._add, -1)
        self._add(+1)
        with held:
            yield held.close

    def _add(self, change: int) -> None:
        self._count += change
        if self._count:
            self._none.clear()
        else:
            self._none.set()

    async def are_through(self) -> None:
        """Return when there are none."""
        await self._none.wait()
