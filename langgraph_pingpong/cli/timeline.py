"""`pingpong timeline`: who computed what when in a traced run, as a picture or an interactive page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from langgraph_pingpong.cli.plain_errors import plain_errors
from langgraph_pingpong.errors import ConfigError

if TYPE_CHECKING:
    from langgraph_pingpong.viz.timeline import Timeline

FORMS = (".html", ".png", ".svg", ".pdf")
"""What a timeline can be written as, by the suffix of the file."""


def timeline(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE.JSONL...", help="One or two files that `pingpong run --trace` wrote.")
    ],
    out: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Where to: .png, .svg, .pdf or .html; may be repeated.")
    ],
) -> None:
    """Draw a timeline: a lane for each device, bars and arrows for what agents computed and what text went where.

    Runs that --compare made are told apart, the one with overlap off above. A second trace comes below the first.
    An .html file has everything in it, opens offline, zooms with the wheel and tells more under the mouse.
    """
    with plain_errors():
        for path in out:
            if path.suffix.lower() not in FORMS:
                raise ConfigError(f"--out {path} has to end in {', '.join(FORMS)}.")
        timelines = read(traces)
        for path in out:
            _write(timelines, path)
            typer.echo(f"Wrote {path}")


def read(traces: Sequence[Path]) -> list[Timeline]:
    """The timelines of these files, with titles that tell how long each took.

    Raises:
        NotATrace: a file cannot be read, or holds something else.
        ConfigError: there are more than two files, or nothing was computed.
    """
    from langgraph_pingpong.trace import read_events
    from langgraph_pingpong.viz.timeline import runs_of, timeline_of

    if len(traces) > 2:
        raise ConfigError(f"Two traces can be held against each other, not {len(traces)}.")
    made = []
    for path in traces:
        for name, events in runs_of(read_events(path), path.stem).items():
            several = len(traces) > 1 and name != path.stem
            made.append(timeline_of(events, f"{path.stem}, {name}" if several else name))
    made = [each for each in made if each.spans]
    if not made:
        raise ConfigError("Nothing was computed in what was traced: there is nothing to draw.")
    return [replace(each, title=_title(each, made[0])) for each in made]


def _title(each: Timeline, first: Timeline) -> str:
    took = f"{each.title}: {each.end:,.0f} ms"
    saved = 1 - each.end / first.end
    return took if each is first else f"{took}, {abs(saved):.0%} {'less' if saved >= 0 else 'more'}"


def _write(timelines: Sequence[Timeline], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".html":
            from langgraph_pingpong.viz.timeline_html import page

            path.write_text(page(timelines, "pingpong timeline"), encoding="utf-8")
        else:
            from langgraph_pingpong.viz.timeline_png import save

            save(timelines, path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}.") from None
