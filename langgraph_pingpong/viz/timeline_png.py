"""A timeline as a still picture, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.viz.layout import (
    ABORTED,
    WHAT,
    Bar,
    Panel,
    colours_of,
    ink_on,
    panels_of,
    thinned,
    tinted,
)
from langgraph_pingpong.viz.timeline import Kind, Timeline

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW, _BETWEEN = 11.0, 0.42, 0.75
"""Inches: of the figure, of a call's row, and what a panel has above and below its lanes."""

_ARROWS = 8
"""Arrows from one answer to one prompt; more would be a hatching."""

_INK = "#333333"
_LETTER = 0.085
"""The width of a letter, in inches, at the size of what is written into bars."""


def draw(timelines: Sequence[Timeline]) -> Figure:
    """One below the other, on the same scale: a lane for each device, a colour for each agent."""
    from matplotlib.figure import Figure

    panels, colours = panels_of(timelines), colours_of(timelines)
    heights = [panel.height * _ROW + _BETWEEN for panel in panels]
    legend = 0.3 * (2 + (len(colours) - 1) // 8)
    figure = Figure(figsize=(_WIDTH, sum(heights) + legend + 0.2), layout="constrained", facecolor="white")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max((timeline.end for timeline in timelines), default=0.0) or 1.0
    all_axes[0].set_xlim(0, end * 1.01)
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, colours, end)
    all_axes[-1].set_xlabel("ms")
    _legend(figure, colours, {span.kind for timeline in timelines for span in timeline.spans})
    return figure


def save(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw them into a file whose suffix tells its form: .png, .svg or .pdf."""
    # Without dates and versions in it, the same traces give the same file.
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    form = path.suffix.lower()[1:]
    draw(timelines).savefig(path, format=form, dpi=120, metadata=metadata[form])


def _draw_panel(axes: Axes, panel: Panel, colours: Mapping[str, str], end: float) -> None:
    inches_per_ms = (_WIDTH - 1.2) / end
    axes.set_title(_plain(panel.timeline.title), loc="left", fontsize=11)
    axes.set_ylim(panel.height + 0.2, 0)
    axes.set_yticks(
        [(top + bottom) / 2 for top, bottom in panel.lanes.values()], [_plain(device) for device in panel.lanes]
    )
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    for top, bottom in panel.lanes.values():
        axes.axhspan(top, bottom, color="#f2f2f2", linewidth=0, zorder=0)
    for bar in panel.bars.values():
        _draw_bar(axes, bar, colours[bar.span.node], inches_per_ms)
    _draw_arrows(axes, panel)
    _draw_first_tokens(axes, panel, inches_per_ms)


def _draw_bar(axes: Axes, bar: Bar, colour: str, inches_per_ms: float) -> None:
    span = bar.span
    width, node = span.end - span.start, _plain(span.node or "-")
    axes.barh(bar.y, width, bar.height, span.start, zorder=2, **_look(span.kind, colour))
    if span.kind == "decode" and width * inches_per_ms > _LETTER * len(node) + 0.1:
        middle = span.start + width / 2
        axes.text(middle, bar.y, node, ha="center", va="center", fontsize=9, color=ink_on(colour), zorder=4)


def _look(kind: Kind, colour: str) -> dict[str, Any]:
    if kind == "decode":
        return {"color": colour, "linewidth": 0}
    if kind == "prefill":
        return {"facecolor": tinted(colour, 0.25), "edgecolor": colour, "linewidth": 0.8, "hatch": "////"}
    if kind == "append":
        return {"facecolor": tinted(colour, 0.6), "edgecolor": colour, "linewidth": 0.8}
    return {"color": ABORTED, "linewidth": 0}


def _draw_arrows(axes: Axes, panel: Panel) -> None:
    for flow in thinned(panel.timeline.flows, _ARROWS):
        if (ends := panel.arrow(flow)) is None:
            continue
        width, head = (1.2, 9) if flow.whole else (0.7, 7)
        look: dict[str, Any] = {"arrowstyle": "-|>", "linewidth": width, "mutation_scale": head, "color": _INK}
        look |= {"shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (flow.arrives, ends[1]), (flow.leaves, ends[0]), arrowprops=look, zorder=5)


def _draw_first_tokens(axes: Axes, panel: Panel, inches_per_ms: float) -> None:
    """A mark in the bar, and above it the time to it where there is room up to the next one."""
    from matplotlib.patheffects import withStroke

    mark: dict[str, Any] = {"marker": "v", "markersize": 6, "color": "black", "markeredgecolor": "white"}
    free: dict[str, float] = {}
    for first in sorted(panel.timeline.first_tokens, key=lambda each: each.at):
        bar = panel.bars[first.span]
        top = bar.y - bar.height / 2
        axes.plot(first.at, top + 0.14, zorder=6, linestyle="none", **mark)
        text = f"{first.ttft_ms:,.0f} ms"
        if first.at >= free.get(first.device, 0.0):
            label = axes.annotate(text, (first.at, top), (1, 2), textcoords="offset points", fontsize=8, zorder=7)
            label.set_path_effects([withStroke(linewidth=3, foreground="white")])  # arrows may pass behind it
            free[first.device] = first.at + (_LETTER * len(text) + 0.1) / inches_per_ms


def _legend(figure: Figure, colours: Mapping[str, str], kinds: set[Kind]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "#777777"
    agents = [Patch(color=colour, label=_plain(node or "-")) for node, colour in colours.items()]
    what: list[Any] = [Patch(label=WHAT[kind], **_look(kind, grey)) for kind in WHAT if kind in kinds]
    look: dict[str, Any] = {"color": "black", "linestyle": "none", "markersize": 5}
    what.append(Line2D([], [], marker="v", label="first token, after the upstream's end", **look))
    what.append(Line2D([], [], marker=r"$\rightarrow$", label="text of the upstream", **{**look, "markersize": 12}))
    style: dict[str, Any] = {"fontsize": 8, "frameon": False, "handlelength": 1.4, "columnspacing": 1.2}
    figure.legend(handles=what, loc="outside lower center", ncols=len(what), **style)
    figure.legend(handles=agents, loc="outside upper right", ncols=8, **style)


def _plain(text: str) -> str:
    """A name as it is: matplotlib takes dollars for formulas, and leaves labels with a line before them out."""
    return f"{' ' if text.startswith('_') else ''}{text}".replace("$", r"\$")
