"""Who computed what when, in one run: the bars of its timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Literal

Kind = Literal["append", "prefill", "decode", "aborted"]
"""A piece of a prompt ahead of its call; a call's own prompt; an answer; an answer that was begun and aborted."""


@dataclass(frozen=True, slots=True)
class Span:
    """One bar: from `start` to `end` (ms from the start of the run) on a device, for a node."""

    device: str
    kind: Kind
    node: str
    start: float
    end: float


def median_run(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The run whose E2E is the median; of an even number, the faster of the two in the middle."""
    middle = median_low(run["e2e_ms"] for run in runs)
    return next(run for run in runs if run["e2e_ms"] == middle)


def spans(run: Mapping[str, Any]) -> list[Span]:
    """All bars of a run, in the order of their beginnings."""
    return sorted([*_appends(run), *_answers(run)], key=lambda span: (span.start, span.end))


def _ended(answer: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    """When an aborted answer ended; files of the first version do not tell, there its last token stands for it."""
    if "ended" in answer:
        return float(answer["ended"] or run["e2e_ms"])
    return float(answer["tokens"][-1][0] if answer["tokens"] else answer["started"])


def _appends(run: Mapping[str, Any]) -> Iterator[Span]:
    """An append ends when it is complete, or with the next event of its edge: then it was aborted."""
    begun: dict[tuple[int, str, str], float] = {}
    for event in run["events"]:
        edge = event["graph_run"], event["node"], event["device"]
        if event["name"] == "append.started":
            begun[edge] = event["t"]
        elif event["name"] in ("append.complete", "append.failed", "finalize", "edge.dropped") and edge in begun:
            yield Span(event["device"], "append", event["node"], begun.pop(edge), event["t"])


def _answers(run: Mapping[str, Any]) -> Iterator[Span]:
    nodes: defaultdict[tuple[str, str], str] = defaultdict(str)
    for agent in run["agents"]:
        nodes[agent["device"], agent["prompt_sha256"]] = agent["node"]
    for answer in run["answers"]:
        device, node = answer["device"], nodes[answer["device"], answer["prompt_sha256"]]
        times = [at for at, _ in answer["tokens"]]
        if not answer["finish_reason"]:
            yield Span(device, "aborted", node, answer["started"], _ended(answer, run))
        elif times:
            yield Span(device, "prefill", node, answer["started"], times[0])
            yield Span(device, "decode", node, times[0], times[-1])
