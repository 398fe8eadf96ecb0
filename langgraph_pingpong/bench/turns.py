"""What users of agents see of their turns: when each call of the model was made and first said something, and tools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessageChunk

from langgraph_pingpong.bench.recording import ms_between


@dataclass
class Turn:
    """One request of a conversation, from its beginning to the agent's last word. Times are seconds, monotonic."""

    conversation: int
    request: int
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None
    _calls: list[tuple[str, float, float, float, Mapping[str, Any]]] = field(default_factory=list)
    _tools: list[tuple[float, float]] = field(default_factory=list)

    async def ask(self, node: str, model: Any, messages: Any) -> AIMessageChunk:
        """Call the model, and note when its stream said something first."""
        asked, first, whole = time.monotonic(), 0.0, AIMessageChunk(content="")
        async for chunk in model.astream(messages):
            first = first or time.monotonic()
            whole = whole + chunk
        self._calls.append((node, asked, first, time.monotonic(), whole.response_metadata["pingpong"]))
        return whole

    def end(self) -> None:
        """The user has the answer."""
        self.ended = time.monotonic()

    @asynccontextmanager
    async def tool(self) -> AsyncIterator[None]:
        """A tool runs within this."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._tools.append((begun, time.monotonic()))

    def line(self, start: float) -> dict[str, Any]:
        """As plain data, with times in ms from `start` on; a call is found among the certificates by its two times."""
        calls = [
            {
                "node": node,
                **{name: ms_between(start, at) for name, at in (("asked", asked), ("first", first), ("ended", ended))},
                "ttft_ms": certificate["ttft_ms"],
                "total_ms": certificate["total_ms"],
            }
            for node, asked, first, ended, certificate in self._calls
        ]
        return {
            "conversation": self.conversation,
            "request": self.request,
            "begun": ms_between(start, self.begun),
            "ended": ms_between(start, self.ended or time.monotonic()),
            "calls": calls,
            "tools": [[ms_between(start, at) for at in each] for each in self._tools],
        }


@dataclass
class Turns:
    """All turns of a run."""

    _turns: dict[tuple[int, int], Turn] = field(default_factory=dict)

    def begin(self, conversation: int, request: int) -> Turn:
        """A user asks for something."""
        turn = self._turns[conversation, request] = Turn(conversation, request)
        return turn

    def of(self, state: Mapping[str, Any]) -> Turn:
        """That of the graph run with this state."""
        return self._turns[state["conversation"], state["request"]]

    def take(self, start: float) -> list[dict[str, Any]]:
        """The turns as plain data, in the order of their ends, with times in ms from `start` on."""
        lines = sorted((turn.line(start) for turn in self._turns.values()), key=lambda line: float(line["ended"]))
        self._turns.clear()
        return lines
