"""Measures the few speeds that the cost model asks for, on an engine that is up, in well under a minute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from statistics import median

from langgraph_pingpong.bench.cost_model import Across, Speeds
from langgraph_pingpong.engines.base import Engine, Request, new_request_id

LENGTHS = (256, 2048)
"""Tokens of the prompts that are timed; what both need is the floor, the rest is per token."""

LONG_ENOUGH_S = 1.0
"""Where the longer one takes more than this, a shorter one is timed, but no less than twice the other."""

ANSWER_TOKENS = 48
TRIES = 3


async def calibrate(engine: Engine) -> Speeds:
    """The speeds of an engine on which nothing else runs."""
    longest = min(LENGTHS[1], engine.max_model_len - ANSWER_TOKENS - 1)
    shortest = min(LENGTHS[0], longest // 2)
    took = await _prefilled(engine, longest)  # the first time of a shape is not counted
    longest = min(longest, max(2 * shortest, int(longest * LONG_ENOUGH_S / took)))
    short, long = [await _best(engine, length) for length in (shortest, longest)]
    prefill_s = max(long - short, 1e-9) / (longest - shortest)
    alone = await _decode(engine, None)
    beside = await _decode(engine, partial(_prefilled, engine, longest))
    mixed_s = max(sum(beside) - len(beside) * median(alone), 0.0) / longest
    return Speeds(prefill_s, median(alone), max(short - shortest * prefill_s, 0.0), mixed_s)


async def calibrate_across(upstream: Engine, downstream: Engine, speeds: Speeds) -> Across:
    """What two engines cost each other while the first decodes and the second prefills; `speeds` are those of each.

    The prompt is as long as takes half of the answer, so that all of it is computed beside decoding.
    """
    alone = await _decode(upstream, None)
    room = sum(alone) / 2 / speeds.prefill_s
    tokens = max(1, min(int(room), downstream.max_model_len - 1))
    prefill_s = 0.0

    async def prefill() -> None:
        nonlocal prefill_s
        prefill_s = await _prefilled(downstream, tokens)

    beside = await _decode(upstream, prefill)
    slowed_s = max(sum(beside) - len(beside) * median(alone), 0.0) / tokens
    return Across(prefill_s / tokens, slowed_s)


def _prompt(tokens: int) -> tuple[int, ...]:
    return tuple(7 * place % 997 + 3 for place in range(tokens))


async def _prefilled(engine: Engine, tokens: int) -> float:
    """Seconds that a prompt takes which nobody has seen."""
    started = time.monotonic()
    await engine.prefill(Request(_prompt(tokens), cache_salt=new_request_id()))
    return time.monotonic() - started


async def _best(engine: Engine, tokens: int) -> float:
    return min([await _prefilled(engine, tokens) for _ in range(TRIES)])


async def _decode(engine: Engine, beside: Callable[[], Awaitable[object]] | None) -> list[float]:
    """Seconds between the tokens of an answer; from its third on, something else is done `beside`."""
    request = Request(
        _prompt(64), {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}, cache_salt=new_request_id()
    )
    times: list[float] = []
    riding: asyncio.Future[object] | None = None
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            times += [time.monotonic()] * bool(delta.token_ids)
            if beside and riding is None and len(times) == TRIES:
                riding = asyncio.ensure_future(beside())
    if riding is not None:
        await riding
    return [after - before for before, after in pairwise(times)]


async def takes_appends(engine: Engine) -> bool:
    """Whether the engine lets prompts grow by deltas; it tried at its start whether they turn out right."""
    appends = engine.open_appends()
    if appends is not None:
        await appends.close()
    return appends is not None
