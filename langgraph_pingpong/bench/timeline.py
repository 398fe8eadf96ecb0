"""The timeline of a measured run, from the events in its line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from langgraph_pingpong.trace import Event
from langgraph_pingpong.viz.timeline import Timeline, timeline_of


def middle_run(runs: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The run whose E2E is the median, and its name; of an even number, the faster of the two in the middle."""
    middle = median_low(run["e2e_ms"] for run in runs)
    named = "the median run" if len(runs) % 2 else "the faster of the two runs in the middle"
    return next(run for run in runs if run["e2e_ms"] == middle), named


def timeline(run: Mapping[str, Any], title: str) -> Timeline:
    """Its timeline, with times in ms from the first event on."""
    return timeline_of([_event(run, told) for told in run["events"]], title)


def _event(run: Mapping[str, Any], told: Mapping[str, Any]) -> Event:
    """As the trace had it: a line keeps certificates apart, as its agents."""
    data = dict(told["data"])
    if told["name"] == "finish":
        data["certificate"] = run["agents"][data.pop("agent")]
    return Event(told["name"], told["t"] / 1000, str(told["graph_run"]), told["node"], told["device"], data)
