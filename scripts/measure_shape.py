"""Measures a large model's shape on one or two GPUs in every mode, with one start of the engines for all files.

    python scripts/measure_shape.py OUT [--shape FOLDER] [--devices cuda:0] [--stop-after SECONDS] [--only FILE,...]

OUT gets a file of lines for each job, in the order of `JOBS`, or `ONE_DEVICE` where one is named. With
`CUDA_VISIBLE_DEVICES=0,0` both engines are on one GPU, and the jobs are those of `ONE_GPU_TWICE`. What is in a file
already is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from langgraph_pingpong.bench.common import share_one_gpu
from langgraph_pingpong.bench.engine_sets import EngineSettings
from langgraph_pingpong.bench.kit import Job, Kit
from langgraph_pingpong.bench.modes import parse_modes
from langgraph_pingpong.bench.profiles import PROFILES
from langgraph_pingpong.bench.runner import Plan


@dataclass(frozen=True)
class Measured:
    """A file, and what it holds."""

    file: str
    profile: str
    modes: str
    runs: int
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)
    chains: Sequence[int] = (1,)
    warmup_runs: int = 0


EVERY = "serial,serial-prewarm,pingpong,overlap-1,tp2-serial,tp2-overlap"

JOBS = (
    Measured("long-prefill-14b", "long-prefill", EVERY, 5, {"static": (4096,)}, warmup_runs=1),
    Measured("tool-agents-14b", "tool-agents", "dp2-serial,pingpong-many,dp2-cold", 1),
    Measured(
        "sweep-14b", "sweep", "serial,pingpong", 2, {"upstream": (128, 512), "static": (512, 8192), "downstream": (64,)}
    ),
    Measured("rag-14b", "rag", "serial,dp2-serial,pingpong", 2),
    Measured("debate-14b", "debate", "serial,dp2-serial,pingpong", 2),
    Measured("many-14b", "long-prefill", "dp2-serial,pingpong-many", 1, {"static": (4096,)}, (2, 4, 8, 16)),
    Measured("multiturn-14b", "multiturn", "dp2-serial,pingpong", 1),
    Measured("messages-14b", "messages", "serial,dp2-serial,pingpong", 2),
)
"""The first warms the engines up for all. The pair is up for `serial`, too: it stands in for the one engine."""

ONE_DEVICE = (
    Measured("long-prefill-14b", "long-prefill", "serial,serial-prewarm,overlap-1", 5, {"static": (4096,)}, (1,), 1),
    Measured("messages-14b", "messages", "serial,overlap-1", 2),
    Measured(
        "sweep-14b",
        "sweep",
        "serial,overlap-1",
        2,
        {"upstream": (128, 512), "static": (512, 8192), "downstream": (64,)},
    ),
    Measured("rag-14b", "rag", "serial,overlap-1", 2),
    Measured("debate-14b", "debate", "serial,overlap-1", 2),
    Measured("multiturn-14b", "multiturn", "serial,overlap-1", 1),
)
"""What can be measured with one."""

ONE_GPU_TWICE = (
    Measured("tool-agents-14b", "tool-agents", "dp2-serial,pingpong-many", 3, {"conversations": (50,)}),
    Measured("tool-agents-cold-14b", "tool-agents", "dp2-cold", 1, {"conversations": (50,)}),
)
"""Two engines on one GPU, each of which has less memory, and so room for fewer conversations."""

SHARE_OF_ONE = 0.45
"""Of a GPU's memory, for each of the two engines on it."""


def main(
    out: Path,
    shape: Annotated[Path, typer.Option(help="Written by scripts/model_shape.py.")] = Path("/tmp/qwen3-14b-shape"),
    devices: str = "cuda:0,cuda:1",
    stop_after: Annotated[float | None, typer.Option(metavar="SECONDS")] = None,
    only: Annotated[str, typer.Option(help="Files, comma-separated; without it all.")] = "",
) -> None:
    """Run the jobs that are left."""
    places = devices.split(",")
    twice = share_one_gpu(places)
    share = SHARE_OF_ONE if twice else None
    settings = EngineSettings(places, str(shape), "bfloat16", 16384, share, engine_args={"load_format": "dummy"})
    jobs = ONE_GPU_TWICE if twice else JOBS if len(places) > 1 else ONE_DEVICE
    wanted = [job for job in jobs if not only or job.file in only.split(",")]
    kit = Kit(settings, Console(soft_wrap=True), {"temperature": 0.0, "seed": 42}, stop_after)
    left = kit.run([Job(_plan(job), out / f"{job.file}.jsonl") for job in wanted])
    kit.console.print(f"{left} runs are left." if left else "All runs are there.")


def _plan(job: Measured) -> Plan:
    profile = PROFILES[job.profile]
    return Plan(
        profile, list(profile.cases("gpu", job.values)), parse_modes(job.modes), job.chains, job.runs, job.warmup_runs
    )


if __name__ == "__main__":
    typer.run(main)
