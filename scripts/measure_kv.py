"""Measures KV that moves between two GPUs, with one start of the engines: single reads, then agents with tools.

    python scripts/measure_kv.py OUT [--shape FOLDER] [--share SHARE]

OUT gets `kv-pull-14b`, and `tool-agents-14b.jsonl` one more mode beside those that `measure_shape.py` wrote. SHARE is
the part of a GPU's memory that an engine had there, so that all modes have caches of the same size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from langgraph_pingpong.bench.common import circumstances
from langgraph_pingpong.bench.engine_sets import EngineSets, EngineSettings
from langgraph_pingpong.bench.kit import Job, Kit, command
from langgraph_pingpong.bench.kv_pull import measure
from langgraph_pingpong.bench.modes import parse_modes
from langgraph_pingpong.bench.profiles import PROFILES
from langgraph_pingpong.bench.runner import Plan

ROUNDS = 4


def main(  # noqa: PLR0913 - a parameter an option
    out: Path,
    shape: Annotated[Path, typer.Option(help="Written by scripts/model_shape.py.")] = Path("/tmp/qwen3-14b-shape"),
    devices: str = "cuda:0,cuda:1",
    share: Annotated[float, typer.Option(help="Of a GPU's memory.")] = 0.613,
    lengths: Annotated[str, typer.Option(help="Of prompts, in tokens.")] = "1024,2048,4096,8192,12288",
    scale: str = "gpu",
) -> None:
    """Time reads of KV, then run the conversations."""
    args = {"load_format": "dummy"}
    settings = EngineSettings(devices.split(","), str(shape), "bfloat16", 16384, share, engine_args=args)
    profile, (mode,) = PROFILES["tool-agents"], parse_modes("pingpong-kv")

    def reads(sets: EngineSets) -> None:
        named = {"model": str(shape), "dtype": settings.dtype, "engine_args": settings.engine_args}
        setup = circumstances("kv_pull", settings.devices, **named, command=command())
        measure(sets.of(mode).pool, setup, list(map(int, lengths.split(","))), ROUNDS, out / "kv-pull-14b")

    kit = Kit(settings, Console(soft_wrap=True), {"temperature": 0.0, "seed": 42})
    plan = Plan(profile, list(profile.cases(scale, {})), [mode], runs=1, warmup_runs=0)
    kit.run([Job(plan, out / "tool-agents-14b.jsonl")], first=reads)


if __name__ == "__main__":
    typer.run(main)
