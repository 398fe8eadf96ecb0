"""Tools that a model's answer called: their next prompt is prefilled while they run.

An edge is opened when the answer is complete, to the prompt that will hold it and the results. Where no other device
was prefilled for that call, it goes where the conversation is cached: nothing is decoded there for it now. Tools are
heard, never run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from langgraph_pingpong.growing_prompt import RUN, CallKey, GraphSite, ToolResult
from langgraph_pingpong.outgoing import Plan, within_limits
from langgraph_pingpong.pool import Lease

if TYPE_CHECKING:
    from langgraph_pingpong.session import Call, Session

MAX_ROUNDS = 32
"""Answers of one run whose tools are listened to at a time."""


@dataclass(frozen=True, slots=True)
class AwaitedTools:
    """The tools that an answer called: `names` by the ids of the calls.

    `listen` takes who is told of their results, in any thread, and returns what ends that. `plan` gives the calls that
    will read them; None if nothing is to be prefilled.
    """

    names: Mapping[str, str]
    listen: Callable[[Callable[[str, str | None, bool], None]], Callable[[], None]]
    plan: Plan | None = None


class ToolRound:
    """The tools that one answer called, until all their results are in and known to the edges."""

    def __init__(self, session: Session, call: Call, lease: Lease, awaited: AwaitedTools) -> None:
        self.call = call
        self._session, self._lease, self._awaited = session, lease, awaited
        self._came: set[CallKey] = set()
        self._started = time.monotonic()
        self._left = set(awaited.names)
        self._stop_listening = awaited.listen(self._tell)
        self._opening = asyncio.create_task(self._open()) if awaited.plan else None

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return not self._left and (self._opening is None or self._opening.done())

    def came(self, key: CallKey) -> None:
        """A call of the run came: no edge to it is opened any more."""
        self._came.add(key)

    def stop(self) -> None:
        """Listen no more."""
        self._stop_listening()
        if self._opening is not None:
            self._opening.cancel()

    def _tell(self, id: str, text: str | None, ended: bool) -> None:
        self._session.pool.loop.call_soon(self._heard, id, text, ended)

    def _heard(self, id: str, text: str | None, ended: bool) -> None:
        if id not in self._left:
            return
        if ended:
            self._left.discard(id)
            ms, name = (time.monotonic() - self._started) * 1000, self._awaited.names[id]
            device = self._lease.engine.device
            self._session.emit(self.call.trace, "tool.complete", self.call.node, device, tool=name, ms=ms)
        self._session.result(ToolResult(id), text, ended)

    async def _open(self) -> None:
        session, call, device = self._session, self.call, self._lease.engine.device
        try:
            assert self._awaited.plan is not None
            for upcoming in within_limits(await self._awaited.plan(), call.branch_prefetch_limit):
                if upcoming.key not in self._came:
                    session.open_edge(upcoming, call, self._lease, ahead=0)
        except Exception as error:  # noqa: BLE001 - a prefill is a hint: the next call runs without it
            session.emit(call.trace, "plan.failed", call.node, device, error=repr(error))


class ToolRounds:
    """Those of one run."""

    def __init__(self) -> None:
        self._open: list[ToolRound] = []

    def begin(self, session: Session, call: Call, lease: Lease, awaited: AwaitedTools | None) -> None:
        """An answer is complete; None if it called no tools. None of them is run where the run is over already."""
        if awaited is None or not session.is_open:
            return
        for done in [each for each in self._open if each.over] or self._open[: 1 - MAX_ROUNDS]:
            done.stop()
            self._open.remove(done)
        self._open.append(ToolRound(session, call, lease, awaited))

    def came(self, key: CallKey) -> None:
        """A call of the run came."""
        for each in self._open:
            each.came(key)

    def close(self, graph: GraphSite = RUN) -> None:
        """The run of a graph is over."""
        for each in list(self._open):
            if each.call.key is None or graph.holds(each.call.key):
                each.stop()
                self._open.remove(each)
