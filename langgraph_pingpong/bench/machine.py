"""The machine while it is measured: drivers, clocks, load, and which state of the program's code ran."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import langgraph_pingpong

ROOT = Path(langgraph_pingpong.__file__).parent.parent

_STATE = ("index", "clocks.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


def output_of(*command: str) -> str:
    """What a program prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=ROOT)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """The commit that is checked out, and whether files differ from it; where there is no repository, what is set."""
    number = output_of("git", "rev-parse", "--short=12", "HEAD")
    if not number:
        return os.environ.get("PINGPONG_COMMIT", "")
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "--", "langgraph_pingpong", "graphs")
    return f"{number} with changes" if changed else number


def source_digest() -> str:
    """A fingerprint of the program's code and of the texts it reads, equal for equal files."""
    digest = hashlib.sha256()
    for folder, pattern in (("langgraph_pingpong", "*.py"), ("graphs", "*.md")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def drivers(devices: Sequence[str]) -> str:
    """The version of the GPUs' driver; empty without GPUs."""
    if not devices[0].startswith("cuda"):
        return ""
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def gpu_name(gpu: str) -> str:
    """The name of a GPU, told by its index or UUID; that again where its driver cannot be asked.

    torch would do, but refuses to show one GPU twice.
    """
    return output_of("nvidia-smi", "-i", gpu, "--query-gpu=name", "--format=csv,noheader") or f"GPU {gpu}"


def state(devices: Sequence[str]) -> dict[str, Any]:
    """What may slow a device down at this moment: the load of the machine, and of GPUs clocks and temperature."""
    load = {"load": round(os.getloadavg()[0], 2)}
    if not devices[0].startswith("cuda"):
        return load
    rows = output_of("nvidia-smi", f"--query-gpu={','.join(_STATE)}", "--format=csv,noheader,nounits").splitlines()
    return {**load, "gpus": [dict(zip(_STATE, row.split(", "), strict=False)) for row in rows]}
