"""What a report tells of agents' turns: first tokens, whole turns, and where their time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from langgraph_pingpong.bench import turn_metrics
from langgraph_pingpong.bench.document import Block, Heading, Table, Text
from langgraph_pingpong.bench.groups import Compared
from langgraph_pingpong.bench.metrics import Figures
from langgraph_pingpong.bench.turn_metrics import Breakdown, percentile

SOONER, SHORTER = 0.95, 0.99
"""First tokens that come in less than this share of the baseline's time come sooner; turns are shorter likewise."""


def turn_blocks(compared: Compared) -> list[Block]:
    """The tables of turns; none for workloads without."""
    if not all("turns" in run for group in compared.groups for run in group.runs):
        return []
    blocks: list[Block] = [Heading("First token of a call's stream, from the call in its node, ms", 3), _ttft(compared)]
    blocks += [Heading("Turns of agents, from request to answer, ms", 3), _turns(compared)]
    return [*blocks, Heading("Where the time of a turn went, ms", 3), _parts(compared), *_remarks(compared)]


def _ttft(compared: Compared) -> Table:
    rows = []
    for group in compared.groups:
        for node, figures in turn_metrics.stream_ttft(group.runs).items():
            rows.append([group.name, node, str(len(figures.values)), *_cells(figures)])
    return Table(["mode", "node", "calls", "p50", "p95", "p99", "max"], rows)


def _turns(compared: Compared) -> Table:
    rows = []
    for group in compared.groups:
        if (figures := turn_metrics.turn_times(group.runs)) is not None:
            rows.append([group.name, str(len(figures.values)), f"{figures.mean:.0f}", *_cells(figures)])
    return Table(["mode", "turns", "mean", "p50", "p95", "p99", "max"], rows)


def _parts(compared: Compared) -> Table:
    names = [*(field.name for field in fields(Breakdown)), "turn"]
    rows = []
    for group in compared.groups:
        if parts := turn_metrics.parts_of_turns(group.runs):
            shown = [(parts[name].mean, *_percentiles(parts[name].values)) for name in names]
            rows += [
                [group.name, which, *(f"{figures[place]:.0f}" for figures in shown)]
                for place, which in enumerate(("mean", "p50", "p95", "p99", "max"))
            ]
    return Table(["mode", "of all turns", *(name.replace("_", "-") for name in names)], rows)


def _percentiles(values: Sequence[float]) -> list[float]:
    """p50, p95, p99 and the maximum."""
    return [*(percentile(values, share) for share in (0.5, 0.95, 0.99)), max(values)]


def _cells(figures: Figures) -> list[str]:
    return [f"{value:.0f}" for value in _percentiles(figures.values)]


def _remarks(compared: Compared) -> Iterator[Text]:
    """Where first tokens come sooner and nobody has the answer sooner."""
    base = next((group for group in compared.groups if group.mode == compared.baseline_mode), None)
    first, turns = (turn_metrics.stream_ttft(base.runs), turn_metrics.turn_times(base.runs)) if base else ({}, None)
    for group in compared.groups:
        own, own_turns = turn_metrics.stream_ttft(group.runs), turn_metrics.turn_times(group.runs)
        if turns is None or own_turns is None or own_turns.median < SHORTER * turns.median:
            continue
        for node in own:
            if node in first and own[node].median < SOONER * first[node].median:
                yield Text(f"{group.name}: the first tokens of {node} come sooner, and turns are no shorter.")
