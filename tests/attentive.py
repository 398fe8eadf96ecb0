"""Modelled engines that wait for events, not for time: whoever waits for the end of an answer finds edges caught up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.outgoing import Outgoing
from langgraph_pingpong.streaming_edge import StreamingEdge
from tests.conftest import edges_on

LOOK_AGAIN_S = 0.002
LOOKS = 1500
"""How often at most: an end that nobody waits for comes all the same. Plans are given up after two seconds."""


@dataclass(eq=False)
class AttentiveEngine(FakeEngine):
    """Takes no time to answer, but holds the end of an answer back until all edges have nothing more to do.

    So how much was prefilled does not depend on how busy the machine is. Of several answers one ends at a time.
    """

    pool: EnginePool | None = field(default=None, repr=False)
    ending: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        begun = False
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                if begun and delta.finish_reason is not None:
                    await self._until(lambda: request.request_id not in self._ahead())
                    async with self.ending:
                        await self._until(self._edges_are_through)
                        yield delta
                else:
                    yield delta
                begun = True

    async def _until(self, condition: Callable[[], bool]) -> None:
        for _ in range(LOOKS):
            await asyncio.sleep(LOOK_AGAIN_S)
            if condition():
                return

    def _edges(self) -> list[StreamingEdge]:
        return edges_on(self.pool) if self.pool else []

    def _ahead(self) -> list[str]:
        """Answers that were begun ahead of their calls, which come when other answers have ended."""
        return [edge._speculation.request.request_id for edge in self._edges() if edge._speculation]

    def _edges_are_through(self) -> bool:
        """Whether every plan is made, and every edge waits for more of its prompt."""
        coroutines = [task.get_coro() for task in asyncio.all_tasks()]
        if any(getattr(each, "__qualname__", "") == Outgoing._open.__qualname__ for each in coroutines):
            return False
        return all(edge._task.done() or edge._grown._waiters for edge in self._edges())  # type: ignore[attr-defined]


def attentive(model: ChatPingPong) -> ChatPingPong:
    """The model, whose modelled engines are attentive from now on."""
    pool, ending = model._serving().pool, asyncio.Lock()
    for engine in pool.engines:
        assert isinstance(engine, FakeEngine)
        engine.__class__ = AttentiveEngine
        engine.pool, engine.ending = pool, ending  # type: ignore[attr-defined]
    return model
