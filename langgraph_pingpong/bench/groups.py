"""Runs that belong together: those of one mode, case and number of chains, and the baseline they are held against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from langgraph_pingpong.bench import metrics
from langgraph_pingpong.bench.lines import Line, Results
from langgraph_pingpong.bench.modes import MODES
from langgraph_pingpong.errors import ConfigError

Case = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Group:
    """The counted runs of one mode in one case, in the order of their numbers."""

    mode: str
    case: Case
    chains: int
    runs: Sequence[Line]

    @property
    def name(self) -> str:
        """The mode, and how many chains at once if that is more than one."""
        return f"{self.mode} x{self.chains}" if self.chains > 1 else self.mode

    @property
    def has_edges(self) -> bool:
        """Whether it may prefill ahead: others hide nothing. Of a mode that is not known any more: whether it did."""
        if self.mode in MODES:
            return MODES[self.mode].overlaps
        return any(agent["static"] or agent["streamed"] for run in self.runs for agent in run["agents"])


@dataclass(frozen=True)
class Compared:
    """All groups of one case, in the order in which the modes were named, and what they are held against."""

    case: Case
    groups: Sequence[Group]
    baseline_mode: str

    def baseline(self, group: Group) -> Group | None:
        """The baseline of a group: that with as many chains; else, for one chain, none."""
        same = [each for each in self.groups if each.mode == self.baseline_mode and each.chains == group.chains]
        many = [each for each in self.groups if each.mode == "dp2-serial" and each.chains == group.chains]
        return next(iter(same or many), None)


def compare(results: Results, baseline: str | None = None) -> list[Compared]:
    """The counted runs of a file, case by case.

    Raises:
        ConfigError: none of them is of the mode that was asked for as the baseline.
    """
    runs = defaultdict(list)
    for run in results.counted:
        runs[tuple(run["case"].items()), run["mode"], run["chains"]].append(run)
    groups = [
        Group(mode, case, chains, sorted(of_group, key=lambda run: int(run["run"])))
        for (case, mode, chains), of_group in runs.items()
    ]
    modes = sorted({group.mode for group in groups})
    if baseline and modes and baseline not in modes:
        raise ConfigError(f"No run is of the mode {baseline!r}, which was to be the baseline: take {', '.join(modes)}.")
    mode = baseline or default_baseline(results, set(modes))
    order = {name: place for place, name in enumerate(dict.fromkeys(run["mode"] for run in results.runs))}
    groups.sort(key=lambda group: (order[group.mode], group.chains))
    cases = dict.fromkeys(group.case for group in sorted(groups, key=lambda group: group.case))
    return [Compared(case, [group for group in groups if group.case == case], mode) for case in cases]


def hidden_share(group: Group, base: Group) -> float | None:
    """What edges hid of what there was to hide; None where there are none, or where it is not defined."""
    return metrics.hidden_share(group.runs, base.runs) if group.has_edges else None


def default_baseline(results: Results, modes: set[str]) -> str:
    """`serial`, unless its engine has more of the machine than one of a pair and the pair ran with edges off, too."""
    wider = results.setup["devices"][0].startswith("cpu")
    return "dp2-serial" if "dp2-serial" in modes and (wider or "serial" not in modes) else "serial"


def varying(cases: Sequence[Case]) -> list[str]:
    """The names of the parameters that are not the same in all cases."""
    return [name for name, _ in cases[0] if len({dict(case)[name] for case in cases}) > 1]


def named(case: Case, names: Sequence[str]) -> str:
    """The values of some of a case's parameters, in words."""
    values = dict(case)
    return ", ".join(f"{name} {values[name]:,}" for name in names)
