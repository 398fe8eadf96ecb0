"""The benchmark as a whole: settings, the file, engines, the runs that are left, and how long those will take."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Job:
    """A plan and the file that its runs go to; `title` is what reports call it."""

    plan: Plan
    path: Path
    title: str = ""


@dataclass
class Kit:
    """Runs plans into files, one after the other, all with one start of the engines."""

    settings: EngineSettings
    console: Console
    calls: dict[str, Any]
    stop_after_s: float | None = None
    """After how many seconds no further run is begun that would end later."""
    began: float = field(default_factory=time.monotonic)

    def run(self, jobs: Sequence[Job], first: Callable[[EngineSets], None] | None = None) -> int:
        """Do the runs that are not in the files yet; returns how many are left.

        `first` is called once the engines are up, before any run.

        Raises:
            ConfigError: the settings cannot work, or a file belongs to others.
            RunFailed: a run is not complete.
        """
        to_do: list[tuple[Job, ResultsFile, list[Step]]] = []
        for job in jobs:
            file = ResultsFile(job.path, {**setup_of(job.plan, self.settings), "title": job.title})
            if steps := list(job.plan.steps(file.done)):
                to_do.append((job, file, steps))
            else:
                self.console.print(f"{job.path} holds all of these runs.", soft_wrap=True)
        needed = {step.mode.name: step.mode for _, _, steps in to_do for step in steps}
        if not needed:
            return 0
        with (
            ended_by_signals(lambda number: 128 + number),
            EngineSets(self.settings, list(needed.values()), self.calls) as sets,
        ):
            start_s = self._start(sets)
            if first is not None:
                first(sets)
            return sum(self._job(sets, *each, start_s) for each in to_do)

    def _start(self, sets: EngineSets) -> float:
        """How long the engines took to start, in seconds."""
        started = time.monotonic()
        sets.start(lambda text: self.console.print(f"{text} ...", highlight=False, soft_wrap=True))
        took = time.monotonic() - started
        self.console.print(f"Ready after {took:.0f} s.", highlight=False)
        return round(took, 1)

    def _job(self, sets: EngineSets, job: Job, file: ResultsFile, steps: Sequence[Step], start_s: float) -> int:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        session = file.begin({"command": command(), "at": at, "start_s": start_s, "sets": sets.told()})
        return self._run(Runner(job.plan, sets, file, self.settings.devices), steps, session)

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
                named = _named(step, runner.plan.cases)
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
