"""Shows on a GPU whether KV that had to leave it comes back from main memory: vLLM's offloading connector.

    python scripts/check_offloading.py OUT [--device cuda:0]

An engine with a small KV cache answers a prompt, is flooded with others until that prompt is evicted, and answers it
again, ROUNDS times; all of that without the second tier and with it. OUT.jsonl gets a line for each, with the tokens
that were found and the time to the first token of the last round; OUT.md is the table. Exit status 1 if nothing came
back, or an engine's answers differ.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from langgraph_pingpong.bench.common import circumstances, table, told, write_lines
from langgraph_pingpong.bench.kit import command
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.serving import engine_pool

CACHE_BYTES = 128 << 20
"""Of KV cache on the GPU: some 5,800 tokens of the default model."""

TIER_GIB = 4.0
PROMPT, FLOOD, ROUNDS = 2048, 6, 3
ANSWER = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}


def main(out: Path, device: Annotated[str, typer.Option()] = "cuda:0") -> None:
    """Answer, flood, answer again."""
    args = {"kv_cache_memory_bytes": CACHE_BYTES, "gpu_memory_utilization": 0.1}
    named = {"model": "SmolLM2-135M-Instruct", "dtype": "bfloat16", "engine_args": args}
    lines: list[dict[str, Any]] = [{"setup": circumstances("offloading", [device], **named, command=command())}]
    for tier in (None, TIER_GIB):
        with engine_pool(
            devices=[device], dtype="bfloat16", kv_offloading_size=tier, max_model_len=4096, engine_args=args
        ) as pool:
            lines.append({"tier_gib": tier or 0, **pool.loop.run(_asked_twice(pool))})
        write_lines(out.with_suffix(".jsonl"), lines)
    rows = [
        [f"{line['tier_gib']:.0f}", f"{line['found']:,}", f"{line['cold_ms']:.1f}", f"{line['again_ms']:.1f}"]
        for line in lines[1:]
    ]
    heads = ["second tier, GiB", f"found again of {PROMPT:,} tokens", "first token at first, ms", "after the flood, ms"]
    title = "# KV that comes back from main memory"
    out.with_suffix(".md").write_text("\n\n".join([title, told(lines[0]["setup"]), table(heads, rows)]) + "\n")
    without, with_tier = lines[1:]
    if with_tier["found"] <= without["found"] or any(len(set(map(tuple, line["said"]))) > 1 for line in lines[1:]):
        raise typer.Exit(1)


async def _asked_twice(pool: EnginePool) -> dict[str, Any]:
    """Milliseconds to a prompt's first token before and after the flood, what was found of it, and both answers."""
    await _answer(pool, 99)  # the first time of a shape is not counted
    answers = [await _answer(pool, 0)]
    for _ in range(ROUNDS):  # the first of them compiles what moves the blocks
        for number in range(1, FLOOD + 1):
            await _answer(pool, number)
        answers.append(await _answer(pool, 0))
    return {
        "cold_ms": answers[0]["first_ms"],
        "again_ms": answers[-1]["first_ms"],
        "found": answers[-1]["cached"],
        "said": [answer["said"] for answer in answers],
    }


async def _answer(pool: EnginePool, number: int) -> dict[str, Any]:
    ids = tuple((7 + number) * place % 997 + 3 for place in range(PROMPT))
    began = time.monotonic()
    first_ms: float | None = None
    cached, said = 0, list[int]()
    async for delta in pool.engines[0].generate(Request(ids, ANSWER)):
        if first_ms is None and delta.token_ids:
            first_ms = (time.monotonic() - began) * 1000
        cached = max(cached, delta.num_cached_tokens or 0)
        said += delta.token_ids
    return {"first_ms": first_ms, "cached": cached, "said": said}


if __name__ == "__main__":
    typer.run(main)
