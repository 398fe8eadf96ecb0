"""Metrics of agents' turns, as pure functions of the lines of a file. docs/metrics.md defines them. Times are in ms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from langgraph_pingpong.bench.metrics import Figures, Run

Turn = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of a turn went; the parts make the whole.

    `wait`: from a call in a node to its request at an engine. `ttft`: from there to the first token in the node.
    `decode`: to the last one. `tool`: the tools. `hand_over`: all else, the graph's way from node to node.
    """

    wait: float
    ttft: float
    decode: float
    tool: float
    hand_over: float

    @property
    def turn(self) -> float:
        """All of it."""
        return self.wait + self.ttft + self.decode + self.tool + self.hand_over


def steady(run: Run) -> list[Turn]:
    """The turns that count: begun when those of the warm-up had ended, and over before the first user was done."""
    turns = run["turns"]
    warm_up = run["case"]["warmup"]
    if len(turns) <= warm_up:
        return []
    since = turns[warm_up - 1]["ended"] if warm_up else 0.0
    last = max(turn["request"] for turn in turns)
    until = min(turn["ended"] for turn in turns if turn["request"] == last)
    return [turn for turn in turns if turn["begun"] >= since and turn["ended"] <= until]


def breakdowns(run: Run) -> list[Breakdown]:
    """Those of the turns that count."""
    graph_runs = {_key(agent): agent["graph_run"] for agent in run["agents"]}
    sent = {
        (event["graph_run"], event["node"]): float(event["t"])
        for event in run["events"]
        if event["name"] == "generate.started"
    }
    return [
        _breakdown(turn, [sent[graph_runs[_key(call)], call["node"]] for call in turn["calls"]]) for turn in steady(run)
    ]


def _key(call: Mapping[str, Any]) -> tuple[str, float, float]:
    """What tells a call and its certificate from all others."""
    return call["node"], call["ttft_ms"], call["total_ms"]


def _breakdown(turn: Turn, sent: Sequence[float]) -> Breakdown:
    """That of a turn; `sent` tells when the request of each of its calls was with an engine."""
    calls = list(zip(turn["calls"], sent, strict=True))
    wait = sum(at - call["asked"] for call, at in calls)
    ttft = sum(call["first"] - at for call, at in calls)
    decode = sum(call["ended"] - call["first"] for call, _ in calls)
    tool = sum(ended - begun for begun, ended in turn["tools"])
    return Breakdown(wait, ttft, decode, tool, turn["ended"] - turn["begun"] - wait - ttft - decode - tool)


def parts_of_turns(runs: Sequence[Run]) -> dict[str, Figures]:
    """Each part of the turns that count, and the whole, by its name; empty without any.

    Means add up to the whole's mean; percentiles, each of which may be of another turn, do not.
    """
    every = [each for run in runs for each in breakdowns(run)]
    names = [*(field.name for field in fields(Breakdown)), "turn"]
    return {name: Figures.of(getattr(each, name) for each in every) for name in names} if every else {}


def turn_times(runs: Sequence[Run]) -> Figures | None:
    """From request to answer, of the turns that count; None without any."""
    times = [turn["ended"] - turn["begun"] for run in runs for turn in steady(run)]
    return Figures.of(times) if times else None


def stream_ttft(runs: Sequence[Run]) -> dict[str, Figures]:
    """By node, from a call in the node to the first token that its stream gives, of the turns that count."""
    times: dict[str, list[float]] = {}
    for call in _calls(runs):
        times.setdefault(call["node"], []).append(call["first"] - call["asked"])
    return {node: Figures.of(each) for node, each in times.items()}


def _calls(runs: Sequence[Run]) -> Iterator[Mapping[str, Any]]:
    return (call for run in runs for turn in steady(run) for call in turn["calls"])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
