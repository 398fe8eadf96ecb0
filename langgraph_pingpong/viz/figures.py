"""The figures of a report on measured runs. Times are in ms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.bench.metrics import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MARKERS = "os^Dv*XP"
"""Modes are told apart without their colours, too."""


def _new(width: float = 9.0, height: float = 4.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure that no window knows, so that it goes away by itself."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _plain(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_beside(axes: Axes) -> None:
    """Outside, where it covers nothing."""
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def ttft_bars(by_mode: Mapping[str, Mapping[str, Figures]]) -> Figure:
    """Time to first token by agent: a bar a mode, its median, with the range from minimum to maximum."""
    figure, (axes,) = _new()
    nodes = list(dict.fromkeys(node for figures in by_mode.values() for node in figures))
    width = 0.8 / len(by_mode)
    for place, (mode, figures) in enumerate(by_mode.items()):
        there = [(number, figures[node]) for number, node in enumerate(nodes) if node in figures]
        at = [number + (place - (len(by_mode) - 1) / 2) * width for number, _ in there]
        medians = [each.median for _, each in there]
        around = [[each.median - each.min for _, each in there], [each.max - each.median for _, each in there]]
        axes.bar(at, medians, width, yerr=around, label=mode, error_kw={"elinewidth": 0.8})
    axes.set_xticks(range(len(nodes)), nodes)
    _legend_beside(axes)
    _plain(axes, "Time to first token, median and range", "agent", "ms")
    return figure


def e2e_runs(by_mode: Mapping[str, Figures]) -> Figure:
    """End to end, every run of every mode, in the order of their numbers."""
    figure, (axes,) = _new()
    for (mode, figures), marker in zip(by_mode.items(), cycle(_MARKERS), strict=False):
        axes.plot(range(len(figures.values)), figures.values, marker=marker, markersize=5, linewidth=1, label=mode)
    axes.set_ylim(0, 1.1 * max(figures.max for figures in by_mode.values()))
    runs = max(len(figures.values) for figures in by_mode.values())
    axes.set_xticks(range(0, runs, 1 + runs // 20))
    _legend_beside(axes)
    _plain(axes, "End to end, every run", "run", "ms")
    return figure


def surface(cells: Mapping[tuple[int, int, int], float], names: Sequence[str], title: str) -> Figure:
    """A grid for each value of the third parameter: the first upwards, the second to the right, the cell's value in it.

    Values are shares; 0 is the baseline.
    """
    thirds = sorted({third for *_, third in cells})
    figure, all_axes = _new(width=3.6 * len(thirds) + 1, height=3.6, columns=len(thirds))
    ups, rights = (sorted({key[place] for key in cells}) for place in (0, 1))
    limit = max(0.05, *(abs(value) for value in cells.values()))
    image: Any = None
    for axes, third in zip(all_axes, thirds, strict=True):
        grid = [[cells.get((up, right, third), float("nan")) for right in rights] for up in ups]
        image = axes.imshow(grid, origin="lower", cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                axes.text(column, row, "" if value != value else f"{value:+.0%}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(rights)), [f"{right:,}" for right in rights])
        axes.set_yticks(range(len(ups)), [f"{up:,}" for up in ups])
        _plain(axes, f"{title}, {names[2]} {third:,}", names[1], names[0])
    figure.colorbar(image, ax=all_axes, format="{x:+.0%}")
    return figure


def latency_against_load(by_mode: Mapping[str, Mapping[int, Figures]]) -> Figure:
    """Chain latency against the number of chains at once: the median, with the range up to p95."""
    figure, (axes,) = _new()
    for mode, by_load in by_mode.items():
        loads = sorted(by_load)
        medians = [by_load[load].median for load in loads]
        (line,) = axes.plot(loads, medians, marker="o", markersize=4, label=mode)
        axes.fill_between(loads, medians, [by_load[load].p95 for load in loads], alpha=0.15, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads_of(by_mode), [str(load) for load in loads_of(by_mode)])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    _plain(axes, "Chain latency, median to p95", "chains at once", "ms")
    return figure


def loads_of(by_mode: Mapping[str, Mapping[int, Figures]]) -> list[int]:
    """The numbers of chains at once that any mode ran with."""
    return sorted({load for by_load in by_mode.values() for load in by_load})
