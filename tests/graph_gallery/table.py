"""Prints a table of every graph shape of the gallery against the three prompt sources, as Markdown.

    python -m tests.graph_gallery.table > docs/graph-shapes.md

For each shape: tokens of the prompts that an edge could have prefilled, how many of them were prefilled before their
turn, how many were prefilled for nothing (for calls that then had another prompt, or never came), and whether all that
can be seen of the graph is equal with edges on and off. Declared and dry-run edges are read from the first round,
learned ones from the last; for the dry-run column every node may be run ahead of time, except where nodes count how
often they run. The engines are modelled, the tokenizer has a token a byte; token counts say how much of a prompt is
foreseen, not how long it takes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from langgraph_pingpong import streaming_edges
from tests.graph_gallery import SCENARIOS, RunRecord, Scenario, run

SOURCES = ("declared", "dry run", "learned")


@dataclass(frozen=True)
class Cell:
    """What one prompt source did in one shape, in tokens."""

    prompt: int
    prefilled: int
    wasted: int
    equal: bool

    def __str__(self) -> str:
        if not self.prompt:
            return "-"
        return f"{self.prompt} / {self.prefilled} / {self.wasted}{'' if self.equal else ' **differs**'}"


def cell(record: RunRecord, off: RunRecord, source: str, number: int) -> Cell:
    """Counts over the calls of one round that a source foresaw."""
    round_ = record.rounds[number]
    calls = [each for each in round_.certificates if each["source"] == source]
    dropped = sum(each["wasted"] for each in round_.dropped if each["source"] == source)
    return Cell(
        sum(each["prompt_tokens"] for each in calls),
        sum(each["static"] + each["streamed"] for each in calls),
        sum(each["wasted"] for each in calls) + dropped,
        _differences(off, record, source) == [],
    )


def _differences(off: RunRecord, on: RunRecord, source: str) -> list[str]:
    """What differs; how often a function ran does not count where it may be run ahead of time."""
    found = off.differences(on)
    return [line for line in found if "/effects" not in line] if source == "dry run" else found


def row(scenario: Scenario) -> tuple[str, list[Cell]]:
    """A scenario and its three cells."""
    off, plain = run(scenario, "off"), run(scenario, "on")
    rehearsed = run(scenario, "on", allow_dry_runs if scenario.pure else None)
    return scenario.shape, [
        cell(plain, off, "declared", 0),
        cell(rehearsed, off, "dry run", 0),
        cell(plain, off, "learned", -1),
    ]


def allow_dry_runs(graph: Any, _: Scenario) -> None:
    """Every node may be run ahead of time, also within subgraphs."""
    for each in (graph, *(inner for _, inner in graph.get_subgraphs(recurse=True))):
        streaming_edges(each, dry_run=True)


def main() -> None:
    """Print the table, and how many shapes each source covers."""
    lines: list[str] = []
    covered = dict.fromkeys(SOURCES, 0)
    for scenario in SCENARIOS:
        shape, cells = row(scenario)
        for source, each in zip(SOURCES, cells, strict=True):
            covered[source] += bool(each.prefilled)
        equal = "yes" if all(each.equal for each in cells) else "no"
        drawn = shape.replace("|", r"\|")
        lines.append(f"| {scenario.name} | {drawn} | {' | '.join(map(str, cells))} | {equal} |")
        print(scenario.name, file=sys.stderr)
    print("# Graph shapes and prompt sources\n")
    print((__doc__ or "").split("\n\n", 2)[2])
    print("Each cell: prompt tokens / prefilled before the turn / wasted. `-`: this source foresees no call there.\n")
    print("| graph | shape | declared | dry run | learned | equal on and off |\n|---|---|---|---|---|---|")
    print("\n".join(lines))
    counts: Any = ", ".join(f"{source} {count}" for source, count in covered.items())
    print(f"\n{len(lines)} shapes; something was prefilled in: {counts}.")
    sys.exit(any(line.endswith("| no |") for line in lines))


if __name__ == "__main__":
    main()
