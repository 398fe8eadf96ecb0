"""Measures how long an idle engine takes to the first token of a prompt that is cached but for its last tokens.

    python scripts/short_steps.py --device cuda:0 --model FOLDER --engine-args '{"load_format": "dummy"}'

Prints a line a case: from the sending of the request, in ms, when it was scheduled and computed in the engine's
process, and when its first token was here; then the times between tokens of requests that run at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import aclosing
from statistics import median, quantiles
from typing import Any

import typer
from rich import print as show

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.engines.vllm_engine import VllmEngine

CACHED, LEFT, AT_ONCE = (32, 4368), (4, 36, 280), (1, 4, 16, 48)
TRIES = 16
WARM = 40
"""Tokens of each answer that are left out of the times between tokens: until all requests decode."""


def main(device: str = "cuda:0", model: str | None = None, max_model_len: int = 16384, engine_args: str = "{}") -> None:
    """Measure one engine."""
    args = {**json.loads(engine_args), "disable_log_stats": False}  # vLLM's own times
    made = ChatPingPong(model=model, devices=[device], max_model_len=max_model_len, engine_args=args)
    with made as chat_model:
        pool = chat_model._serving().pool
        engine = pool.engines[0]
        assert isinstance(engine, VllmEngine)
        show(engine._engine.vllm_config.compilation_config.cudagraph_mode)
        pool.loop.run(_measure(engine))


async def _measure(engine: VllmEngine) -> None:
    for cached in CACHED:
        for left in LEFT:
            base = _ids(cached)
            await _ask(engine, base, 4)
            asked = [await _ask(engine, base + _ids(left), 4) for _ in range(TRIES)]
            scheduled, computed, first, following = (median(values) for values in zip(*asked, strict=True))
            times = f"scheduled {scheduled:.2f}, computed {computed:.2f}, first token {first:.2f}"
            show(f"cached {cached}, left {left}: {times}, next token {following:.2f}")
    for count in AT_ONCE:
        prompts = [_ids(1000) for _ in range(count)]
        await asyncio.gather(*(_gaps(engine, prompt) for prompt in prompts))
        gaps = [gap for each in await asyncio.gather(*(_gaps(engine, prompt) for prompt in prompts)) for gap in each]
        show(f"{count} at once: between tokens {median(gaps):.2f}, 95 % {quantiles(gaps, n=20)[-1]:.2f}")


def _ids(count: int) -> list[int]:
    return [random.randrange(100, 20_000) for _ in range(count)]


async def _outputs(engine: VllmEngine, ids: list[int], tokens: int) -> tuple[list[float], Any]:
    """When each token was here, in ms from the sending, and vLLM's own times of the request (s, monotonic)."""
    times: list[float] = []
    stats: Any = None
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, "detokenize": False}
    began = time.monotonic()
    async with aclosing(engine._outputs(Request(tuple(ids), sampling), 0)) as outputs:
        async for output in outputs:
            times.append((time.monotonic() - began) * 1000)
            if stats is None:
                at = output.metrics
                stats = [(when - began) * 1000 for when in (at.scheduled_ts, at.first_token_ts)]
    return times, stats


async def _ask(engine: VllmEngine, ids: list[int], tokens: int) -> tuple[float, float, float, float]:
    times, (scheduled, computed) = await _outputs(engine, ids, tokens)
    return scheduled, computed, times[0], times[2] - times[1]


async def _gaps(engine: VllmEngine, ids: list[int]) -> list[float]:
    times, _ = await _outputs(engine, ids, 96)
    return [after - before for before, after in zip(times[WARM:], times[WARM + 1 :], strict=False)]


if __name__ == "__main__":
    typer.run(main)
