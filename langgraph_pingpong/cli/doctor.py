"""`pingpong doctor`: what this machine is, what fits on it, and which topology suits a workload."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from langgraph_pingpong.cli.bench import read_engine_args
from langgraph_pingpong.cli.plain_errors import plain_errors
from langgraph_pingpong.engines.vllm_setup import cpu_kv_cache_gib

if TYPE_CHECKING:
    from langgraph_pingpong.bench.cost_model import Across, Speeds, Workload
    from langgraph_pingpong.bench.doctor import Answers, Fit, Sizes
    from langgraph_pingpong.bench.document import Block
    from langgraph_pingpong.bench.engine_sets import EngineSettings
    from langgraph_pingpong.pool import EnginePool

_WORK = "Workload"
_KNOWN = "What only you know"


def doctor(  # noqa: PLR0913 - a parameter for each option
    devices: Annotated[str | None, typer.Option(help="Like 0,1 or cuda:0,cuda:1.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or Hugging Face id; without it a small one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="vLLM's dtype, like bfloat16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt plus answer.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of a GPU's memory for an engine.")] = 0.85,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="More of vLLM's engine arguments.")] = "{}",
    calibrate: Annotated[bool, typer.Option(help="Start engines and measure them; without it no advice.")] = True,
    tp: Annotated[bool, typer.Option("--tp", help="Measure an engine over all devices, too.")] = False,
    agents: Annotated[int, typer.Option(min=2, help="Agents in a row.", rich_help_panel=_WORK)] = 5,
    static: Annotated[int, typer.Option(min=0, help="Tokens that each knows before.", rich_help_panel=_WORK)] = 4096,
    document: Annotated[int, typer.Option(min=0, help="Tokens that the first reads.", rich_help_panel=_WORK)] = 1024,
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.", rich_help_panel=_WORK)] = 256,
    last_output: Annotated[int, typer.Option(min=1, help="Tokens of the last one.", rich_help_panel=_WORK)] = 64,
    chains: Annotated[int, typer.Option(min=1, help="Chains at once.", rich_help_panel=_WORK)] = 1,
    reusable: Annotated[
        bool | None, typer.Option("--reusable/--not-reusable", help="Pieces come again.", rich_help_panel=_KNOWN)
    ] = None,
    branches: Annotated[
        bool | None, typer.Option("--branches/--no-branches", help="Branches share prefixes.", rich_help_panel=_KNOWN)
    ] = None,
    first_token: Annotated[
        bool | None,
        typer.Option("--first-token/--no-first-token", help="Its time matters.", rich_help_panel=_KNOWN),
    ] = None,
) -> None:
    """Look at the machine, measure it in a minute or two, and say which topology suits a workload, with reasons."""
    with plain_errors():
        from langgraph_pingpong.bench.cost_model import Workload
        from langgraph_pingpong.bench.doctor import Answers
        from langgraph_pingpong.bench.document import to_console
        from langgraph_pingpong.bench.engine_sets import EngineSettings, places_of

        settings = EngineSettings(
            places_of(devices),
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            engine_args=read_engine_args(engine_args),
        )
        work = Workload(agents, static, document, output, last_output, chains)
        answers = Answers(reusable, branches, first_token)
        to_console(_blocks(settings, work, answers, calibrate, tp), Console())


def _blocks(settings: EngineSettings, work: Workload, answers: Answers, calibrate: bool, tp: bool) -> Iterator[Block]:
    from langgraph_pingpong.bench.cost_model import Place, advise
    from langgraph_pingpong.bench.doctor import advice_blocks, checklist, free_share, machine_blocks
    from langgraph_pingpong.bench.document import Heading, Table, Text

    free = free_share(settings.devices)  # before an engine takes its part
    sizes, fits = _fit(settings)
    found = _measure(settings, tp) if calibrate else None
    yield from machine_blocks(settings.devices, sizes, fits, found.appends if found else None)
    if found is not None:
        twice, gpus = fits is None or fits.twice, settings.kind != "cpu"
        place = Place(
            len(settings.devices), _link(settings), twice, found.speeds, found.tp, gpus, found.alone, found.across
        )
        yield from advice_blocks(work, place, advise(work, place))
        yield Text(f"Measured in {found.took_s:.0f} s, the engines' start aside.")
    yield Heading("Checklist", 1)
    yield Table(["question", "answer"], checklist(work, answers, free))


def _fit(settings: EngineSettings) -> tuple[Sizes | None, Fit | None]:
    """Modelled engines have no weights."""
    from langgraph_pingpong.bench.doctor import fit, sizes_of
    from langgraph_pingpong.config import EngineConfig, parse_devices, resolve_model

    if settings.kind == "fake":
        return None, None
    config = EngineConfig(resolve_model(settings.model), parse_devices(settings.devices), dtype=settings.dtype)
    sizes = sizes_of(config)
    return sizes, fit(settings.devices, sizes, settings.gpu_memory_utilization or 0.85, cpu_kv_cache_gib("1"))


@dataclass(frozen=True, slots=True)
class _Measured:
    """Speeds of one engine a device, of one over all devices, of one alone, and what engines cost each other.

    `appends` tells whether prompts may grow by deltas, `took_s` how long measuring took.
    """

    speeds: Speeds
    tp: Speeds | None
    alone: Speeds | None
    across: Across | None
    appends: bool
    took_s: float


def _measure(settings: EngineSettings, tp: bool) -> _Measured:
    """Start engines and measure them."""
    from langgraph_pingpong.bench.calibration import calibrate, calibrate_across, takes_appends

    several, took_s = len(settings.devices) > 1, 0.0
    with _engines(settings, ["dp2-serial" if several else "serial", *(["tp2-serial"] if tp else [])]) as pools:
        began, first = time.monotonic(), pools[0]
        speeds, *over_all = [pool.loop.run(calibrate(pool.engines[0])) for pool in pools]
        across = first.loop.run(calibrate_across(first.engines[0], first.engines[1], speeds)) if several else None
        appends = first.loop.run(takes_appends(first.engines[0]))
        took_s += time.monotonic() - began
    alone = None
    if several and settings.kind == "cpu":
        # An engine alone has the cores of all devices. It comes when the others are gone, which would slow it.
        with _engines(settings, ["serial"]) as (pool,):
            began = time.monotonic()
            alone = pool.loop.run(calibrate(pool.engines[0]))
            took_s += time.monotonic() - began
    return _Measured(speeds, over_all[0] if tp else None, alone, across, appends, took_s)


@contextmanager
def _engines(settings: EngineSettings, names: Sequence[str]) -> Iterator[list[EnginePool]]:
    """The pool of each of these modes, started."""
    from langgraph_pingpong.bench.engine_sets import EngineSets
    from langgraph_pingpong.bench.modes import MODES

    console, modes = Console(stderr=True), [MODES[name] for name in names]
    with EngineSets(settings, modes, {}) as sets:
        sets.start(lambda text: console.print(f"{text} ...", highlight=False))
        yield [sets.of(mode).pool for mode in modes]


def _link(settings: EngineSettings) -> str:
    """'nvlink' where all GPUs are joined by it, else 'other'."""
    from langgraph_pingpong.bench.doctor import links
    from langgraph_pingpong.bench.machine import output_of
    from langgraph_pingpong.config import Device

    if settings.kind != "cuda" or len(settings.devices) < 2:
        return "other"
    found = links(output_of("nvidia-smi", "topo", "-m"), [Device.parse(name).index for name in settings.devices])
    return "nvlink" if found and all(link.startswith("NV") for link in found.values()) else "other"
