"""A timeline as one HTML page that needs no network: plotly, which is part of the page, zooms and tells on hover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.errors import VizNotInstalled
from langgraph_pingpong.viz.layout import ABORTED, WHAT, Bar, Panel, colours_of, ink_on, panels_of, tinted
from langgraph_pingpong.viz.timeline import Flow, Kind, Span, Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROW_PX = 44
"""The height of a call's row, in pixels."""

_CONFIG = {
    "scrollZoom": True,
    "responsive": True,
    "displaylogo": False,
    "showSendToCloud": False,  # a trace is not uploaded
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}

_INK = "#333333"


def page(timelines: Sequence[Timeline], title: str) -> str:
    """The page, with the panels one below the other on the same scale.

    Raises:
        VizNotInstalled: plotly is missing.
    """
    figure = draw(timelines)
    # A fixed id: the same trace gives the same page.
    html: str = figure.to_html(include_plotlyjs=True, include_mathjax=False, config=_CONFIG, div_id="timeline")
    return html.replace("<head>", f"<head><title>{_escaped(title)}</title>", 1)


def draw(timelines: Sequence[Timeline]) -> Figure:
    """The figure: each agent can be switched off in the legend; times can be zoomed, devices not.

    Raises:
        VizNotInstalled: plotly is missing.
    """
    try:
        from plotly.subplots import make_subplots
    except ModuleNotFoundError as error:
        raise VizNotInstalled("An interactive timeline takes plotly.") from error
    panels, colours = panels_of(timelines), colours_of(timelines)
    heights = [panel.height for panel in panels]
    figure = make_subplots(
        rows=len(panels),
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=0.12 / len(panels),
        subplot_titles=[_escaped(timeline.title) for timeline in timelines],
    )
    named: set[str] = set()  # what the legend has
    for row, panel in enumerate(panels, start=1):
        for trace in _traces(panel, colours, named):
            figure.add_trace(trace, row=row, col=1)
        _axes(figure, panel, row)
    figure.update_xaxes(range=[0, max(timeline.end for timeline in timelines) * 1.01], tickformat=",.0f")
    figure.update_xaxes(title_text="ms", row=len(panels), col=1)
    figure.update_layout(
        template="plotly_white",
        barmode="overlay",
        dragmode="pan",
        hovermode="closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.04, "xanchor": "right", "x": 1},
        height=sum(heights) * ROW_PX + 90 * len(panels) + 60,
        margin={"l": 90, "r": 20, "t": 90, "b": 50},
    )
    figure.update_annotations(x=0, xanchor="left")
    return figure


def _axes(figure: Figure, panel: Panel, row: int) -> None:
    middles = [(top + bottom) / 2 for top, bottom in panel.lanes.values()]
    ticks = {"tickvals": middles, "ticktext": [_escaped(device) for device in panel.lanes]}
    figure.update_yaxes(range=[panel.height + 0.2, 0], fixedrange=True, showgrid=False, **ticks, row=row, col=1)
    figure.update_yaxes(zeroline=False, row=row, col=1)
    for top, bottom in panel.lanes.values():
        figure.add_hrect(top, bottom, fillcolor="#f2f2f2", line_width=0, layer="below", row=row, col=1)


def _traces(panel: Panel, colours: Mapping[str, str], named: set[str]) -> Iterator[Any]:
    by_look: dict[tuple[str, Kind], list[Bar]] = {}
    for bar in panel.bars.values():
        by_look.setdefault((bar.span.node, bar.span.kind), []).append(bar)
    for node in panel.timeline.nodes:
        for kind in WHAT:
            if bars := by_look.get((node, kind)):
                yield _bars(node, kind, bars, colours[node], _first_time(node, named))
    yield _flows(panel, _first_time("text of the upstream", named))
    yield _first_tokens(panel, _first_time("first token", named))


def _first_time(name: str, named: set[str]) -> bool:
    new = name not in named
    named.add(name)
    return new


def _bars(node: str, kind: Kind, bars: Sequence[Bar], colour: str, in_legend: bool) -> Any:
    from plotly.graph_objects import Bar as PlotlyBar

    name = _escaped(node or "-")
    return PlotlyBar(
        orientation="h",
        base=[bar.span.start for bar in bars],
        x=[bar.span.end - bar.span.start for bar in bars],
        y=[bar.y for bar in bars],
        width=[bar.height for bar in bars],
        customdata=[[name, *_about(bar.span)] for bar in bars],
        hovertemplate="<br>".join([f"<b>%{{customdata[0]}}</b>: {WHAT[kind]}", "%{customdata[1]}", "%{customdata[2]}"])
        + "<extra></extra>",
        text=[name if kind == "decode" else "" for _ in bars],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": ink_on(colour)},
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        marker=_look(kind, colour),
    )


def _about(span: Span) -> tuple[str, str]:
    tokens = "" if span.tokens is None else f", {span.tokens:,} tokens"
    took = f"{span.end - span.start:,.1f} ms on {_escaped(span.device)}{tokens}"
    return took, f"from {span.start:,.0f} to {span.end:,.0f} ms"


def _look(kind: Kind, colour: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1}
    if kind == "decode":
        return {"color": colour, "line": {**line, "width": 0}}
    if kind == "prefill":
        pattern = {"shape": "/", "fgcolor": colour, "bgcolor": tinted(colour, 0.25), "size": 6}
        return {"color": tinted(colour, 0.25), "line": line, "pattern": pattern}
    if kind == "append":
        return {"color": tinted(colour, 0.6), "line": line}
    return {"color": ABORTED, "line": {**line, "width": 0}}


def _flows(panel: Panel, in_legend: bool) -> Any:
    """All arrows as one line with gaps; each but its beginning has a head."""
    from plotly.graph_objects import Scatter

    xs: list[float | None] = []
    ys: list[float | None] = []
    about: list[str] = []
    for flow in panel.timeline.flows:
        if (ends := panel.arrow(flow)) is not None:
            xs += [flow.leaves, flow.arrives, None]
            ys += [*ends, None]
            about += [_what(flow)] * 3
    return Scatter(
        x=xs,
        y=ys,
        text=about,
        mode="lines+markers",
        line={"color": _INK, "width": 1},
        marker={"symbol": "arrow", "angleref": "previous", "size": [0, 8, 0] * (len(xs) // 3), "color": _INK},
        hovertemplate="%{text}<extra></extra>",
        name="text of the upstream",
        legendgroup="text of the upstream",
        showlegend=in_legend,
    )


def _what(flow: Flow) -> str:
    way = f"{_escaped(flow.source.node)} to {_escaped(flow.target.node)}"
    piece = "the whole answer" if flow.whole else f"up to token {flow.target.tokens:,} of its prompt"
    return f"{way}: {piece}, {flow.arrives:,.0f} ms"


def _first_tokens(panel: Panel, in_legend: bool) -> Any:
    from plotly.graph_objects import Scatter

    firsts = panel.timeline.first_tokens
    tops = [(bar.y - bar.height / 2) for bar in (panel.bars[first.span] for first in firsts)]
    return Scatter(
        x=[first.at for first in firsts],
        y=[top + 0.14 for top in tops],
        text=[f"{first.ttft_ms:,.0f} ms" for first in firsts],
        customdata=[_escaped(first.node or "-") for first in firsts],
        mode="markers+text",
        textposition="top right",
        cliponaxis=False,
        marker={"symbol": "triangle-down", "size": 10, "color": "black", "line": {"color": "white", "width": 1}},
        hovertemplate="<b>%{customdata}</b>: first token<br>%{text} after the upstream's end<extra></extra>",
        name="first token",
        legendgroup="first token",
        showlegend=in_legend,
    )


def _escaped(text: str) -> str:
    """Names come from traces, and plotly takes texts for HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
