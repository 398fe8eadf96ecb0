"""`pingpong bench`: a workload in several modes, alternating, every run written down with all that happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from langgraph_pingpong.bench.modes import Order, Scale, scale_of
from langgraph_pingpong.cli.plain_errors import plain_errors
from langgraph_pingpong.exact import Exact

if TYPE_CHECKING:
    from langgraph_pingpong.bench.engine_sets import EngineSettings
    from langgraph_pingpong.bench.runner import Plan

_ENGINES = "Model and engines"
_WORK = "Workload"

Output = Annotated[Path, typer.Option(help="Lines of JSON; what is in the file is not run again.")]
ProfileName = Annotated[
    str,
    typer.Option(help="long-prefill, sweep, messages, multiturn, debate, rag or tool-agents.", rich_help_panel=_WORK),
]
Modes = Annotated[str, typer.Option(help="Comma-separated; --list shows all.")]
ModeOrder = Annotated[Order, typer.Option(help="alternate: every other round goes backwards; or fixed.")]
Values = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=1,2,3", help="Values of a parameter of the profile.", rich_help_panel=_WORK),
]
ScaleName = Annotated[
    Scale | None, typer.Option(help="The profile's values for gpu, cpu or fake.", rich_help_panel=_WORK)
]
Chains = Annotated[str, typer.Option(help="Chains at once, for the modes that take several.", rich_help_panel=_WORK)]
Devices = Annotated[str | None, typer.Option(help="Like 0,1 or cuda:0,cuda:1.", rich_help_panel=_ENGINES)]
ModelName = Annotated[
    str | None, typer.Option(help="A folder or Hugging Face id; without it a small one.", rich_help_panel=_ENGINES)
]
Dtype = Annotated[str | None, typer.Option(help="vLLM's dtype, like bfloat16.", rich_help_panel=_ENGINES)]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Longest prompt plus answer.", rich_help_panel=_ENGINES)]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Share of a GPU's memory for all engines on it together.",
        show_default="0.85, or 0.92 for more than three",
        rich_help_panel=_ENGINES,
    ),
]
ExactName = Annotated[Exact, typer.Option(help="ids, or bits for engines that always round alike.")]
EngineArgs = Annotated[
    str, typer.Option(metavar="JSON", help="More of vLLM's engine arguments.", rich_help_panel=_ENGINES)
]
Defer = Annotated[
    bool,
    typer.Option(
        "--defer-downstream-until-first-token/--no-defer-downstream-until-first-token",
        help="Prefill the next prompt from the upstream's first token on, or from its start.",
    ),
]
Lazy = Annotated[
    bool,
    typer.Option(
        "--lazy-precreate/--no-lazy-precreate",
        help="A static prefix waits for its upstream, or all are prefilled from the start of the run on.",
    ),
]
Runs = Annotated[int, typer.Option(min=1, help="Counted runs of each mode.")]
WarmupRuns = Annotated[int, typer.Option(min=0, help="Runs before them, written and not counted.")]
ForceTokens = Annotated[bool, typer.Option(help="Answers go on to their limit, whatever they say.")]
StrictTokens = Annotated[bool, typer.Option(help="A forced answer of another length makes the run fail.")]
Seed = Annotated[int, typer.Option(help="Of the texts and of sampling.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
StopAfter = Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin no run that would end later.")]
Title = Annotated[str, typer.Option(help="What reports call the file.")]
Show = Annotated[bool, typer.Option("--list", help="Show modes and profiles, and exit.")]


def bench(  # noqa: PLR0913 - a parameter for each option
    output: Output = Path("results.jsonl"),
    profile: ProfileName = "long-prefill",
    modes: Modes = "serial,pingpong",
    runs: Runs = 10,
    warmup_runs: WarmupRuns = 1,
    mode_order: ModeOrder = "alternate",
    values: Values = None,
    scale: ScaleName = None,
    chains: Chains = "1",
    devices: Devices = None,
    model: ModelName = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: GpuMemory = None,
    exact: ExactName = "ids",
    engine_args: EngineArgs = "{}",
    defer: Defer = True,
    lazy: Lazy = True,
    force_max_output_tokens: ForceTokens = True,
    strict_output_tokens: StrictTokens = True,
    seed: Seed = 42,
    temperature: Temperature = 0.0,
    stop_after: StopAfter = None,
    title: Title = "",
    show: Show = False,
) -> None:
    """Measure a workload in several modes, one program, run by run, and keep every run.

    A file that is there is gone on with. The exit code is 1 if a run is not complete; `pingpong report` shows files.
    """
    with plain_errors():
        if show:
            _list()
            raise typer.Exit
        memory, args = gpu_memory_utilization, read_engine_args(engine_args)
        settings = _settings(devices, model, dtype, max_model_len, memory, exact, args)
        switches = {"force_tokens": force_max_output_tokens, "strict_tokens": strict_output_tokens}
        switches |= {"defer": defer, "lazy": lazy}
        order = {"runs": runs, "warmup_runs": warmup_runs, "order": mode_order, "seed": seed}
        work = profile, values or [], scale or scale_of(settings.kind)
        plan = _plan(work, modes, chains, **order, **switches)
        from langgraph_pingpong.bench.kit import Job, Kit

        kit = Kit(settings, Console(), {"temperature": temperature, "seed": seed}, stop_after)
        left = kit.run([Job(plan, output, title)])
        rest = f"{left} runs are left: the same command goes on." if left else "All runs are there."
        kit.console.print(f"{rest} {output}", highlight=False, soft_wrap=True)


def _settings(devices: str | None, *settings: Any) -> EngineSettings:
    from langgraph_pingpong.bench.engine_sets import EngineSettings, places_of

    return EngineSettings(places_of(devices), *settings)


def _plan(work: tuple[str, list[str], Scale], modes: str, chains: str, **settings: Any) -> Plan:
    from langgraph_pingpong.bench.modes import parse_modes
    from langgraph_pingpong.bench.profiles import PROFILES, parse_chains, parse_values
    from langgraph_pingpong.bench.runner import Plan
    from langgraph_pingpong.config import refuse_unknown

    profile, values, scale = work
    refuse_unknown([profile], PROFILES, "The benchmark")
    cases = list(PROFILES[profile].cases(scale, parse_values(values)))
    return Plan(PROFILES[profile], cases, parse_modes(modes), parse_chains(chains), **settings)


def read_engine_args(text: str) -> dict[str, Any]:
    """A JSON object from the text of `--engine-args`.

    Raises:
        BadParameter: it is none.
    """
    try:
        return TypeAdapter(dict[str, Any]).validate_python(json.loads(text))
    except (ValueError, ValidationError):
        raise typer.BadParameter(f"--engine-args {text} is no JSON object.") from None


def _list() -> None:
    from langgraph_pingpong.bench.modes import MODES
    from langgraph_pingpong.bench.profiles import PROFILES

    console = Console()
    for mode in MODES.values():
        console.print(f"{mode.name}: {mode.about}", highlight=False)
    for profile in PROFILES.values():
        values = ", ".join(profile.values["gpu"])
        console.print(f"\n{profile.name} ({values}): {profile.about}", highlight=False)
