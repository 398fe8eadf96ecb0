"""The metrics, each once, as pure functions of the lines of a file. docs/metrics.md defines them.

A run here is a line of a file of results. Times are in ms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

Run = Mapping[str, Any]
Agent = Mapping[str, Any]

SLOWER = 1.02
"""From which ratio on a device or a drift is called slower."""


# -- figures of several runs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What is told of values, always together; no value is left out."""

    mean: float
    median: float
    min: float
    max: float
    p95: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Figures:
        """Those of at least one value."""
        every = tuple(values)
        return cls(fmean(every), median(every), min(every), max(every), p95(every), every)


def p95(values: Sequence[float]) -> float:
    """The smallest value that at least 95 % of all do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


# -- one run ---------------------------------------------------------------------------------------------------


def followers(run: Run) -> list[bool]:
    """For each agent's answer whether it is a downstream: one of its graph run had ended when it was asked for."""
    ended: set[int] = set()
    asked: dict[tuple[int, str], bool] = {}
    downstream = []
    for event in run["events"]:
        turn = event["graph_run"], event["node"]
        if event["name"] == "generate.started":
            asked[turn] = event["graph_run"] in ended
        elif event["name"] == "finish":
            downstream.append(asked[turn])
            ended.add(event["graph_run"])
    return downstream


def downstream_agents(run: Run) -> list[Agent]:
    """The answers that came after others of their graph run."""
    return [agent for agent, follows in zip(run["agents"], followers(run), strict=True) if follows]


def first_agents(run: Run) -> list[Agent]:
    """The answers that no other came before."""
    return [agent for agent, follows in zip(run["agents"], followers(run), strict=True) if not follows]


def is_one_chain(run: Run) -> bool:
    """Whether answers came one after the other, so that what is saved on each is saved in the end."""
    under_way = 0
    for event in run["events"]:
        if event["name"] == "generate.started":
            under_way += 1
            if under_way > 1:
                return False
        elif event["name"] == "finish":
            under_way -= 1
    return True


def gaps(run: Run, device: str | None = None) -> list[float]:
    """Times between one token and the next of the answers that were given, ms; several that came together share it."""
    found = []
    for answer in run["answers"]:
        if answer["finish_reason"] and device in (None, answer["device"]):
            for (before, _), (after, count) in pairwise(answer["tokens"]):
                found += [(after - before) / count] * count
    return found


def devices(run: Run) -> list[str]:
    """The devices that answered, in order of their names."""
    return sorted({answer["device"] for answer in run["answers"]})


@dataclass(frozen=True, slots=True)
class Prefill:
    """Shares of the tokens of prompts.

    Prefilled before and while the upstream spoke, brought from another engine, cached besides, and left for the call.
    `wasted` is in the same unit, and was prefilled for nothing; so is `lost`, what of `left` was cached once.
    """

    static: float
    streamed: float
    pulled: float
    cached: float
    left: float
    wasted: float
    lost: float = 0.0

    @property
    def reduction(self) -> float:
        """The prefill-token-reduction ratio: what the call did not have to compute."""
        return 1 - self.left


def shares_of(agents: Sequence[Agent]) -> Prefill | None:
    """Those of the prompts of some answers; None without any."""
    total = sum(agent["prompt_tokens"] for agent in agents)
    if not total:
        return None
    parts = [_parts(agent) for agent in agents]
    static, streamed, pulled, cached = (sum(part[place] for part in parts) for place in range(4))
    wasted, lost = sum(agent["wasted"] for agent in agents), sum(agent.get("lost", 0) for agent in agents)
    left = total - static - streamed - pulled - cached
    return Prefill(*(tokens / total for tokens in (static, streamed, pulled, cached, left, wasted, lost)))


def _parts(agent: Agent) -> tuple[int, int, int, int]:
    """Tokens static, streamed, pulled and cached, each counted once: what was pulled for an edge is pulled."""
    static, streamed = agent["static"], agent["streamed"]
    beside = max((agent["cached"] or 0) - static - streamed, 0)
    pulled = min(agent.get("pulled", 0), beside + static)
    return static - max(0, pulled - beside), streamed, pulled, max(0, beside - pulled)


def prefill_shares(run: Run) -> Prefill | None:
    """Those of the downstreams of one run; None without any."""
    return shares_of(downstream_agents(run))


def by_edge(runs: Sequence[Run]) -> dict[tuple[str, str], tuple[int, Prefill]]:
    """By node and upstream, how many prompts of all runs there were and their shares; no upstream is no edge."""
    agents = defaultdict(list)
    for run in runs:
        for agent in run["agents"]:
            agents[agent["node"], agent.get("upstream") or ""].append(agent)
    shares = {edge: (len(of_edge), shares_of(of_edge)) for edge, of_edge in sorted(agents.items())}
    return {edge: (count, each) for edge, (count, each) in shares.items() if each is not None}


# -- runs of one mode ------------------------------------------------------------------------------------------


def e2e(runs: Sequence[Run]) -> Figures:
    """End to end, ms: from the start of the run's chains to the end of the last."""
    return Figures.of(run["e2e_ms"] for run in runs)


def chain_latency(runs: Sequence[Run]) -> Figures:
    """From the start to the end of each chain, ms."""
    return Figures.of(ms for run in runs for ms in run["chain_ms"])


def by_agent(runs: Sequence[Run], name: str) -> dict[str, Figures]:
    """A time of the certificates (`ttft_ms`, `total_ms`), by node."""
    values = defaultdict(list)
    for run in runs:
        for agent in run["agents"]:
            values[agent["node"]].append(agent[name])
    return {node: Figures.of(each) for node, each in values.items()}


def downstream_ttft(runs: Sequence[Run]) -> Figures | None:
    """Time to first token of all downstreams, from their upstream's end, ms."""
    values = [agent["ttft_ms"] for run in runs for agent in downstream_agents(run)]
    return Figures.of(values) if values else None


def first_ttft(runs: Sequence[Run]) -> Figures:
    """Time to first token of the first agents, from their own start, ms."""
    return Figures.of(agent["ttft_ms"] for run in runs for agent in first_agents(run))


def tpot(runs: Sequence[Run], device: str | None = None) -> float | None:
    """Time per output token: the median gap between tokens, ms."""
    values = [gap for run in runs for gap in gaps(run, device)]
    return median(values) if values else None


def jitter(runs: Sequence[Run], device: str | None = None) -> float | None:
    """Jitter of the time per output token: the 95th percentile of the gaps less their median, ms."""
    values = [gap for run in runs for gap in gaps(run, device)]
    return p95(values) - median(values) if values else None


def ttft_in_steps(runs: Sequence[Run]) -> float | None:
    """Median downstream time to first token, in decode steps of the same mode."""
    first, step = downstream_ttft(runs), tpot(runs)
    return first.median / step if first is not None and step is not None else None


def mean_prefill(runs: Sequence[Run]) -> Prefill | None:
    """The mean of the runs' shares."""
    shares = [each for run in runs if (each := prefill_shares(run))]
    if not shares:
        return None
    names = Prefill.__dataclass_fields__
    return Prefill(*(fmean(getattr(each, name) for each in shares) for name in names))


def drift(runs: Sequence[Run]) -> float | None:
    """The median E2E of the last third of the runs over that of the first third, less one."""
    third = len(runs) // 3
    if not third:
        return None
    ordered: list[float] = [run["e2e_ms"] for run in sorted(runs, key=lambda run: run["at"])]
    return median(ordered[-third:]) / median(ordered[:third]) - 1


def slow_devices(runs: Sequence[Run]) -> dict[str, float]:
    """Devices whose time per output token is longer than the fastest's by more than 2 %, and by which share."""
    steps = {name: step for name in devices_of(runs) if (step := tpot(runs, name))}
    fastest = min(steps.values(), default=0.0)
    return {name: step / fastest - 1 for name, step in steps.items() if step > fastest * SLOWER}


def devices_of(runs: Sequence[Run]) -> list[str]:
    """All devices that answered in some run."""
    return sorted({name for run in runs for name in devices(run)})


# -- against a baseline ----------------------------------------------------------------------------------------


def hidden_share(runs: Sequence[Run], baseline: Sequence[Run]) -> float | None:
    """Saved E2E over what there was to hide: the sum of the baseline's downstream times to first token.

    All three are means over the runs. None unless each run is one chain, or where there is nothing to hide.
    """
    if not all(map(is_one_chain, (*runs, *baseline))):
        return None
    to_hide: float = fmean(sum(agent["ttft_ms"] for agent in downstream_agents(run)) for run in baseline)
    if not to_hide:
        return None
    return (e2e(baseline).mean - e2e(runs).mean) / to_hide


def speedup(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Median E2E of the baseline over that of the mode, less one; negative where the mode is slower."""
    return e2e(baseline).median / e2e(runs).median - 1


def upstream_slowdown(runs: Sequence[Run], baseline: Sequence[Run]) -> float | None:
    """How much longer upstreams take from their first token to their last: ratio of the means, less one."""
    mine, theirs = _speaking(runs), _speaking(baseline)
    return fmean(mine) / fmean(theirs) - 1 if mine and theirs else None


def _speaking(runs: Sequence[Run]) -> list[float]:
    return [agent["total_ms"] - agent["ttft_ms"] for run in runs for agent in upstream_agents(run)]


def upstream_agents(run: Run) -> list[Agent]:
    """The answers that others of their graph run came after."""
    ends = [event for event in run["events"] if event["name"] == "finish"]
    last_asked: dict[int, float] = {}
    for event in run["events"]:
        if event["name"] == "generate.started":
            last_asked[event["graph_run"]] = event["t"]
    pairs = zip(run["agents"], ends, strict=True)
    return [agent for agent, end in pairs if end["t"] <= last_asked[end["graph_run"]]]


def first_ttft_change(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """How much longer the first agents take to their first token: ratio of the medians, less one."""
    return first_ttft(runs).median / first_ttft(baseline).median - 1


@dataclass(frozen=True, slots=True)
class Equal:
    """In how many of `runs` runs something is equal to the baseline's run of the same number.

    `ids` counts those in which every prompt is as fully rendered and, where the texts agree, the baseline's; `texts`
    those with the same texts; `counts` those with as many tokens in every answer.
    """

    runs: int
    ids: int
    texts: int
    counts: int


def equal(runs: Sequence[Run], baseline: Sequence[Run]) -> Equal:
    """Compare runs with the baseline's; only runs whose number the baseline has, too."""
    by_number = {run["run"]: run for run in baseline}
    pairs = [(run, by_number[run["run"]]) for run in runs if run["run"] in by_number]

    def count(same: Callable[[Run, Run], bool]) -> int:
        return sum(same(run, other) for run, other in pairs)

    return Equal(len(pairs), count(ids_equal), count(texts_equal), count(counts_equal))


def ids_equal(run: Run, other: Run) -> bool:
    """Whether the engine answered the ids of the full rendering, and those are the other run's where texts agree."""
    certified = all(agent["ids_equal"] for agent in run["agents"])
    return certified and (
        not texts_equal(run, other) or _sorted(run, "prompt_sha256") == _sorted(other, "prompt_sha256")
    )


def texts_equal(run: Run, other: Run) -> bool:
    """Whether every chain said the same."""
    return bool(run["texts"] == other["texts"])


def counts_equal(run: Run, other: Run) -> bool:
    """Whether every node answered with as many tokens."""
    return _sorted(run, "output_tokens") == _sorted(other, "output_tokens")


def _sorted(run: Run, name: str) -> list[tuple[str, Any]]:
    return sorted((agent["node"], agent[name]) for agent in run["agents"])
