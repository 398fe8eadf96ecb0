"""What an append costs at different lengths of the prompt: as a delta, and as a growing prefix.

    python -m langgraph_pingpong.bench.appends --output docs/results/appends-cpu --lengths 512,1024,2048,4096,7168

A prompt is prefilled up to each length. Then it grows by one cache block at a time, once through an open prompt (only
the block is sent) and once by requests with the whole prefix, alternating. Times are those that the caller waits for
one append; the tokens that an append computes are the same in all cells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from statistics import median
from typing import Annotated, Any

import typer

from langgraph_pingpong.bench.common import EngineArgs, ModelName, Output, circumstances, table, told, write_lines
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.config import default_devices
from langgraph_pingpong.engines.base import Engine, Request

WAYS = ("delta", "growing prefix")
_salts = count()


def main(  # noqa: PLR0913 - a parameter an option
    output: Output,
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "512,1024,2048,4096,7168",
    appends: Annotated[int, typer.Option(min=2, help="of each kind at each length")] = 30,
    device: Annotated[str, typer.Option(help="empty: the machine's first")] = "",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    model: ModelName = "",
    engine_args: EngineArgs = "{}",
) -> None:
    """Time appends at different lengths of the prompt."""
    place = device or default_devices()[0]
    named = {"model": model or "SmolLM2-135M-Instruct", "dtype": dtype, "engine_args": engine_args}
    lines: list[dict[str, Any]] = [{"setup": circumstances("appends", [place], **named)}]
    settings = {"model": model or None, "devices": [place], "dtype": dtype, "engine_args": json.loads(engine_args)}
    with ChatPingPong(**settings) as chat_model:
        pool = chat_model._serving().pool
        engine = pool.engines[0]
        lines[0]["setup"]["deltas"] = pool.loop.run(_has_deltas(engine))
        for length in map(int, lengths.split(",")):
            for way in WAYS:
                times = pool.loop.run(_times(engine, way, length, appends))
                lines.append({"length": length, "way": way, "ms": times})
                write_lines(output.with_suffix(".jsonl"), lines)
    output.with_suffix(".md").write_text(summary(lines), encoding="utf-8")


async def _has_deltas(engine: Engine) -> bool:
    appends = engine.open_appends()
    if appends is not None:
        await appends.close()
    return appends is not None


async def _times(engine: Engine, way: str, length: int, appends: int) -> list[float]:
    """Milliseconds of each append, after one that is not counted."""
    block, salt = engine.block_size, f"{way} {next(_salts)}"
    ids = [7 * i % 997 + 3 for i in range((length // block + appends + 1) * block)]
    start = length // block * block

    async def prefix(tokens: int) -> None:
        await engine.prefill(Request(tuple(ids[:tokens]), cache_salt=salt))

    if way == "growing prefix":
        return await _timed(prefix, range(start, len(ids), block))
    grown = engine.open_appends(salt)
    if grown is None:
        return []

    async def delta(tokens: int) -> None:
        assert await grown.append(ids[grown.tokens : tokens]) is not None

    try:
        return await _timed(delta, range(start, len(ids), block))
    finally:
        await grown.close()


async def _timed(append: Callable[[int], Awaitable[None]], ends: Sequence[int]) -> list[float]:
    await append(ends[0])
    times = []
    for end in ends[1:]:
        started = time.monotonic()
        await append(end)
        times.append((time.monotonic() - started) * 1000)
    return times


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, cells = lines[0]["setup"], [line for line in lines[1:] if line["ms"]]
    rows = [
        [
            cell["way"],
            str(cell["length"]),
            f"{median(cell['ms']):.1f}",
            f"{min(cell['ms']):.1f}",
            f"{max(cell['ms']):.1f}",
        ]
        for way in WAYS
        for cell in cells
        if cell["way"] == way
    ]
    parts = [
        "# What an append of one cache block costs",
        told(setup),
        table(["append as", "tokens before", "median ms", "min", "max"], rows),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    typer.run(main)
