"""`pingpong graph`: a picture of a graph with its streaming edges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from langgraph_pingpong.cli.loading import build_graph, load_build, parse_options
from langgraph_pingpong.cli.plain_errors import plain_errors
from langgraph_pingpong.errors import ConfigError

if TYPE_CHECKING:
    from langgraph_pingpong.chat_model import ChatPingPong
    from langgraph_pingpong.trace import Event
    from langgraph_pingpong.viz.graph import Format

FORMS: dict[str, Format] = {".svg": "svg", ".png": "png", ".mmd": "mermaid"}
"""What a picture can be written as, by the suffix of the file."""


def graph(
    graph: Annotated[
        str, typer.Argument(metavar="GRAPH", help="module[:attribute] of a function build(model, **options).")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to: .svg, .png or .mmd; without it, Mermaid text on the terminal."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="TRACE.JSONL", help="What `pingpong run --trace` wrote: shows its figures.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of build(); may be repeated.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="Where it will run, like cuda:0,cuda:1; without it two if there are.")
    ] = None,
) -> None:
    """Draw a graph: which edges stream, who tells their prompts, where nodes run. Nothing is started for that.

    With --trace, edges show the tokens prefilled ahead and the time to first token. Of a trace of --compare, the run
    with overlap counts.
    """
    with plain_errors():
        if out is not None and out.suffix.lower() not in FORMS:
            raise ConfigError(f"--out {out} has to end in {', '.join(FORMS)}.")
        from langgraph_pingpong.viz.graph import draw_streaming

        build = load_build(graph)
        drawn = build_graph(build, _model_to_draw(devices), parse_options(build, settings or []))
        events = _events(trace) if trace else []
        if out is None:
            typer.echo(draw_streaming(drawn, trace=events), nl=False)
            return
        picture = draw_streaming(drawn, FORMS[out.suffix.lower()], trace=events)
        _write(out, picture if isinstance(picture, bytes) else picture.encode())
        typer.echo(f"Wrote {out}")


def _model_to_draw(devices: str | None) -> ChatPingPong:
    """A model that knows its devices and has no weights: modelled engines stand in for the real ones."""
    from langgraph_pingpong.chat_model import ChatPingPong
    from langgraph_pingpong.config import default_devices, parse_devices
    from langgraph_pingpong.engines.fake_engine import FakeEngine
    from langgraph_pingpong.pool import EnginePool

    places = parse_devices(devices.split(",") if devices else default_devices())
    return ChatPingPong(pool=EnginePool([FakeEngine(str(place)) for place in places]))


def _events(trace: Path) -> list[Event]:
    from langgraph_pingpong.trace import read_events

    events = read_events(trace)
    return [event for event in events if event.run.startswith("overlap-on-")] or events


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}.") from None
