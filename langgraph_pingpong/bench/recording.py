"""What the engines themselves say of a run: every token with its time, counted beside and not by the session."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from langgraph_pingpong.engines.base import Delta, Engine, Request, new_request_id
from langgraph_pingpong.pool import EnginePool

Generate = Callable[[Request], AsyncGenerator[Delta]]


@dataclass
class EngineAnswer:
    """One answer of an engine: when it was asked for and over, and when how many tokens came (s, monotonic)."""

    device: str
    prompt_tokens: int
    prompt_sha256: str
    started: float
    ended: float | None = None
    tokens: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None

    def line(self, start: float) -> dict[str, Any]:
        """As plain data, with times in ms from `start` on."""
        return {
            "device": self.device,
            "prompt_tokens": self.prompt_tokens,
            "prompt_sha256": self.prompt_sha256,
            "started": ms_between(start, self.started),
            "ended": None if self.ended is None else ms_between(start, self.ended),
            "tokens": [[ms_between(start, at), count] for at, count in self.tokens],
            "finish_reason": self.finish_reason,
        }


class Recorder:
    """Listens at the engines of a pool. With `uncached`, no prompt finds anything in the prefix cache.

    Everything happens on the pool's loop thread but `take`, which is for the time between runs.
    """

    def __init__(self, pool: EnginePool) -> None:
        self.uncached = False
        self._answers: list[EngineAnswer] = []
        for engine in pool.engines:
            engine.generate = partial(self._record, engine.device, engine.generate)  # type: ignore[method-assign]

    def take(self) -> list[EngineAnswer]:
        """The answers since the last time."""
        taken, self._answers = self._answers, []
        return taken

    async def _record(self, device: str, generate: Generate, request: Request) -> AsyncGenerator[Delta]:
        ids = request.prompt_token_ids
        answer = EngineAnswer(device, len(ids), hashlib.sha256(array("I", ids)).hexdigest(), time.monotonic())
        self._answers.append(answer)
        if self.uncached:  # what is computed under a salt of its own is found by nobody
            request = replace(request, cache_salt=new_request_id())
        try:
            async with aclosing(generate(request)) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        answer.tokens.append((time.monotonic(), len(delta.token_ids)))
                    answer.finish_reason = delta.finish_reason or answer.finish_reason
                    yield delta
        finally:
            answer.ended = time.monotonic()


def is_idle(engine: Engine) -> bool:
    """Whether nothing is under way on an engine."""
    return not engine.num_unfinished


def ms_between(start: float, at: float) -> float:
    """Milliseconds from one time (s) to another, to a hundredth."""
    return round((at - start) * 1000, 2)
