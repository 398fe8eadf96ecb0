"""A speculative answer: the downstream's own request, sent before its call comes.

When the upstream ends, and at any moment before that, the downstream's prompt is known as it would be if the upstream
said no more. While its device has nothing else to do, the answer to that prompt is begun. The call that comes takes it
over if it asks for exactly that; else it is aborted, as if it had not been. (vLLM's speculative decoding is another
thing.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from langgraph_pingpong.engines.base import Delta, Request


class Speculation:
    """One answer that was begun ahead of its call."""

    def __init__(self, generate: Callable[[Request], AsyncGenerator[Delta]], request: Request) -> None:
        self.request = request
        self.ready = 0
        """Tokens of the answer that are there."""
        self.first_ms: float | None = None
        """How long the first of them took, once it is there."""
        self._failed = False
        self._started = time.monotonic()
        self._generate = generate
        self._deltas: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._read())

    @property
    def age_ms(self) -> float:
        """How long ago it was begun."""
        return (time.monotonic() - self._started) * 1000

    def fits(self, request: Request) -> bool:
        """Whether a call asks for the same answer, and it has not failed."""
        mine = self.request
        return not self._failed and (mine.prompt_token_ids, mine.sampling, mine.cache_salt) == (
            request.prompt_token_ids,
            request.sampling,
            request.cache_salt,
        )

    async def deltas(self) -> AsyncGenerator[Delta]:
        """The answer: what is there, then what comes. Closing early aborts the request."""
        try:
            while (item := await self._deltas.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.stop()
            await self.stopped()

    @property
    def over(self) -> bool:
        """Whether nothing is under way any more."""
        return self._task.done()

    def stop(self) -> None:
        """Abort it; what is not complete fits no call any more."""
        self._failed = self._failed or not self._task.done()
        self._task.cancel()

    async def stopped(self) -> None:
        """Wait until the abort has gone out."""
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        try:
            async with aclosing(self._generate(self.request)) as deltas:
                async for delta in deltas:
                    if self.first_ms is None:
                        self.first_ms = self.age_ms
                    self.ready += len(delta.token_ids)
                    self._deltas.put_nowait(delta)
        except Exception as error:  # noqa: BLE001 - for the call that takes it over, if one does
            self._failed = True
            self._deltas.put_nowait(error)
        else:
            self._deltas.put_nowait(None)


class Worth:
    """Whether an answer may be begun while the upstream still speaks.

    Each word of the upstream outdates it, so it pays only if its first token takes less than the upstream's next one.
    That is tried, and given up after a few vain tries in a row.
    """

    TRIES = 3

    def __init__(self, tries: int = TRIES) -> None:
        self._tries = tries
        self._vain = 0

    def __bool__(self) -> bool:
        return self._vain < self._tries

    def outdated(self, speculation: Speculation) -> None:
        """The upstream said more before the call came."""
        self._vain = self._vain + 1 if speculation.first_ms is None else 0
