"""The benchmark as a whole: settings, the file, engines, the runs that are left, and how long those will take."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from langgraph_pingpong.bench.common import circumstances
from langgraph_pingpong.bench.engine_sets import EngineSets, EngineSettings
from langgraph_pingpong.bench.lines import ResultsFile
from langgraph_pingpong.bench.machine import commit, drivers, source_digest
from langgraph_pingpong.bench.profiles import Params
from langgraph_pingpong.bench.runner import Plan, Runner, Step
from langgraph_pingpong.signals import ended_by_signals


def command() -> str:
    """The command that was typed, as it can be typed again."""
    name = Path(sys.argv[0])
    program = "pingpong" if name.stem in ("pingpong", "__main__") else name.name
    return shlex.join([program, *sys.argv[1:]])


def setup_of(plan: Plan, settings: EngineSettings) -> dict[str, Any]:
    """What stands beside every figure of the file."""
    told = circumstances(
        "kit",
        settings.devices,
        profile=plan.profile.name,
        about=plan.profile.about,
        seed=plan.seed,
        model=settings.model or "SmolLM2-135M-Instruct",
        dtype=settings.dtype or "the model's",
        max_model_len=settings.max_model_len,
        engine_args=settings.engine_args,
        exact=settings.exact,
    )
    return {
        **told,
        "command": command(),
        "commit": commit(),
        "source": source_digest(),
        "driver": drivers(settings.devices),
        "switches": {
            "force_max_output_tokens": plan.force_tokens,
            "strict_output_tokens": plan.strict_tokens,
            "defer_downstream_until_first_token": plan.defer,
            "lazy_precreate": plan.lazy,
        },
    }


@dataclass
class Clock:
    """How long runs of each kind took, and from that how long the rest will take, in seconds."""

    took: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)

    def note(self, step: Step, seconds: float) -> None:
        """A step is done."""
        self.took.setdefault(self._kind(step), []).append(seconds)

    def expected(self, step: Step) -> float:
        """How long a step takes: as those of its kind did, else as all did."""
        times = self.took.get(self._kind(step)) or [each for kind in self.took.values() for each in kind]
        return median(times) if times else 0.0

    def _kind(self, step: Step) -> tuple[Any, ...]:
        return (step.mode.name, step.chains, tuple(step.case.items()))


@dataclass
class Kit:
    """Runs a plan into a file."""

    plan: Plan
    settings: EngineSettings
    console: Console
    calls: dict[str, Any]
    title: str = ""
    """What reports call the file."""
    stop_after_s: float | None = None
    """After how many seconds no further run is begun that would end later."""
    began: float = field(default_factory=time.monotonic)

    def run(self, path: Path) -> int:
        """Do the runs that are not in the file yet; returns how many are left.

        Raises:
            ConfigError: the settings cannot work, or the file belongs to others.
            RunFailed: a run is not complete.
        """
        file = ResultsFile(path, {**setup_of(self.plan, self.settings), "title": self.title})
        steps = list(self.plan.steps(file.done))
        if not steps:
            self.console.print(f"{path} holds all of these runs.", soft_wrap=True)
            return 0
        needed = [mode for mode in self.plan.modes if any(step.mode is mode for step in steps)]
        with ended_by_signals(lambda number: 128 + number), EngineSets(self.settings, needed, self.calls) as sets:
            session = self._start(sets, file)
            return self._run(Runner(self.plan, sets, file, self.settings.devices), steps, session)

    def _start(self, sets: EngineSets, file: ResultsFile) -> int:
        started = time.monotonic()
        sets.start(lambda text: self.console.print(f"{text} ...", highlight=False, soft_wrap=True))
        took = time.monotonic() - started
        self.console.print(f"Ready after {took:.0f} s.", highlight=False)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return file.begin({"command": command(), "at": at, "start_s": round(took, 1), "sets": sets.told()})

    def _run(self, runner: Runner, steps: Sequence[Step], session: int) -> int:
        clock = Clock()
        with _progress(self.console) as progress:
            task = progress.add_task("", total=len(steps), left="")
            for number, step in enumerate(steps):
                if self._is_late(clock.expected(step)):
                    return len(steps) - number
                started = time.monotonic()
                line = runner.run(step, session)
                clock.note(step, time.monotonic() - started)
                named = _named(step, self.plan.cases)
                left = sum(map(clock.expected, steps[number + 1 :]))
                progress.update(task, advance=1, description=named, left=f"{_minutes(left)} left")
                if not self.console.is_terminal:
                    said = f"{number + 1}/{len(steps)} {named}: {line['e2e_ms']:,.0f} ms, {_minutes(left)} left"
                    self.console.print(said, highlight=False, soft_wrap=True)
        return 0

    def _is_late(self, expected_s: float) -> bool:
        return self.stop_after_s is not None and time.monotonic() - self.began + expected_s > self.stop_after_s


def _progress(console: Console) -> Progress:
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description} {task.fields[left]}")
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _named(step: Step, cases: Sequence[Params]) -> str:
    """Mode and number, and the parameters that are not the same in all cases."""
    apart = [name for name in step.case if len({case[name] for case in cases}) > 1]
    case = "".join(f" {name}={step.case[name]}" for name in apart)
    many = f" x{step.chains}" if step.chains > 1 else ""
    return f"{step.mode.name}{many}{case} {'warm-up' if step.warmup else 'run'} {step.run}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
