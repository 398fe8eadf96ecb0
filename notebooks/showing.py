"""What the notebooks show, so that their cells stay short."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from IPython.display import Image, Markdown, display

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.bench.document import Block, Heading, Table, to_markdown
from langgraph_pingpong.bench.groups import Compared
from langgraph_pingpong.bench.timeline import middle_run, timeline
from langgraph_pingpong.viz.timeline_png import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Certificate = Mapping[str, Any]


def run_and_watch(graph: Any, model: ChatPingPong, given: Mapping[str, Any]) -> tuple[Any, list[Certificate]]:
    """The result of one run of a graph, and the certificates of its calls, in the order in which they ended."""
    certificates: list[Certificate] = []
    with model.trace.subscribed(lambda e: certificates.append(e.data["certificate"]) if e.name == "finish" else None):
        result = graph.invoke(given)
    return result, certificates


def print_certificates(certificates: Sequence[Certificate]) -> None:
    """A line for each call: how its prompt was foreseen, and how much of it was there when it came."""
    print(f"{'node':<10}{'foreseen by':<13}{'prompt':>7}{'static':>8}{'streamed':>10}{'wasted':>8}  ids equal")
    for one in certificates:
        counts = f"{one['prompt_tokens']:>7}{one['static']:>8}{one['streamed']:>10}{one['wasted']:>8}"
        print(f"{one['node']:<10}{one['source'] or '-':<13}{counts}  {one['ids_equal']}")


def table_under(blocks: Sequence[Block], title: str) -> None:
    """Show the table of a report that stands under a heading."""
    for heading, block in pairwise(blocks):
        if isinstance(heading, Heading) and isinstance(block, Table) and heading.text.startswith(title):
            display(Markdown(to_markdown([block])))


def timelines(compared: Compared, modes: Sequence[str]) -> None:
    """Show the run in the middle of each mode, one above the other on the same scale."""
    found = {group.mode: middle_run(group.runs) for group in compared.groups if group.mode in modes}
    runs = {mode: run for mode, (run, _) in found.items()}
    titles = {mode: f"{mode}, {found[mode][1]} ({runs[mode]['e2e_ms']:,.0f} ms)" for mode in modes}
    show_figure(draw([timeline(runs[mode], titles[mode]) for mode in modes]))


def show_figure(figure: Figure) -> None:
    """Show a figure as a picture."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=90, metadata={"Software": None})
    display(Image(data.getvalue()))
