"""What edges cost other requests: first tokens and gaps of foreground requests beside many chains, edges off and on.

    python -m langgraph_pingpong.bench.foreground --output docs/results/foreground-cpu --kv-blocks 400

Chains of the demo graph run at once on the engines. Beside them requests that belong to no graph come at random
moments, seeded. Their time to first token and the gaps between their tokens are kept, each one. `--kv-blocks` makes
the KV cache so small that the chains alone fill it. Rounds alternate between edges off and on; caches are emptied
before each.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Annotated, Any

import typer
from rich.progress import track

from langgraph_pingpong.bench.common import (
    MODES,
    EngineArgs,
    ModelName,
    Output,
    alternate,
    circumstances,
    table,
    told,
    write_lines,
)
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.config import default_devices

QUESTION = "Name three animals of tide pool number {}, and say in a sentence each how they live there."


def main(  # noqa: PLR0913 - a parameter an option
    output: Output,
    rounds: Annotated[int, typer.Option(min=1, help="with edges off and with edges on")] = 5,
    chains: Annotated[int, typer.Option(min=1, help="at once")] = 4,
    every_s: Annotated[float, typer.Option(help="mean time between foreground requests, in seconds")] = 0.7,
    kv_blocks: Annotated[int, typer.Option(help="blocks of the KV cache of each engine; 0: what memory allows")] = 0,
    brief_tokens: Annotated[int, typer.Option(help="of each agent's brief")] = 400,
    max_tokens: Annotated[int, typer.Option(min=4, help="of the first four agents")] = 32,
    devices: Annotated[str, typer.Option(help="comma-separated; empty: what the machine has")] = "",
    model: ModelName = "",
    engine_args: EngineArgs = "{}",
    seed: Annotated[int, typer.Option()] = 42,
) -> None:
    """Measure foreground requests beside chains with edges off and on."""
    names = devices.split(",") if devices else list(default_devices())
    named = {"model": model or "SmolLM2-135M-Instruct", "dtype": "bfloat16", "engine_args": engine_args, "seed": seed}
    load = {"chains": chains, "every_s": every_s, "kv_blocks": kv_blocks, "brief_tokens": brief_tokens}
    lines: list[dict[str, Any]] = [{"setup": {**circumstances("foreground", names, **named), **load}}]
    args = json.loads(engine_args) | ({"num_gpu_blocks_override": kv_blocks} if kv_blocks else {})
    settings = {"model": model or None, "devices": names, "dtype": "bfloat16", "engine_args": args}
    order = [(number, mode) for number in range(rounds) for mode in alternate(number)]
    with ChatPingPong(**settings, temperature=0.0, seed=seed) as chat_model:
        for number, mode in track(order, description="rounds"):
            switched = chat_model.model_copy(update={"overlap": mode})
            switched.reset_prefix_cache()
            figures = asyncio.run(_round(switched, number, chains, every_s, (brief_tokens, max_tokens)))
            lines.append({"round": number, "overlap": mode, **figures})
            write_lines(output.with_suffix(".jsonl"), lines)
    output.with_suffix(".md").write_text(summary(lines), encoding="utf-8")


async def _round(
    model: ChatPingPong, number: int, chains: int, every_s: float, size: tuple[int, int]
) -> dict[str, Any]:
    """One load of chains with requests beside it."""
    from graphs.briefs import read_text
    from graphs.five_agents import build

    graph = build(model, brief_tokens=size[0], max_tokens=size[1], last_max_tokens=size[1] // 4)
    document = read_text("document.md")
    tasks = [f"Explain this document to reader {chain}." for chain in range(chains)]
    started = time.monotonic()
    work = asyncio.gather(*(graph.ainvoke({"task": task, "document": document}) for task in tasks))
    moments = random.Random(number)  # the same moments with edges off and on
    asked: list[asyncio.Task[list[float]]] = []
    while not work.done():
        asked.append(asyncio.create_task(_ask(model, QUESTION.format(len(asked)))))
        await asyncio.sleep(moments.expovariate(1 / every_s))
    chains_ms = (time.monotonic() - started) * 1000
    times = [await each for each in asked]
    await work
    return {"chains_ms": chains_ms, "requests": times}


async def _ask(model: ChatPingPong, question: str) -> list[float]:
    """Milliseconds from the question to each chunk of its answer."""
    started = time.monotonic()
    return [(time.monotonic() - started) * 1000 async for chunk in model.astream(question, max_tokens=16) if chunk.text]


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, rounds = lines[0]["setup"], lines[1:]
    rows = []
    for mode in MODES:
        of_mode = [each for each in rounds if each["overlap"] == mode]
        requests = [times for each in of_mode for times in each["requests"] if times]
        gaps = [after - before for times in requests for before, after in pairwise(times)]
        chains = [each["chains_ms"] for each in of_mode]
        rows.append(
            [mode, str(len(requests)), *_spread([times[0] for times in requests]), *_spread(gaps), *_row(chains)]
        )
    kv_cache = f"{setup['kv_blocks']} blocks" if setup["kv_blocks"] else "what memory allows"
    load = (
        f"{setup['chains']} chains at once, a foreground request every {setup['every_s']} s on average, briefs of "
        f"{setup['brief_tokens']} tokens, KV cache of {kv_cache} an engine."
    )
    head = ["edges", "requests", *(f"{what} {p}" for what in ("first token", "gap") for p in ("p50", "p95", "p99"))]
    parts = [
        "# Foreground requests beside chains, edges off and on",
        told(setup),
        load,
        table([*head, "all chains, mean", "min", "max"], rows),
        "Milliseconds. A gap is the time between two chunks of one answer.",
    ]
    return "\n\n".join(parts) + "\n"


def _spread(values: Sequence[float]) -> list[str]:
    """Median, 95th and 99th percentile."""
    if len(values) < 2:
        return ["", "", ""]
    percentiles = quantiles(values, n=100, method="inclusive")
    return [f"{value:.0f}" for value in (median(values), percentiles[94], percentiles[98])]


def _row(values: Sequence[float]) -> list[str]:
    return [f"{value:.0f}" for value in (sum(values) / len(values), min(values), max(values))]


if __name__ == "__main__":
    typer.run(main)
