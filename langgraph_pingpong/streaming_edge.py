"""A streaming edge: one downstream prompt that is prefilled while its upstreams speak."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from langgraph_pingpong.engines.base import Appends, Request, within
from langgraph_pingpong.growing_prompt import CallKey, GrowingPrompt, ToolResult, common_prefix
from langgraph_pingpong.pool import Lease
from langgraph_pingpong.speculation import Speculation, Worth

UNCLAIMED_AFTER_S = 30.0
"""How long an edge waits for its downstream call after an upstream has finished, in seconds."""

LARGEST_PIECE = 2048
"""Tokens of an append at most, also where nothing else runs: an answer that comes meanwhile waits for the piece."""


@dataclass(frozen=True, slots=True)
class Upcoming:
    """A call of the model that is expected next, and its growing prompt.

    `step` is the superstep it is expected in, if that is known; `source` tells who foresaw it. `sampling` is what
    the same call asked for before; None if its answer is not to be begun ahead.
    `branched` is the superstep in which the graph decides whether it comes at all; None if it surely comes.
    """

    key: CallKey
    step: int | None
    source: str
    prompt: GrowingPrompt
    sampling: Mapping[str, Any] | None = None
    branched: int | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What an edge had prefilled when its downstream call came, in tokens."""

    upstream: str | None = None
    source: str | None = None
    static: int = 0
    streamed: int = 0
    wasted: int = 0
    appends: int = 0
    ready: int = 0
    fallback: str | None = None

    def lost(self) -> Prefilled:
        """The same after the device failed before the call was answered."""
        wasted = self.static + self.streamed + self.wasted
        reason = self.fallback or "its device failed"
        return replace(self, static=0, streamed=0, wasted=wasted, ready=0, fallback=reason)

    def after(self, failed: Mapping[str, str], began_anew: bool) -> Prefilled:
        """The same after engines `failed` on the way, by device; `began_anew` if none of it was of use then."""
        left = self.lost() if began_anew else self
        reasons = (left.fallback, *(f"{device}: {why}" for device, why in failed.items()))
        return replace(left, fallback="; ".join(filter(None, reasons)) or None)


Emit = Callable[..., float]
"""Records an event by name, with node, device and data; returns its time (s, monotonic)."""


class StreamingEdge:
    """Prefills one downstream prompt on a reserved device.

    Appends are whole cache blocks, one at a time: what became final meanwhile goes out together. Answers on the device
    go first. Where it has nothing else to do, the answer itself is begun, as if the upstreams had said all they have to
    say.
    """

    def __init__(
        self, upcoming: Upcoming, upstream: CallKey, lease: Lease, emit: Emit, cache_salt: str | None = None
    ) -> None:
        self.upcoming = upcoming
        self.lease = lease
        self.upstreams: frozenset[Hashable] = upcoming.prompt.calls | {upstream}
        """The calls whose failure makes the edge worthless."""
        self.upstream = upstream
        self._emit_event = emit
        self._cache_salt = cache_salt
        self._budget = lease.engine.budget
        self._guessed = len(upcoming.prompt.ids) if upcoming.branched is not None else 0
        self._budget.branches += self._guessed
        self._grown = asyncio.Event()
        self._open: Appends | None = lease.engine.open_appends(cache_salt)
        self._held = lease.held_tokens(upcoming.prompt.ids, cache_salt)
        self._sent = 0  # tokens in the longest append that was started
        self._done = 0  # tokens in the longest append that is complete
        self._misled = 0  # tokens that an earlier edge to the same call prefilled for another prompt
        self._appends = 0
        self._failure: str | None = None
        self._unclaimed: asyncio.TimerHandle | None = None
        self._finished: set[Hashable] = set()
        self._speculation: Speculation | None = None
        self._vain: Speculation | None = None  # the last one that was dropped
        # A tool's result mostly comes at once, and what would be answered without it is of no use.
        self._worth = Worth(0 if any(isinstance(call, ToolResult) for call in upcoming.prompt.calls) else Worth.TRIES)
        self._task = asyncio.create_task(self._append_as_it_grows())

    @property
    def is_idle(self) -> bool:
        """Whether the device has nothing for this prompt yet."""
        return not self._sent and self._speculation is None and not self.lease.pulled

    # -- the prompt grows ----------------------------------------------------------------------------------

    def feed(self, call: Hashable, text: str) -> None:
        """Take more of the answer of an upstream."""
        if text:
            self._grow(lambda: self.upcoming.prompt.feed(call, text))

    def finish(self, call: Hashable) -> None:
        """The answer of an upstream, or the result of a tool, is complete."""
        self._finished.add(call)
        self._grow(lambda: self.upcoming.prompt.finish(call))

    @property
    def knows_all(self) -> bool:
        """Whether all answers and results of the prompt are complete."""
        return self.upstreams <= self._finished

    def _grow(self, step: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            step()
            self._grown.set()
        except Exception as error:  # noqa: BLE001 - a prefill is a hint: the upstream must not notice its errors
            self._fail(error)
            self._task.cancel()

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._emit("append.failed", tokens=self._sent, error=self._failure)
        self._let_go()
        self._drop_answer()

    async def _append_as_it_grows(self) -> None:
        try:
            await self.lease.bring(Request(tuple(self.upcoming.prompt.ids), cache_salt=self._cache_salt))
            while self.lease.up:
                await self.lease.answers_went_first()
                self._grown.clear()
                if not await self._begin_answer() and (tokens := self._next_append()) > self._sent:
                    await self._append(tokens)
                else:
                    await self._grown.wait()
        except Exception as error:  # noqa: BLE001 - a prefill is a hint: the node runs without it
            self._fail(error)

    # -- appends -------------------------------------------------------------------------------------------

    def _next_append(self) -> int:
        """Up to which token the next append goes: in whole blocks, since only those are reused, and not too many."""
        engine = self.lease.engine
        beside = engine.piece_tokens if engine.num_unfinished else 0
        piece = beside or LARGEST_PIECE  # 0: what runs there carries nothing along, and is no answer
        # What is cached is found by the first append only, and costs nothing there: later pieces are computed.
        begun = self._sent or self._held
        end = min(len(self.upcoming.prompt.ids), begun + max(piece, engine.block_size))
        return end // engine.block_size * engine.block_size

    async def _append(self, tokens: int) -> None:
        started = self._emit("append.started", tokens=tokens)
        self._sent = tokens
        cached = await self._compute(tokens)
        self._done = tokens
        self._appends += 1
        self._emit("append.complete", tokens=tokens, cached=cached, ms=(time.monotonic() - started) * 1000)

    async def _compute(self, tokens: int) -> int | None:
        """As a delta while the engine keeps the prompt open, else as a request with the whole prefix."""
        ids = self.upcoming.prompt.ids
        if self._open is not None:
            found = await self.lease.append(self._open, ids[self._open.tokens : tokens], self._cache_salt)
            if found is not None:
                return found
            self._open = None
        return await self.lease.prefill(Request(tuple(ids[:tokens]), cache_salt=self._cache_salt))

    # -- the answer, begun ahead ---------------------------------------------------------------------------

    async def _begin_answer(self) -> bool:
        """Begin the answer if that is of use now; whether one to the prompt as it stands is under way.

        While upstreams speak, whole blocks go first: they stay in the cache, and an answer that is outdated does not.
        """
        sampling, engine = self.upcoming.sampling, self.lease.engine
        if sampling is None or (self._speculation is None and not self._may_begin()):
            return False
        ended, ids = self.knows_all, self.upcoming.prompt.if_ended()
        if self._speculation is not None:
            if self._speculation.request.prompt_token_ids == ids:
                return True
            await self._outdate(self._speculation)
            if not self._may_begin():
                return False
        if ids is None or len(ids) >= engine.max_model_len:
            return False
        full = within(engine.max_model_len - len(ids), sampling)
        self._speculation = self.lease.begin(Request(ids, full, cache_salt=self._cache_salt))
        if self._speculation is None:
            return False
        self._emit("speculation.started", prompt_tokens=len(ids), ended=ended)
        return True

    def _may_begin(self) -> bool:
        """Whether the device is idle, and either all is said, or all whole blocks are sent and words leave time."""
        if self.lease.engine.num_unfinished:
            return False
        return self.knows_all or (bool(self._worth) and self._next_append() <= self._sent)

    async def _outdate(self, speculation: Speculation) -> None:
        """The prompt grew: the answer to what it was is of no use."""
        self._worth.outdated(speculation)
        self._drop_answer()
        await speculation.stopped()

    def _drop_answer(self) -> None:
        """No call will take what was begun."""
        vain, self._speculation = self._speculation, None
        if vain is not None:
            self._vain = vain
            vain.stop()
            self._emit("speculation.dropped", tokens=vain.ready)

    def take_answer(self, request: Request) -> Speculation | None:
        """The answer to this very request, if it was begun; it passes to the caller. Another one is aborted."""
        begun = self._speculation
        if begun is None:
            return None
        if begun.fits(request):
            self._speculation = None
            return begun
        self._drop_answer()
        return None

    # -- the end -------------------------------------------------------------------------------------------

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

    def finalize(self, request: Request) -> Prefilled:
        """Stop appending and compare with the real prompt. The lease passes to the caller.

        If a token of the answer is ready, all of the prompt was computed and counts as prefilled.
        """
        self._stop_appending()
        ids = request.prompt_token_ids
        right = common_prefix(self.upcoming.prompt.ids[: self._done], ids)
        wasted = self._done - right + self._misled
        begun = self._speculation
        ready = begun.ready if begun and begun.fits(request) else 0
        right = len(ids) if ready else right
        static = min(right, self.upcoming.prompt.static_tokens)
        known = {"static": static, "streamed": right - static, "wasted": wasted, "ready": ready}
        self._emit("finalize", request=request.request_id, **known)
        return Prefilled(
            self.upstream.node,
            self.upcoming.source,
            static,
            right - static,
            wasted,
            self._appends,
            ready,
            self._failure,
        )

    def drop(self, reason: str) -> None:
        """Stop appending and give the lease back: no call will use what was prefilled."""
        self.stop()
        self.lease.release()
        self._emit("edge.dropped", reason=reason, source=self.upcoming.source, wasted=self._done + self._misled)

    def stop(self) -> None:
        """Stop appending, aborting what is under way."""
        self._stop_appending()
        self._drop_answer()

    def _stop_appending(self) -> None:
        self._task.cancel()
        self._let_go()
        self._cancel_timer()

    def _let_go(self) -> None:
        self._budget.branches -= self._guessed
        self._guessed = 0
        if self._open is not None:
            self._open.let_go()

    async def stopped(self) -> None:
        """Wait until the abort has gone out."""
        await asyncio.wait([self._task])
        if self._open is not None:
            await self._open.close()
        if self._vain is not None:
            await self._vain.stopped()

    def _cancel_timer(self) -> None:
        if self._unclaimed is not None:
            self._unclaimed.cancel()

    def _emit(self, name: str, **data: Any) -> float:
        key, device = self.upcoming.key, self.lease.engine.device
        return self._emit_event(name, key.node, device, edge=str(key), upstream=self.upstream.node, **data)
