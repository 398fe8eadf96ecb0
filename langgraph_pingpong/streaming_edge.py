"""A streaming edge: one downstream prompt that is prefilled while its upstreams speak."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.growing_prompt import CallKey, GrowingPrompt, common_prefix
from langgraph_pingpong.pool import Lease

UNCLAIMED_AFTER_S = 30.0
"""How long an edge waits for its downstream call after an upstream has finished, in seconds."""


@dataclass(frozen=True, slots=True)
class Upcoming:
    """A call of the model that is expected next, and its growing prompt.

    `step` is the superstep it is expected in, if that is known; `source` tells who foresaw it.
    """

    key: CallKey
    step: int | None
    source: str
    prompt: GrowingPrompt


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What an edge had prefilled when its downstream call came, in tokens."""

    upstream: str | None = None
    source: str | None = None
    static: int = 0
    streamed: int = 0
    wasted: int = 0
    appends: int = 0
    fallback: str | None = None


Emit = Callable[..., float]
"""Records an event by name, with node, device and data; returns its time (s, monotonic)."""


class StreamingEdge:
    """Prefills one downstream prompt on a reserved device.

    Appends are growing prefixes of whole cache blocks, one at a time: what became final meanwhile goes out together.
    """

    def __init__(
        self, upcoming: Upcoming, upstream: CallKey, lease: Lease, emit: Emit, cache_salt: str | None = None
    ) -> None:
        self.upcoming = upcoming
        self.lease = lease
        self.upstreams: frozenset[Hashable] = upcoming.prompt.calls | {upstream}
        """The calls whose failure makes the edge worthless."""
        self._upstream = upstream.node
        self._emit_event = emit
        self._cache_salt = cache_salt
        self._grown = asyncio.Event()
        self._sent = 0  # tokens in the longest append that was started
        self._done = 0  # tokens in the longest append that is complete
        self._misled = 0  # tokens that an earlier edge to the same call prefilled for another prompt
        self._appends = 0
        self._failure: str | None = None
        self._unclaimed: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._append_as_it_grows())

    def feed(self, call: Hashable, text: str) -> None:
        """Take more of the answer of an upstream."""
        self._grow(lambda: self.upcoming.prompt.feed(call, text))

    def finish(self, call: Hashable) -> None:
        """The answer of an upstream is complete."""
        self._grow(lambda: self.upcoming.prompt.finish(call))

    def _grow(self, step: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            step()
            if self._whole_blocks() > self._sent:
                self._grown.set()
        except Exception as error:  # noqa: BLE001 - a prefill is a hint: the upstream must not notice its errors
            self._fail(error)
            self._task.cancel()

    def _whole_blocks(self) -> int:
        """Tokens of the prompt so far, without the last block if it is not full: only full blocks are reused."""
        block = self.lease.engine.block_size
        return len(self.upcoming.prompt.ids) // block * block

    async def _append_as_it_grows(self) -> None:
        try:
            while True:
                if (tokens := self._whole_blocks()) > self._sent:
                    await self._append(tokens)
                else:
                    self._grown.clear()
                    await self._grown.wait()
        except Exception as error:  # noqa: BLE001 - a prefill is a hint: the node runs without it
            self._fail(error)

    async def _append(self, tokens: int) -> None:
        started = self._emit("append.started", tokens=tokens)
        self._sent = tokens
        request = Request(tuple(self.upcoming.prompt.ids[:tokens]), cache_salt=self._cache_salt)
        cached = await self.lease.prefill(request)
        self._done = tokens
        self._appends += 1
        self._emit("append.complete", tokens=tokens, cached=cached, ms=(time.monotonic() - started) * 1000)

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._emit("append.failed", tokens=self._sent, error=self._failure)

    def take_over(self, earlier: StreamingEdge) -> None:
        """Go on from an edge to the same call that knew less of its prompt; its lease passes to this one."""
        earlier.stop()
        shared = common_prefix(earlier.upcoming.prompt.ids[: earlier._done], self.upcoming.prompt.ids)
        self._sent = self._done = shared // self.lease.engine.block_size * self.lease.engine.block_size
        self._misled = earlier._misled + earlier._done - shared
        self._appends = earlier._appends

    def drop_later(self, drop: Callable[[StreamingEdge, str], None]) -> None:
        """The edge waits for its downstream call, but not for ever."""
        self._cancel_timer()
        self._unclaimed = asyncio.get_running_loop().call_later(UNCLAIMED_AFTER_S, drop, self, "unclaimed")

    def finalize(self, ids: Sequence[int]) -> Prefilled:
        """Stop appending and compare with the real prompt. The lease passes to the caller."""
        self.stop()
        right = common_prefix(self.upcoming.prompt.ids[: self._done], ids)
        static = min(right, self.upcoming.prompt.static_tokens)
        wasted = self._done - right + self._misled
        self._emit("finalize", static=static, streamed=right - static, wasted=wasted)
        return Prefilled(
            self._upstream, self.upcoming.source, static, right - static, wasted, self._appends, self._failure
        )

    def drop(self, reason: str) -> None:
        """Stop appending and give the lease back: no call will use what was prefilled."""
        self.stop()
        self.lease.release()
        self._emit("edge.dropped", reason=reason, source=self.upcoming.source, wasted=self._done + self._misled)

    def stop(self) -> None:
        """Stop appending, aborting what is under way."""
        self._task.cancel()
        self._cancel_timer()

    async def stopped(self) -> None:
        """Wait until the abort has gone out."""
        await asyncio.wait([self._task])

    def _cancel_timer(self) -> None:
        if self._unclaimed is not None:
            self._unclaimed.cancel()

    def _emit(self, name: str, **data: Any) -> float:
        return self._emit_event(name, self.upcoming.key.node, self.lease.engine.device, **data)
