"""What it takes to read a prompt's KV from another engine, beside computing it, by the prompt's length.

    python -m langgraph_pingpong.bench.kv_pull --output docs/results/kv-pull-cpu

A prompt that nobody has seen is computed on one engine; then the other one reads it. Both are timed as the caller waits
for them; reading in its two steps: the source keeps the KV (and computes the last block once more), the target reads.
Directions alternate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from langgraph_pingpong.bench.common import EngineArgs, ModelName, Output, circumstances, table, told, write_lines
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.config import default_devices
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.kv_planner import Line
from langgraph_pingpong.pool import EnginePool


def main(  # noqa: PLR0913 - a parameter an option
    output: Output,
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "128,256,512,1024,2048,3008",
    rounds: Annotated[int, typer.Option(min=2, help="of each length, half of them in each direction")] = 4,
    devices: Annotated[str, typer.Option(help="two, comma-separated; empty: the machine's first")] = "",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    model: ModelName = "",
    engine_args: EngineArgs = "{}",
) -> None:
    """Time reads of KV at different lengths of the prompt."""
    places = devices.split(",") if devices else list(default_devices())
    named = {"model": model or "SmolLM2-135M-Instruct", "dtype": dtype, "engine_args": engine_args}
    setup = circumstances("kv_pull", places, **named)
    settings = {"model": model or None, "devices": places, "dtype": dtype, "engine_args": json.loads(engine_args)}
    with ChatPingPong(**settings, kv_transfer=True) as chat_model:
        measure(chat_model._serving().pool, setup, list(map(int, lengths.split(","))), rounds, output)


def measure(pool: EnginePool, setup: Mapping[str, Any], lengths: Sequence[int], rounds: int, output: Path) -> None:
    """Time reads between the engines of a pool that were built for it, and write OUTPUT.jsonl and OUTPUT.md."""
    lines: list[dict[str, Any]] = [{"setup": setup}]
    pool.start()
    for number in range(rounds):
        for length in lengths:
            lines.append({"length": length, "round": number, **pool.loop.run(_times(pool, length, number))})
            write_lines(output.with_suffix(".jsonl"), lines)
    output.with_suffix(".md").write_text(summary(lines), encoding="utf-8")


async def _times(pool: EnginePool, length: int, number: int) -> dict[str, Any]:
    """Milliseconds of one prompt, computed and read."""
    source, target = (0, 1) if number % 2 == 0 else (1, 0)
    block = pool.engines[0].block_size
    ids = tuple(7 * i % 997 + 3 for i in range(length // block * block))
    request = Request(ids, cache_salt=f"{length} {number}")
    began = time.monotonic()
    await pool.engines[source].prefill(request)
    computed = time.monotonic()
    handle = await pool.kv.lend(source, request)
    kept = time.monotonic()
    await pool.kv.read(target, request, handle)
    read = time.monotonic()
    times = {"prefill_ms": computed - began, "keep_ms": kept - computed, "read_ms": read - kept}
    return {name: value * 1000 for name, value in times.items()}


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, cells = lines[0]["setup"], lines[1:]
    rows = []
    for length in sorted({cell["length"] for cell in cells}):
        of_length = [cell for cell in cells if cell["length"] == length]
        prefill, keep, read = (
            median(cell[name] for cell in of_length) for name in ("prefill_ms", "keep_ms", "read_ms")
        )
        pull = median(cell["keep_ms"] + cell["read_ms"] for cell in of_length)
        rows.append([str(length), *(f"{ms:.0f}" for ms in (prefill, pull, keep, read)), f"{prefill / pull:.1f}"])
    heads = ["tokens", "computed, ms", "from the other engine, ms", "of it kept", "of it read", "times as fast"]
    parts = ["# KV from another engine, beside computing it", told(setup), table(heads, rows), _break_even(cells)]
    return "\n\n".join(parts) + "\n"


def _break_even(cells: Sequence[dict[str, Any]]) -> str:
    """From which length on the planner's own model takes the other engine's KV."""
    prefill, pull = Line(), Line()
    for cell in cells[-32:]:
        prefill.observe(cell["length"], cell["prefill_ms"])
        pull.observe(cell["length"], cell["keep_ms"] + cell["read_ms"])
    for tokens in range(32, 8193, 32):
        if (pull.seconds(tokens) or 0) < (prefill.seconds(tokens) or 0):
            return f"Medians. By the planner's lines through these times, reading takes less from {tokens} tokens on."
    return "Medians. By the planner's lines through these times, reading does not take less up to 8,192 tokens."


if __name__ == "__main__":
    typer.run(main)
