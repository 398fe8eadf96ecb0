"""What leaves one call of the model: its words, the edges it opens, and the tools that it called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from langgraph_pingpong.pool import Lease
from langgraph_pingpong.streaming_edge import StreamingEdge, Upcoming

if TYPE_CHECKING:
    from langgraph_pingpong.session import Call, Session

Plan = Callable[[], Awaitable[Sequence[Upcoming]]]
"""Gives the calls that are expected next; runs in the background, may be slow and may fail."""


HEAD_START = 10
"""Turns of the loop in which edges act on the end of an answer before the graph does: abort an answer that is out of
date, begin the one to the whole prompt, send its request. That takes as long as a request takes to send: 1 to 2 ms for
prompts of some thousand tokens."""

MAX_TARGETS = 8
"""Prompts that will surely be asked for and that are prefilled at most while one call is answered."""


def within_limits(upcoming: Sequence[Upcoming], branch_prefetch_limit: int) -> list[Upcoming]:
    """As many of the prompts as may be prefilled: those that will surely be asked for, then the likeliest others."""
    certain = [one for one in upcoming if one.branched is None][:MAX_TARGETS]
    return [*certain, *[one for one in upcoming if one.branched is not None][:branch_prefetch_limit]]


class Outgoing:
    """What leaves one call: its words, to every edge that waits for them, and the edges it opens itself.

    A call that was `prefilled` answers at once. Its planning waits until it does, so as not to be in its way.
    """

    def __init__(self, session: Session, call: Call, lease: Lease, prefilled: bool) -> None:
        self._session, self._call, self._lease = session, call, lease
        self._plan_later = prefilled
        self._begin = asyncio.Event()
        if not call.defer:
            self._begin.set()
        self._opening = asyncio.create_task(self._open(call.plan)) if call.plan else None
        self._said = session.listen(call)
        self._ended = False

    async def _open(self, plan: Plan) -> None:
        try:
            if self._plan_later:
                await self._begin.wait()
            upcoming = await plan()
            await self._begin.wait()
            for ahead, one in enumerate(within_limits(upcoming, self._call.branch_prefetch_limit), start=1):
                self._session.open_edge(one, self._call, self._lease, ahead)
        except Exception as error:  # noqa: BLE001 - planning runs user code; the call must not notice its errors
            device = self._lease.engine.device
            self._session.emit(self._call.trace, "plan.failed", self._call.node, device, error=repr(error))

    def feed(self, text: str) -> None:
        """Pass on what the call said."""
        self._begin.set()
        self._said.append(text)
        self._session.heard(self._call.key, text)

    async def finish(self) -> None:
        """All is said. Edges learn of it first, the graph then: its code and theirs share one interpreter."""
        if self._opening is None or self._opening.done():
            self._end(finished=True)
            for _ in range(HEAD_START):
                await asyncio.sleep(0)

    async def close(self, finished: bool) -> None:
        """The call is over. Unless it finished, nothing it said can be relied on."""
        try:
            if self._opening is not None:
                if finished:
                    await asyncio.sleep(0)  # an answer in one piece: the plan that waited for it begins, and learns
                self._opening.cancel()
                await asyncio.wait([self._opening])
        finally:
            dropped = self._end(finished)
            if finished:
                self._session.rounds.begin(self._session, self._call, self._lease, self._call.tools())
        for edge in dropped:
            await edge.stopped()

    def _end(self, finished: bool) -> list[StreamingEdge]:
        """Tell the session, once. Returns the edges that were dropped."""
        if self._ended:
            return []
        self._ended = True
        return self._session.ended(self._call, finished)
