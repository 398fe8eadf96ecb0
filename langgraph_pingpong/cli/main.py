"""`pingpong run`: a graph by its import string, streamed to the terminal, measured, and compared with itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import typer
from rich.console import Console

from langgraph_pingpong.cli.bench import bench
from langgraph_pingpong.cli.doctor import doctor
from langgraph_pingpong.cli.graph import graph as draw_graph
from langgraph_pingpong.cli.live import LiveScreen
from langgraph_pingpong.cli.loading import build_graph, load_build, parse_options, read_input
from langgraph_pingpong.cli.plain_errors import plain_errors
from langgraph_pingpong.cli.report import NOTHING_AHEAD, SINCE, Run, compare_table, hold_together, run_table
from langgraph_pingpong.cli.results import report
from langgraph_pingpong.cli.screen import Screen
from langgraph_pingpong.cli.serve import serve
from langgraph_pingpong.cli.timeline import timeline
from langgraph_pingpong.errors import ConfigError, SettingOfServers
from langgraph_pingpong.exact import Exact
from langgraph_pingpong.trace import JsonLines

if TYPE_CHECKING:
    from langgraph_pingpong.chat_model import ChatPingPong
    from langgraph_pingpong.pool import EnginePool
    from langgraph_pingpong.serving import Serving
    from langgraph_pingpong.trace import Sink

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

Overlap = Literal["on", "off", "same-device"]

_MODEL = "Model and engines"

GraphName = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH", help="module[:attribute] of a function build(model, **options).", show_default=False
    ),
]
InputFile = Annotated[Path | None, typer.Option("--input", help="A text file: the state's 'document'.")]
Task = Annotated[str | None, typer.Option(help="The state's 'task'.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of build(); may be repeated.")
]
OverlapSwitch = Annotated[
    Overlap | None,
    typer.Option(help="off: the same program without prefills; same-device: also beside decodes.", show_default="on"),
]
Compare = Annotated[bool, typer.Option("--compare", help="Run with overlap off, then on, and compare.")]
Live = Annotated[
    bool, typer.Option("--live", help="Show a lane for each device, and what each agent does, while the graph runs.")
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Write every event to this file, as JSON lines.")]
ModelName = Annotated[
    str | None,
    typer.Option(help="A folder or Hugging Face id; without it a small default model.", rich_help_panel=_MODEL),
]
Devices = Annotated[
    str | None,
    typer.Option(help="One engine each, like cuda:0,cuda:1; without it two if there are.", rich_help_panel=_MODEL),
]
BaseUrls = Annotated[
    str | None,
    typer.Option(
        metavar="URL,URL", help="vLLM servers in place of devices; VLLM_API_KEY is their key.", rich_help_panel=_MODEL
    ),
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=_MODEL)]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_MODEL)]
Dtype = Annotated[str | None, typer.Option(help="vLLM's dtype, like bfloat16.", rich_help_panel=_MODEL)]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt plus answer, in tokens.", rich_help_panel=_MODEL)
]
GpuMemory = Annotated[
    float | None, typer.Option(help="Share of a GPU's memory that vLLM may take.", rich_help_panel=_MODEL)
]
ExactSwitch = Annotated[
    Exact | None,
    typer.Option(
        help="bits: answers equal to those with overlap off; slower.", show_default="ids", rich_help_panel=_MODEL
    ),
]
Defer = Annotated[
    bool,
    typer.Option("--defer/--no-defer", help="Prefill from the upstream's first token on, or from its start."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pingpong {version('langgraph-pingpong')}")
        raise typer.Exit


@app.callback()
def pingpong(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Streaming edges for LangGraph on vLLM: the next agent's prefill overlaps this agent's decode."""


app.command()(serve)
app.command()(bench)
app.command()(report)
app.command("graph")(draw_graph)
app.command()(timeline)
app.command()(doctor)


@app.command()
def run(  # noqa: PLR0913 - a parameter for each option
    graph: GraphName,
    input_file: InputFile = None,
    task: Task = None,
    settings: Settings = None,
    overlap: OverlapSwitch = None,
    compare: Compare = False,
    trace: TraceFile = None,
    live: Live = False,
    defer: Defer = True,
    model: ModelName = None,
    devices: Devices = None,
    base_urls: BaseUrls = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: GpuMemory = None,
    exact: ExactSwitch = None,
) -> None:
    """Run a graph, show what its agents say, and what each turn took.

    With --compare the exit code is 1 if any prompt differs between the runs.
    """
    engines = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        **({"exact": exact} if exact else {}),
        **({"same_device": True} if overlap == "same-device" else {}),
    }
    calls = {"temperature": temperature, "seed": seed, "defer_downstream": defer}
    modes: list[Overlap] = ["off", "on"] if compare else [overlap or "on"]
    console = Console()
    with plain_errors(), ExitStack() as stack:
        if compare and overlap:
            raise ConfigError("--compare runs with overlap off and on: leave out --overlap.")
        given = read_input(input_file, task)
        build = load_build(graph)
        options = parse_options(build, settings or [])
        lines = stack.enter_context(closing(_open_trace(trace))) if trace else None
        serving = _serve(model, devices, base_urls, engines)
        stack.callback(serving.pool.close)
        runner = _Runner(
            serving.pool, _make_model(model, serving, calls), console, lines, LiveScreen if live else Screen
        )
        runs = runner.run(lambda copy: build_graph(build, copy, options), given, modes)
    _report(runs, console, sampled=temperature > 0 and seed is None)


def _serve(model: str | None, devices: str | None, base_urls: str | None, engines: dict[str, Any]) -> Serving:
    # Imported here, as below: --help need not wait for it.
    from langgraph_pingpong.serving import make_serving, serving_of_servers

    if base_urls is None:
        return make_serving(model, devices.split(",") if devices else None, engines)
    if engines.get("exact") == "bits":
        raise SettingOfServers("--exact bits is up to the servers: start them with `pingpong serve --exact bits`.")
    for name, value in {"devices": devices, **engines}.items():
        if value is not None and name not in ("exact", "same_device"):
            raise SettingOfServers(f"--{name.replace('_', '-')} and --base-urls cannot go together.")
    return serving_of_servers(model, base_urls.split(","), {"api_key": os.environ.get("VLLM_API_KEY")})


def _make_model(model: str | None, serving: Serving, calls: dict[str, Any]) -> ChatPingPong:
    """A model on a pool of its own: unlike a model's own engines, a pool that is closed stays closed."""
    from langgraph_pingpong.chat_model import ChatPingPong

    return ChatPingPong(model=model, pool=serving.pool, tokenizer=serving.template.tokenizer, **calls)


def _open_trace(path: Path) -> JsonLines:
    try:
        return JsonLines(path)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error.strerror}.") from None


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs graphs on the engines of one model, one after the other, each from a cold cache."""

    pool: EnginePool
    model: ChatPingPong
    console: Console
    lines: JsonLines | None
    screen: type[Screen] = Screen

    def run(self, build: Callable[[ChatPingPong], Any], given: dict[str, str], modes: Sequence[Overlap]) -> list[Run]:
        """One run for each mode."""
        # Before the engines start: what is wrong with the graph shows at once.
        graphs = [build(self.model.model_copy(update={"overlap": mode})) for mode in modes]
        self._start()
        return [self._run_once(graph, given, mode) for graph, mode in zip(graphs, modes, strict=True)]

    def _start(self) -> None:
        # Plain lines: vLLM's processes write to the terminal meanwhile, and would tear anything that moves.
        devices = ", ".join(engine.device for engine in self.pool.engines)
        self.console.print(f"Starting the engines on {devices} ...", highlight=False)
        started = time.monotonic()
        self.pool.start()
        self.console.print(f"Ready after {time.monotonic() - started:.0f} s.\n", highlight=False)

    def _run_once(self, graph: Any, given: dict[str, str], overlap: Overlap) -> Run:
        self.pool.reset_prefix_cache()
        run, screen = Run(overlap), self.screen(self.console, self.model.get_num_tokens)
        sinks: list[Sink] = [run, screen, *([_naming(overlap, self.lines)] if self.lines else [])]
        self.console.rule(f"overlap {overlap}", align="left", style="dim")
        with ExitStack() as stack:
            for sink in sinks:
                stack.enter_context(self.model.trace.subscribed(sink))
            stack.enter_context(screen)
            run.state, run.e2e_ms = asyncio.run(self._stream(graph, given, screen))
        run.answers = screen.answers
        return run

    async def _stream(self, graph: Any, given: dict[str, str], screen: Screen) -> tuple[Any, float]:
        """Run the graph; returns its final state and the time it took, in ms."""
        state, started = None, time.monotonic()
        try:
            async for namespace, mode, item in graph.astream(
                given, _new_thread(), stream_mode=["messages", "values"], subgraphs=True
            ):
                if mode == "messages":
                    screen.hear(item[1]["langgraph_node"], item[0])
                elif not namespace:
                    state = item
        except asyncio.CancelledError:
            # An interrupt cancels this task, but not the threads of sync nodes: their calls end with the engines.
            await asyncio.to_thread(self.pool.close)
            raise
        return state, (time.monotonic() - started) * 1000


def _naming(overlap: Overlap, sink: Sink) -> Sink:
    """Makes the runs of a comparison tell apart by their names."""
    return lambda event: sink(replace(event, run=f"overlap-{overlap}-{event.run}"))


def _new_thread() -> dict[str, Any]:
    """What a graph with a checkpointer asks for."""
    return {"configurable": {"thread_id": uuid4().hex}}


def _report(runs: Sequence[Run], console: Console, sampled: bool) -> None:
    """The table, and for two runs the verdict, which decides the exit code."""
    last, verdict = runs[-1], hold_together(*runs) if len(runs) > 1 else None
    console.print(compare_table(*runs) if verdict else run_table(last))
    nothing_ahead = last.overlap == "on" and len(last.certificates) > 1 and not last.prefilled
    remarks = [SINCE, *([NOTHING_AHEAD] if nothing_ahead else []), *(verdict.lines(sampled) if verdict else [])]
    for line in remarks:
        console.print(line, highlight=False, soft_wrap=True)
    if verdict and not verdict.ids_equal:
        raise typer.Exit(1)
