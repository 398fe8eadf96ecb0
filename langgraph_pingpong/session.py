"""One run of a graph on one pool: answer here, append there, verify, finalize, swap.

A call of the model is answered on one device. Meanwhile the prompts that come next are prefilled on another:
each streaming edge sends its growing prompt as ordinary requests of whole cache blocks, one at a time. When the
downstream call comes, its edge is claimed: an append still under way is aborted (the blocks it has computed stay
cached), and the answer is an ordinary request with the full prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

from langgraph_pingpong.engines.base import Delta, Reader, Request, Said, all_content
from langgraph_pingpong.pool import EnginePool, Lease
from langgraph_pingpong.tokens import GrowingPrompt, common_prefix
from langgraph_pingpong.trace import Trace

UNCLAIMED_AFTER_S = 30.0
"""How long an edge waits for its downstream call after the upstream has finished, in seconds."""

MAX_RUNS = 1024
"""How many runs a pool remembers; the ones used least recently are forgotten first."""


Site = tuple[str, ...]
"""Where in a graph a call comes from: the names of the enclosing graphs' nodes, then of the node itself."""


@dataclass(frozen=True, slots=True)
class Upcoming:
    """A call of the model that is expected next: where it will come from, and its growing prompt."""

    node: str
    site: Site
    step: int
    prompt: GrowingPrompt


Plan = Callable[[], Awaitable[Sequence[Upcoming]]]
"""Gives the calls that are expected next; runs in the background, may be slow and may fail."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model.

    `site` is where in the graph it comes from and `step` the superstep; outside a graph they are None and 0.
    `plan` gives the calls expected next; with `defer` their prefill waits for this call's first token. `read` takes
    the answer apart: only its content is passed on to them.
    """

    node: str
    request: Request
    site: Site | None = None
    step: int = 0
    plan: Plan | None = None
    defer: bool = True
    read: Reader = all_content


@dataclass(frozen=True, slots=True)
class Certificate:
    """What happened to one prompt.

    All counts are tokens of it: `static` and `streamed` were prefilled by the edge before and while the upstream
    spoke, and are part of the real prompt; `wasted` were prefilled and are not. `cached` is what the engine found
    in its prefix cache when the call came. `ttft_ms` counts from the moment the upstream finished (for a first
    node from its own start) to the first token, `total_ms` from there to the last. `ids_equal` compares the ids
    the engine answered with the fully rendered prompt.
    """

    node: str
    device: str
    upstream: str | None
    prompt_tokens: int
    output_tokens: int
    ids_equal: bool
    cached: int
    static: int
    streamed: int
    wasted: int
    appends: int
    ttft_ms: float
    total_ms: float
    fallback: str | None

    def to_dict(self) -> dict[str, Any]:
        """The certificate as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What an edge had prefilled when its downstream call came, in tokens."""

    upstream: str | None = None
    static: int = 0
    streamed: int = 0
    wasted: int = 0
    appends: int = 0
    fallback: str | None = None


class StreamingEdge:
    """Prefills one downstream prompt while its upstream speaks."""

    def __init__(self, upcoming: Upcoming, upstream: str, lease: Lease, session: Session) -> None:
        self.upcoming = upcoming
        self.lease = lease
        self._upstream = upstream
        self._session = session
        self._grown = asyncio.Event()
        self._sent = 0  # tokens in the longest append that was started
        self._done = 0  # tokens in the longest append that is complete
        self._appends = 0
        self._failure: str | None = None
        self._unclaimed: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._append_as_it_grows())

    def feed(self, text: str) -> None:
        """Take more of the upstream's text."""
        if self._failure is not None:
            return
        try:
            self.upcoming.prompt.feed(text)
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
        request = Request(tuple(self.upcoming.prompt.ids[:tokens]))
        cached = await self.lease.engine.prefill(request)
        self._done = tokens
        self._appends += 1
        self._emit("append.complete", tokens=tokens, cached=cached, ms=_ms_since(started))

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._emit("append.failed", tokens=self._sent, error=self._failure)

    def upstream_finished(self) -> None:
        """No more text comes. The edge waits for its downstream call, but not for ever."""
        loop = asyncio.get_running_loop()
        self._unclaimed = loop.call_later(UNCLAIMED_AFTER_S, self._session.drop, self, "unclaimed")

    def matches(self, ids: Sequence[int]) -> int:
        """How many tokens of a real prompt this edge has sent."""
        return common_prefix(self.upcoming.prompt.ids[: self._sent], ids)

    def finalize(self, ids: Sequence[int]) -> Prefilled:
        """Stop appending and compare with the real prompt. The lease passes to the caller."""
        self.stop()
        right = common_prefix(self.upcoming.prompt.ids[: self._done], ids)
        static = min(right, self.upcoming.prompt.static_tokens)
        prefilled = Prefilled(self._upstream, static, right - static, self._done - right, self._appends, self._failure)
        self._emit("finalize", static=static, streamed=right - static, wasted=prefilled.wasted)
        return prefilled

    def drop(self, reason: str) -> None:
        """Stop appending and give the lease back: no call will use what was prefilled."""
        self.stop()
        self.lease.release()
        self._emit("edge.dropped", reason=reason, wasted=self._done)

    def stop(self) -> None:
        """Stop appending, aborting what is under way."""
        self._task.cancel()
        if self._unclaimed is not None:
            self._unclaimed.cancel()

    async def stopped(self) -> None:
        """Wait until the abort has gone out."""
        await asyncio.wait([self._task])

    def _emit(self, name: str, **data: Any) -> float:
        return self._session.emit(name, self.upcoming.node, self.lease.engine.device, **data)


class Outgoing:
    """The streaming edges that leave one call: opened once the plan is known, then fed with its text."""

    def __init__(self, session: Session, call: Call, lease: Lease) -> None:
        self._session, self._call, self._lease = session, call, lease
        self._said: list[str] = []
        self._edges: list[StreamingEdge] = []
        self._begin = asyncio.Event()
        if not call.defer:
            self._begin.set()
        self._opening = asyncio.create_task(self._open(call.plan)) if call.plan else None

    async def _open(self, plan: Plan) -> None:
        try:
            upcoming = await plan()
            await self._begin.wait()
            for ahead, prompt in enumerate(upcoming, start=1):
                edge = self._session.open_edge(prompt, self._call.node, self._lease, ahead)
                self._edges.append(edge)
                edge.feed("".join(self._said))
        except Exception as error:  # noqa: BLE001 - planning runs user code; the call must not notice its errors
            self._session.emit("plan.failed", self._call.node, self._lease.engine.device, error=repr(error))

    def feed(self, text: str) -> None:
        """Pass on what the call said."""
        self._begin.set()
        if not self._edges:
            self._said.append(text)
        for edge in self._edges:
            edge.feed(text)

    async def close(self, finished: bool) -> None:
        """The call is over. Unless it finished, nothing it said can be relied on."""
        try:
            if self._opening is not None:
                self._opening.cancel()
                await asyncio.wait([self._opening])
        finally:
            for edge in self._edges:
                if finished:
                    edge.upstream_finished()
                else:
                    self._session.drop(edge, "upstream did not finish")
        if not finished:
            for edge in self._edges:
                await edge.stopped()


@dataclass
class Session:
    """One run of a graph on one pool."""

    pool: EnginePool
    trace: Trace
    start: int
    """The device of the run's first call; the i-th call goes to device (start + i) mod N."""
    owner: object = None
    """Kept so that the run's identity is not reused while the session lives."""
    name: str = field(default_factory=lambda: uuid4().hex[:12])
    _calls: int = 0
    _last_finish: float | None = None
    _edges: dict[Site, list[StreamingEdge]] = field(default_factory=dict)

    async def answer(self, call: Call) -> AsyncGenerator[tuple[Delta, Said, Certificate | None]]:
        """Stream the answer to a call, also taken apart; the certificate comes with the last delta.

        Raises:
            EngineError: the engine that answers failed.
        """
        ids = call.request.prompt_token_ids
        since = self._last_finish or time.monotonic()
        edge = self._claim(call, ids)
        prefilled = edge.finalize(ids) if edge else Prefilled()
        lease = edge.lease if edge else self.pool.lease(self.start + self._calls)
        self._calls += 1
        outgoing = Outgoing(self, call, lease)
        finished = False
        try:
            if edge:
                await edge.stopped()
            async with aclosing(self._generate(call, lease, prefilled, since)) as deltas:
                async for delta, certificate in deltas:
                    said = call.read(delta)
                    if delta.index == 0:  # of several answers to one prompt, LangChain's invoke returns the first
                        outgoing.feed(said.content)
                    if certificate:
                        finished = True
                        self._last_finish = time.monotonic()
                    yield delta, said, certificate
        finally:
            lease.release()
            await outgoing.close(finished)

    async def _generate(
        self, call: Call, lease: Lease, prefilled: Prefilled, since: float
    ) -> AsyncGenerator[tuple[Delta, Certificate | None]]:
        """The engine's deltas, measured and checked."""
        device, ids = lease.engine.device, call.request.prompt_token_ids
        self.emit("generate.started", call.node, device, prompt_tokens=len(ids), prompt_sha256=_digest(ids))
        seen: tuple[int, ...] | None = None
        cached, said, ttft_ms, unfinished = 0, 0, 0.0, call.request.sampling.get("n", 1)
        async with aclosing(lease.engine.generate(call.request)) as deltas:
            async for delta in deltas:
                if seen is None:
                    seen, cached = delta.prompt_token_ids or (), delta.num_cached_tokens or 0
                    ttft_ms = _ms_since(since)
                    self.emit("first_token", call.node, device, ttft_ms=ttft_ms, cached=cached)
                said += len(delta.token_ids)
                unfinished -= delta.finish_reason is not None
                if unfinished:
                    yield delta, None
                    continue
                certificate = Certificate(
                    node=call.node,
                    device=device,
                    prompt_tokens=len(ids),
                    output_tokens=said,
                    ids_equal=seen == ids,
                    cached=cached,
                    ttft_ms=ttft_ms,
                    total_ms=_ms_since(since),
                    **asdict(prefilled),
                )
                self.emit("finish", call.node, device, certificate=certificate.to_dict())
                yield delta, certificate

    def open_edge(self, upcoming: Upcoming, upstream: str, lease: Lease, ahead: int) -> StreamingEdge:
        """Start prefilling an expected prompt, `ahead` devices after the one that answers the upstream."""
        place = self.pool.lease(lease.index + ahead, avoid=lease.index)
        edge = StreamingEdge(upcoming, upstream, place, self)
        self._edges.setdefault(upcoming.site, []).append(edge)
        return edge

    def drop(self, edge: StreamingEdge, reason: str) -> None:
        """Forget an edge that no call will claim."""
        waiting = self._edges.get(edge.upcoming.site, [])
        if edge in waiting:
            waiting.remove(edge)
            edge.drop(reason)

    def _claim(self, call: Call, ids: Sequence[int]) -> StreamingEdge | None:
        """Take the edge that was meant for this call; those of supersteps gone by are dropped."""
        if call.site is None:
            return None
        for edge in self._open_edges():
            if edge.upcoming.site[:-1] == call.site[:-1] and edge.upcoming.step < call.step:
                self.drop(edge, "not called")
        waiting = self._edges.get(call.site)
        if not waiting:
            return None
        edge = max(waiting, key=lambda edge: edge.matches(ids))
        waiting.remove(edge)
        return edge

    def _open_edges(self) -> list[StreamingEdge]:
        return [edge for edges in self._edges.values() for edge in edges]

    def close(self) -> None:
        """Drop every edge."""
        for edge in self._open_edges():
            self.drop(edge, "run ended")

    def emit(self, name: str, node: str, device: str, **data: Any) -> float:
        """Record an event of this run; returns its time (s, monotonic)."""
        return self.trace.emit(name, run=self.name, node=node, device=device, **data)


def session_of(owner: object | None, pool: EnginePool, trace: Trace) -> Session:
    """The session of a run on a pool, made on its first call. `owner` is what all calls of one run share.

    Models that share a pool share its sessions, so that their nodes can share edges. A call outside a graph
    (`owner` None) is a run of its own.
    """
    if owner is None:
        return Session(pool, trace, pool.least_loaded())
    session = pool.runs.get(id(owner))
    if session is None:
        session = pool.runs[id(owner)] = Session(pool, trace, pool.least_loaded(), owner)
    pool.runs.move_to_end(id(owner))
    if len(pool.runs) > MAX_RUNS:
        pool.runs.popitem(last=False)[1].close()
    return session


def _digest(ids: Sequence[int]) -> str:
    """Equal for equal prompts, so that runs can be compared without the prompts in the trace."""
    return hashlib.sha256(array("I", ids)).hexdigest()


def _ms_since(started: float) -> float:
    return (time.monotonic() - started) * 1000
