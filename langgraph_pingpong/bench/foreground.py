"""What edges cost other requests: first tokens and gaps of foreground requests beside many chains, edges off and on.

    python -m langgraph_pingpong.bench.foreground --output docs/results/foreground-cpu --kv-blocks 400

Chains of the demo graph run at once on the engines. Beside them requests that belong to no graph come at random
moments, seeded. Their time to first token and the gaps between their tokens are kept, each one. `--kv-blocks` makes
the KV cache so small that the chains alone fill it. Rounds alternate between edges off and on; caches are emptied
before each.

Whether a difference is more than chance is told by a bootstrap over pairs of rounds: 95 of 100 collections of as many
pairs, drawn with replacement, have a ratio within the interval (Efron & Tibshirani, An Introduction to the Bootstrap,
ch. 13, the percentile interval).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, quantiles
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
from langgraph_pingpong.trace import Event

PERCENTS = (50, 95, 99)

Rounds = Sequence[dict[str, Any]]
Figure = Callable[[Rounds], float]

DRAWS = 1000
"""Collections of rounds that an interval is told from."""

COUNTED = ("prompt_tokens", "static", "streamed", "wasted", "lost")
"""Of the certificates of a round, the tokens that are summed up."""

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
    events: list[Event] = []
    with model.trace.subscribed(events.append):
        while not work.done():
            asked.append(asyncio.create_task(_ask(model, QUESTION.format(len(asked)))))
            await asyncio.sleep(moments.expovariate(1 / every_s))
        chains_ms = (time.monotonic() - started) * 1000
        times = [await each for each in asked]
        await work
    certificates = [event.data["certificate"] for event in events if event.name == "finish"]
    tokens = {name: sum(each[name] for each in certificates) for name in COUNTED}
    return {"chains_ms": chains_ms, "requests": times, "tokens": tokens}


async def _ask(model: ChatPingPong, question: str) -> list[float]:
    """Milliseconds from the question to each chunk of its answer."""
    started = time.monotonic()
    return [(time.monotonic() - started) * 1000 async for chunk in model.astream(question, max_tokens=16) if chunk.text]


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, rounds = lines[0]["setup"], lines[1:]
    of = {mode: [each for each in rounds if each["overlap"] == mode] for mode in MODES}
    rows = [
        [mode, str(len(_firsts(of[mode]))), *_spread(_firsts(of[mode])), *_spread(_gaps(of[mode])), *_row(of[mode])]
        for mode in MODES
    ]
    pairs = list(zip(*of.values(), strict=True))
    figures: dict[str, Figure] = {
        f"{what}, p{percent}": partial(_percentile, times, percent)
        for what, times in (("first token", _firsts), ("gap", _gaps))
        for percent in PERCENTS
    }
    ratios = [[name, *_ratio(pairs, figure)] for name, figure in {**figures, "all chains, mean": _chains}.items()]
    tokens = [[mode, *(f"{sum(each['tokens'][name] for each in of[mode]):,}" for name in COUNTED)] for mode in MODES]
    kv_cache = f"{setup['kv_blocks']} blocks" if setup["kv_blocks"] else "what memory allows"
    load = (
        f"{setup['chains']} chains at once, a foreground request every {setup['every_s']} s on average, briefs of "
        f"{setup['brief_tokens']} tokens, KV cache of {kv_cache} an engine; {len(pairs)} pairs of rounds."
    )
    head = ["edges", "requests", *(f"{what} p{p}" for what in ("first token", "gap") for p in PERCENTS)]
    parts = [
        "# Foreground requests beside chains, edges off and on",
        told(setup),
        load,
        table([*head, "all chains, mean", "min", "max"], rows),
        "Milliseconds. A gap is the time between two chunks of one answer. On against off, with intervals of 95 %:",
        table(["figure", "on / off", "from", "to"], ratios),
        "Tokens of the prompts: what edges prefilled, in vain or not, and what was computed again after an eviction.",
        table(["edges", *(name.replace("_tokens", "s") for name in COUNTED)], tokens),
    ]
    return "\n\n".join(parts) + "\n"


def _firsts(rounds: Rounds) -> list[float]:
    """Times to first token, ms."""
    return [times[0] for each in rounds for times in each["requests"] if times]


def _gaps(rounds: Rounds) -> list[float]:
    """Times between chunks, ms."""
    answers = (times for each in rounds for times in each["requests"])
    return [after - before for times in answers for before, after in pairwise(times)]


def _chains(rounds: Rounds) -> float:
    return fmean(each["chains_ms"] for each in rounds)


def _percentile(values: Callable[[Rounds], list[float]], percent: int, rounds: Rounds) -> float:
    return _percentiles(values(rounds))[PERCENTS.index(percent)]


def _percentiles(values: Sequence[float]) -> list[float]:
    """Those of PERCENTS; not a number where there are too few values."""
    if len(values) < 2:
        return [math.nan for _ in PERCENTS]
    hundredths = quantiles(values, n=100, method="inclusive")
    return [hundredths[percent - 1] for percent in PERCENTS]


def _ratio(pairs: Sequence[tuple[Any, Any]], figure: Figure) -> list[str]:
    """A figure with edges on against off, and the interval."""

    def ratio(drawn: Sequence[tuple[Any, Any]]) -> float:
        off, on = zip(*drawn, strict=True)
        return figure(on) / figure(off)

    chance = random.Random(0)
    draws = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return [f"{each:.2f}" for each in (ratio(pairs), draws[DRAWS // 40], draws[-DRAWS // 40])]


def _spread(values: Sequence[float]) -> list[str]:
    """Median, 95th and 99th percentile."""
    return [f"{each:.0f}" for each in _percentiles(values)]


def _row(rounds: Rounds) -> list[str]:
    """Mean, least and most of all chains of a round."""
    values = [each["chains_ms"] for each in rounds]
    return [f"{value:.0f}" for value in (fmean(values), min(values), max(values))]


if __name__ == "__main__":
    typer.run(main)
