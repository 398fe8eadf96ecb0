"""Runs the demo graph with edges off and on, alternating, and writes down every run.

    python -m langgraph_pingpong.bench.demo --runs 5 --output docs/results/demo-cpu

writes OUTPUT.jsonl, a line a run with every agent's certificate, and OUTPUT.md, a summary made from it. Each run starts
cold: the prefix caches are emptied before it. Time to first token counts from the moment the upstream finished; end to
end is the whole graph. No run is left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from statistics import mean
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


def main(  # noqa: PLR0913 - a parameter an option
    output: Output,
    runs: Annotated[int, typer.Option(min=1, help="compared runs: one with edges off and one with edges on")] = 5,
    devices: Annotated[str, typer.Option(help="comma-separated; empty: what the machine has")] = "",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    seed: Annotated[int, typer.Option()] = 42,
    max_tokens: Annotated[int, typer.Option(min=4, help="of the first four agents; the last gets a quarter")] = 256,
    brief_tokens: Annotated[int, typer.Option(help="of each agent's brief")] = 768,
    model: ModelName = "",
    engine_args: EngineArgs = "{}",
) -> None:
    """Run the demo graph with edges off and on, alternating, and write down every run."""
    names = devices.split(",") if devices else list(default_devices())
    settings = {"dtype": dtype, "seed": seed, "model": model or "SmolLM2-135M-Instruct", "engine_args": engine_args}
    setup = circumstances("demo", names, **settings)
    output.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"setup": setup}]
    engines = {"devices": names, "dtype": dtype, "model": model or None, "engine_args": json.loads(engine_args)}
    with ChatPingPong(**engines, temperature=0.0, seed=seed) as chat_model:
        order = [(number, mode) for number in range(runs) for mode in alternate(number)]
        for number, mode in track(order, description="runs"):
            lines.append({"run": number, "overlap": mode, **_run(chat_model, mode, max_tokens, brief_tokens)})
            write_lines(output.with_suffix(".jsonl"), lines)
    output.with_suffix(".md").write_text(summary(lines), encoding="utf-8")


def _run(model: ChatPingPong, mode: str, max_tokens: int, brief_tokens: int) -> dict[str, Any]:
    from graphs.briefs import read_text
    from graphs.five_agents import build

    switched = model.model_copy(update={"overlap": mode})
    graph = build(switched, brief_tokens=brief_tokens, max_tokens=max_tokens, last_max_tokens=max_tokens // 4)
    model.reset_prefix_cache()
    agents: list[dict[str, Any]] = []
    with model.trace.subscribed(lambda e: agents.append(e.data["certificate"]) if e.name == "finish" else None):
        started = time.monotonic()
        state = graph.invoke({"task": "Explain this document to a new reader.", "document": read_text("document.md")})
        e2e_ms = (time.monotonic() - started) * 1000
    return {"e2e_ms": e2e_ms, "agents": agents, "state": dict(state)}


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, by_mode = lines[0]["setup"], _by_mode(lines)
    parts = [
        "# The demo graph, edges off and on",
        told(setup),
        "## End to end, ms",
        table(
            ["edges", "min", "mean", "max", "every run"], [_row(m, [r["e2e_ms"] for r in by_mode[m]]) for m in MODES]
        ),
        "## Time to first token from the upstream's end, ms",
        table(["agent", "edges", "min", "mean", "max", "every run"], list(_ttft_rows(by_mode))),
        "## What was checked",
        _checks(by_mode),
    ]
    return "\n\n".join(parts) + "\n"


HEAD = (
    "",
    "end to end, off",
    "on",
    "first token of downstreams, off",
    "on",
    "prompt ids equal",
    "texts equal",
)


def row(lines: Sequence[dict[str, Any]], link: str) -> list[str]:
    """The means of all compared runs in one row, ms: under `HEAD`; `link` leads to the summary."""
    setup, by_mode = lines[0]["setup"], _by_mode(lines)
    every = [agent for runs in by_mode.values() for run in runs for agent in run["agents"]]
    first, *_, last = (agent["output_tokens"] for agent in by_mode["off"][0]["agents"])
    label = f"{setup['model']} on {', '.join(setup['devices'])}, answers of {first} tokens, the last of {last}"
    waits = {mode: mean(a["ttft_ms"] for run in by_mode[mode] for a in run["agents"][1:]) for mode in MODES}
    return [
        f"[{label}]({link})",
        *(f"{mean(run['e2e_ms'] for run in by_mode[mode]):.0f}" for mode in MODES),
        *(f"{waits[mode]:.0f}" for mode in MODES),
        f"{sum(agent['ids_equal'] for agent in every)} of {len(every)}",
        f"{_equal_texts(by_mode)} of {len(by_mode['off'])}",
    ]


def _by_mode(lines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {mode: [line for line in lines[1:] if line["overlap"] == mode] for mode in MODES}


def _equal_texts(by_mode: dict[str, list[dict[str, Any]]]) -> int:
    return sum(off["state"] == on["state"] for off, on in zip(by_mode["off"], by_mode["on"], strict=True))


def _ttft_rows(by_mode: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    nodes = [agent["node"] for agent in by_mode["off"][0]["agents"]]
    return [
        [node, *_row(mode, [run["agents"][index]["ttft_ms"] for run in by_mode[mode]])]
        for index, node in enumerate(nodes)
        for mode in MODES
    ]


def _row(label: str, values: Sequence[float]) -> list[str]:
    figures = [f"{value:.0f}" for value in (min(values), mean(values), max(values))]
    return [label, *figures, " ".join(f"{value:.0f}" for value in values)]


def _checks(by_mode: dict[str, list[dict[str, Any]]]) -> str:
    every = [agent for mode in MODES for run in by_mode[mode] for agent in run["agents"]]
    pairs = list(zip(by_mode["off"], by_mode["on"], strict=True))
    saved = mean(off["e2e_ms"] for off, _ in pairs) - mean(on["e2e_ms"] for _, on in pairs)
    share = saved / mean(off["e2e_ms"] for off, _ in pairs)
    downstream = [agent for _, on in pairs for agent in on["agents"][1:]]
    prefilled = sum(agent["static"] + agent["streamed"] for agent in downstream)
    share_of_prompts = prefilled / sum(agent["prompt_tokens"] for agent in downstream)
    equal_ids = sum(agent["ids_equal"] for agent in every)
    return "\n".join(
        [
            f"- Saved end to end, mean of all runs: {saved:.0f} ms, {share:.1%}.",
            f"- Prompt ids as in the full rendering: {equal_ids} of {len(every)} calls.",
            f"- Runs whose texts are equal with edges off and on: {_equal_texts(by_mode)} of {len(pairs)}.",
            f"- Of the downstream prompts, {share_of_prompts:.1%} was prefilled before its turn and "
            f"{sum(agent['wasted'] for agent in downstream)} tokens were wasted.",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
