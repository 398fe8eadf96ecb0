"""One run of a graph on one pool: answer here, append there, verify, finalize, swap.

A call of the model is answered on one device. Meanwhile the prompts that come next are prefilled on another: each
streaming edge appends to its growing prompt, whole cache blocks, one append at a time. When the downstream call comes,
its edge is claimed: an append still under way is aborted (the blocks it has computed stay cached), and the answer is an
ordinary request with the full prompt, or that very request if the edge has sent it already.
"""

from __future__ import annotations

import hashlib
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from langgraph_pingpong.certificate import Certificate
from langgraph_pingpong.engines.base import Delta, Reader, Request, Said, all_content
from langgraph_pingpong.failover import Decode, MovingAnswer
from langgraph_pingpong.growing_prompt import RUN, CallKey, GraphSite
from langgraph_pingpong.outgoing import Outgoing, Plan
from langgraph_pingpong.pool import EnginePool, Lease
from langgraph_pingpong.speculation import Speculation
from langgraph_pingpong.streaming_edge import Prefilled, StreamingEdge, Upcoming
from langgraph_pingpong.tool_round import AwaitedTools, ToolRounds
from langgraph_pingpong.trace import Trace

MAX_RUNS = 1024
"""How many runs that are not over a pool remembers; the ones used least recently are forgotten first."""

MAX_ANSWERS = 32
"""Finished answers of one run that are kept for edges that open later; those under way are kept as well."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model.

    `key` says which call of the graph it is and `step` the superstep; outside a graph they are None and 0.
    `plan` gives the calls expected next; with `defer` their prefill waits for this call's first token. `read` takes
    the answer apart: only its content is passed on to them. `trace` gets the call's events and those of the edges it
    opens. `decode` makes text of ids as the engine does; without it an answer that has begun cannot go on elsewhere.
    With `same_device` the next prompts are prefilled where this call is answered, and the whole run stays there.
    `tools` tells of the complete answer which tools it called. `beside` names the nodes of its superstep.
    """

    request: Request
    key: CallKey | None = None
    step: int = 0
    plan: Plan | None = None
    defer: bool = True
    read: Reader = all_content
    trace: Trace = field(default_factory=Trace)
    decode: Decode | None = None
    same_device: bool = False
    tools: Callable[[], AwaitedTools | None] = lambda: None
    beside: frozenset[str] = frozenset()
    branch_prefetch_limit: int = 8

    @property
    def node(self) -> str:
        """The node that makes the call, or ''."""
        return self.key.node if self.key else ""


@dataclass
class Session:
    """One run of a graph on one pool."""

    pool: EnginePool
    start: int
    """The device of the run's first call; the turn of the i-th call is at device (start + i) mod N."""
    owner: object = None
    """Kept so that the run's identity is not reused while the session lives."""
    name: str = field(default_factory=lambda: uuid4().hex[:12])
    is_open: bool = True
    """Whether more calls may come."""
    _calls: int = 0
    _last_finish: float | None = None
    _edges: dict[CallKey, StreamingEdge] = field(default_factory=dict)
    _said: dict[Hashable, list[str]] = field(default_factory=dict)
    _ended: dict[Hashable, None] = field(default_factory=dict)
    rounds: ToolRounds = field(default_factory=ToolRounds)
    """The tools that run."""

    @property
    def is_new(self) -> bool:
        """Whether no call was made yet."""
        return not self._calls

    async def answer(self, call: Call) -> AsyncGenerator[tuple[Delta, Said, Certificate | None]]:
        """Stream the answer to a call, also taken apart; the certificate comes with the last delta.

        Raises:
            EngineError: the engine that answers failed.
        """
        since = self._last_finish or time.monotonic()
        self.is_open = True
        self.pool.health.traces.add(call.trace.origin)
        edge = self._claim(call)
        prefilled = edge.finalize(call.request) if edge else Prefilled()
        lease, prefilled = self._lease(call, edge, prefilled)
        begun = edge.take_answer(call.request) if edge and lease is edge.lease else None
        lease.give_way(begun)
        self._calls += 1
        outgoing = Outgoing(self, call, lease, prefilled=edge is not None)
        last: tuple[Delta, Said, Certificate] | None = None
        finished = False
        try:
            if edge:
                await edge.stopped()
            async with aclosing(self._generate(call, lease, prefilled, since, begun)) as deltas:
                async for delta, certificate in deltas:
                    said = call.read(delta)
                    if delta.index == 0:  # of several answers to one prompt, LangChain's invoke returns the first
                        outgoing.feed(said.content)
                    if certificate is None:
                        yield delta, said, None
                    else:
                        last = delta, said, certificate
            if last is not None:  # the engine has nothing more to do for it
                finished = True
                self._last_finish = time.monotonic()
                await outgoing.finish()
                yield last
        finally:
            if not finished:
                error, id = type(sys.exception()).__name__, call.request.request_id
                self.emit(call.trace, "generate.failed", call.node, lease.engine.device, request=id, error=error)
            if begun:
                begun.stop()
            lease.release()
            await outgoing.close(finished)

    def _lease(self, call: Call, edge: StreamingEdge | None, prefilled: Prefilled) -> tuple[Lease, Prefilled]:
        """A place for a call: that of its edge, unless its device died, or had no time for it."""
        if edge is not None and edge.lease.up and not edge.is_idle:
            return edge.lease, prefilled
        if edge is not None:
            edge.stop()
            edge.lease.release()
            prefilled = prefilled if edge.lease.up else prefilled.lost()
        request = call.request
        turn = self.start + (0 if call.same_device else self._calls)
        return self.pool.lease(turn, request.prompt_token_ids, request.cache_salt), prefilled

    async def _generate(
        self, call: Call, lease: Lease, prefilled: Prefilled, since: float, begun: Speculation | None
    ) -> AsyncGenerator[tuple[Delta, Certificate | None]]:
        """The engine's deltas, measured and checked."""
        ids = call.request.prompt_token_ids
        emit = partial(self.emit, call.trace, node=call.node, request=call.request.request_id)
        emit("generate.started", device=lease.engine.device, prompt_tokens=len(ids), prompt_sha256=_digest(ids))
        moving = MovingAnswer(self.pool, lease, call.request, call.decode, partial(emit, "failover"), begun)
        seen: tuple[int, ...] | None = None
        cached: int | None = None
        said, ttft_ms, unfinished = 0, 0.0, call.request.sampling.get("n", 1)
        async with aclosing(moving.deltas()) as deltas:
            async for delta in deltas:
                cached = cached if delta.num_cached_tokens is None else delta.num_cached_tokens
                if seen is None:
                    seen = delta.prompt_token_ids or ()
                    ttft_ms = _ms_since(since)
                    emit("first_token", device=lease.engine.device, ttft_ms=ttft_ms, cached=cached)
                said += len(delta.token_ids)
                unfinished -= delta.finish_reason is not None
                if unfinished:
                    yield delta, None
                    continue
                certificate = Certificate(
                    node=call.node,
                    device=lease.engine.device,
                    prompt_tokens=len(ids),
                    output_tokens=said - moving.left_out,
                    ids_equal=seen == ids and moving.ids_equal,
                    cached=cached,
                    lost=lease.lost,
                    pulled=lease.pulled,
                    ttft_ms=ttft_ms,
                    total_ms=_ms_since(since),
                    **asdict(prefilled.after(moving.failed, moving.began_anew)),
                )
                emit("finish", device=lease.engine.device, certificate=certificate.to_dict())
                yield delta, certificate

    # -- edges ---------------------------------------------------------------------------------------------

    def listen(self, call: Call) -> list[str]:
        """A call begins to speak. Returns where its words go: kept for edges that open later, if it can have any."""
        said: list[str] = []
        if call.key is not None and call.plan is not None:
            self._ended.pop(call.key, None)
            self._said[call.key] = said
        return said

    def heard(self, key: Hashable, text: str) -> None:
        """A call, or a tool, said more: pass it to the edges that wait for it."""
        for edge in self._edges.values():
            edge.feed(key, text)

    def result(self, key: Hashable, text: str | None, ended: bool) -> None:
        """A tool said more of its result, or all of it.

        None: it failed, or returned no text, or, if it had said some, another one. What stands before it stays right.
        """
        concerned = [edge for edge in self._edges.values() if key in edge.upstreams]
        if text is None:
            self._last_finish = time.monotonic()
            misled = ended and bool(self._said.pop(key, []))
            for edge in concerned if misled else ():
                self.drop(edge, "a tool's result was not what it said")
            return
        self._said.setdefault(key, []).append(text)
        self.heard(key, text)
        if ended:
            self._last_finish = time.monotonic()
            self._keep(key)
            for edge in concerned:
                edge.finish(key)
                if edge.knows_all:
                    edge.drop_later(self.drop)

    def ended(self, call: Call, finished: bool) -> list[StreamingEdge]:
        """A call is over. Returns the edges that were dropped because it did not finish."""
        key = call.key
        if key is None or key not in self._said:
            return []
        concerned = [edge for edge in self._edges.values() if key in edge.upstreams]
        if not finished:
            self._forget(key)
            for edge in concerned:
                self.drop(edge, "upstream did not finish")
            return concerned
        self._keep(key)
        for edge in concerned:
            edge.finish(key)
            edge.drop_later(self.drop)
        return []

    def _keep(self, key: Hashable) -> None:
        """Keep a finished answer, and let go of the oldest of too many."""
        self._ended[key] = None
        if len(self._ended) > MAX_ANSWERS:
            self._forget(next(iter(self._ended)))

    def _forget(self, key: Hashable) -> None:
        self._ended.pop(key, None)
        self._said.pop(key, None)

    def open_edge(self, upcoming: Upcoming, upstream: Call, lease: Lease, ahead: int) -> None:
        """Start prefilling an expected prompt, `ahead` devices after the one that answers the upstream.

        If there is an edge to that call already, the one that knows more of its prompt stays. Where the run is over, no
        call comes: a synchronous node goes on in its thread when its run is cancelled.
        """
        if not self.is_open:
            return
        earlier = self._edges.get(upcoming.key)
        if earlier is not None and earlier.upcoming.prompt.reach >= upcoming.prompt.reach:
            return
        if earlier is not None and not earlier.lease.up:
            self.drop(earlier, "its device failed")
            earlier = None
        place = earlier.lease if earlier else self._place(upcoming, upstream, lease, ahead)
        if place is None:
            self.emit(upstream.trace, "edge.quiet", upcoming.key.node, lease.engine.device, source=upcoming.source)
            return
        assert upstream.key is not None, "only calls of a graph have edges"
        salt, opened_by = upstream.request.cache_salt, upstream.request.request_id
        emit = partial(self.emit, upstream.trace, opened_by=opened_by)
        edge = StreamingEdge(upcoming, upstream.key, place, emit, salt)
        self._edges[upcoming.key] = edge
        for key, said in self._said.items():
            edge.feed(key, "".join(said))
            if key in self._ended:
                edge.finish(key)
        if earlier is not None:
            edge.take_over(earlier)

    def _place(self, upcoming: Upcoming, upstream: Call, lease: Lease, ahead: int) -> Lease | None:
        """Where an edge prefills; None where it cannot, or where its call will do better without."""
        place = self._reserve(upcoming, upstream, lease, ahead)
        if place is None or _takes(place, upcoming):
            return place
        place.release()
        return None

    def _reserve(self, upcoming: Upcoming, upstream: Call, lease: Lease, ahead: int) -> Lease | None:
        """While its upstream speaks on another device, unless it shall be the same."""
        if upstream.same_device:
            return self.pool.lease_beside(lease)
        if not ahead:
            return self.pool.lease(lease.index, upcoming.prompt.ids, upstream.request.cache_salt)
        return self.pool.lease_ahead(lease, ahead, upcoming.prompt.ids, upstream.request.cache_salt)

    def drop(self, edge: StreamingEdge, reason: str) -> None:
        """Forget an edge that no call will claim."""
        if self._edges.get(edge.upcoming.key) is edge:
            del self._edges[edge.upcoming.key]
            edge.drop(reason)

    def _claim(self, call: Call) -> StreamingEdge | None:
        """Take the edge that was meant for this call; those of supersteps gone by are dropped."""
        if call.key is None:
            return None
        self.rounds.came(call.key)
        for edge in list(self._edges.values()):
            if _is_past(edge.upcoming, call.key, call.step):
                self.drop(edge, "not called")
            elif _is_lost(edge, call.key, call):
                self.drop(edge, "not chosen")
        return self._edges.pop(call.key, None)

    def close(self, graph: GraphSite = RUN) -> None:
        """The run of a graph is over: drop the edges within it."""
        self.rounds.close(graph)
        for edge in list(self._edges.values()):
            if graph.holds(edge.upcoming.key):
                self.drop(edge, "run ended")
        self.is_open = self.is_open and bool(graph.site)

    def emit(self, trace: Trace, name: str, node: str, device: str, **data: Any) -> float:
        """Record an event of this run; returns its time (s, monotonic)."""
        return trace.emit(name, run=self.name, node=node, device=device, **data)


def session_of(owner: object | None, pool: EnginePool) -> Session:
    """The session of a run on a pool, made on its first call. `owner` is what all calls of one run share.

    Models that share a pool share its sessions, so that their nodes can share edges. A call outside a graph
    (`owner` None) is a run of its own.
    """
    if owner is None:
        return Session(pool, pool.start_of_run())
    session = pool.runs.get(id(owner))
    if session is None:
        session = pool.runs[id(owner)] = Session(pool, pool.start_of_run(), owner)
    pool.runs.move_to_end(id(owner))
    if len(pool.runs) > MAX_RUNS:
        pool.runs.popitem(last=False)[1].close()
    return session


def _takes(place: Lease, upcoming: Upcoming) -> bool:
    """Whether a device is up, and may hold one more prompt beside those that it holds, if nobody may ask for it."""
    return place.up and (upcoming.branched is None or place.engine.budget.may_branch(len(upcoming.prompt.ids)))


def _is_past(upcoming: Upcoming, key: CallKey, step: int) -> bool:
    """Whether a call expected in a superstep of the same graph can no longer come."""
    return upcoming.step is not None and upcoming.key.site[:-1] == key.site[:-1] and upcoming.step < step


def _is_lost(edge: StreamingEdge, key: CallKey, call: Call) -> bool:
    """Whether the graph has gone another way, as the nodes show that now run."""
    graph, branched, site = key.site[:-1], edge.upcoming.branched, edge.upcoming.key.site
    if branched is None or branched >= call.step or edge.upstream.site[:-1] != graph or site[: len(graph)] != graph:
        return False
    return len(site) > len(graph) and site[len(graph)].partition(":")[0] not in call.beside


def _digest(ids: Sequence[int]) -> str:
    """Equal for equal prompts, so that runs can be compared without the prompts in the trace."""
    return hashlib.sha256(array("I", ids)).hexdigest()


def _ms_since(started: float) -> float:
    return (time.monotonic() - started) * 1000
