"""KV that goes from one modelled engine to another, with what can go wrong on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from langgraph_pingpong.engines.base import BlockBook, KvExport, KvLost, Likeliest, Request

if TYPE_CHECKING:
    from langgraph_pingpong.engines.fake_engine import FakeEngine

NOTICE_S = 0.01
"""Within what time a reader notices that its source died, in seconds."""


@dataclass
class FakeKv:
    """The side of one modelled engine. As with real ones, KV that is read twice or late is another prompt's.

    Times are modelled with `pull_speed`, in tokens per second. `fail_export` and `fail_pull` are raised when set; while
    `gate` is set and not open, pulls wait in mid-transfer.
    """

    engine: FakeEngine = field(repr=False)
    lease_s: float = 12.0
    pull_speed: float = 100_000.0
    tells: bool = True
    """Whether the engine tells what it holds."""
    fail_export: Exception | None = None
    fail_pull: Exception | None = None
    gate: asyncio.Event | None = None

    exports: list[Request] = field(default_factory=list, repr=False)
    """Every export that was asked for."""
    pulls: list[Request] = field(default_factory=list, repr=False)
    """Every pull that was asked for."""
    wrong: set[int] = field(default_factory=set, repr=False)
    """Blocks in the cache whose KV is another prompt's."""
    _book: BlockBook | None = field(default=None, repr=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    _kept: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def engine_id(self) -> str:
        """The device, and how often it was restarted."""
        return f"{self.engine.device} {self.engine.restarts}"

    @property
    def kept(self) -> int:
        """How many exports wait for their reader."""
        return sum(until > time.monotonic() for until in self._kept.values())

    def listen(self, book: BlockBook) -> bool:
        """Note in `book` what is cached from now on."""
        self._book, self._loop = (book if self.tells else None), asyncio.get_running_loop()
        return self.tells

    def tell(self, what: Callable[[BlockBook], None]) -> None:
        """Have something noted on the loop of the pool, in order. As with real engines it is heard a little later."""
        if self._book is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, self._book)

    def distrust(self) -> None:
        """Serve nothing of what is cached."""
        for appends in list(self.engine.appends):
            appends.let_go()
        self.engine.forget()

    async def export(self, request: Request) -> KvExport:
        """Keep a prompt's KV for one reader."""
        self.exports.append(request)
        if self.fail_export is not None:
            raise self.fail_export
        cached = await self.engine.prefill(request)
        self._kept[request.request_id] = time.monotonic() + self.lease_s
        return KvExport(self.engine_id, request.request_id, cached, _likeliest(request), {"source": self})

    async def pull(self, request: Request, export: KvExport) -> Likeliest:
        """Read it into the cache, whatever is there now."""
        self.pulls.append(request)
        if self.fail_pull is not None:
            raise self.fail_pull
        source: FakeKv = export.how["source"]
        missing = len(request.prompt_token_ids) - self.engine.cached_tokens(request.prompt_token_ids)
        await self.engine.spend(missing / self.pull_speed)
        while self.gate is not None and not self.gate.is_set():
            source.check_up(export)
            await asyncio.sleep(NOTICE_S)
        source.check_up(export)
        is_right = source._kept.pop(export.request_id, 0.0) > time.monotonic()
        keys = self.engine.store(request)
        if is_right:
            return _likeliest(request)
        self.wrong.update(keys)
        return _likeliest(Request((*request.prompt_token_ids, 0)))

    def check_up(self, export: KvExport) -> None:
        """Whether the engine that exported is still there.

        Raises:
            KvLost: it is not.
        """
        if self.engine.dead or self.engine_id != export.engine_id:
            raise KvLost(f"The engine on {self.engine.device} died.")


def _likeliest(request: Request) -> Likeliest:
    first = hash(request.prompt_token_ids) % 50_000
    return {first: -0.1, first + 1: -3.0}
