"""`pingpong serve`: one vLLM server for each device, started and stopped together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from langgraph_pingpong.cli.plain_errors import plain_errors
from langgraph_pingpong.errors import ConfigError
from langgraph_pingpong.exact import Exact
from langgraph_pingpong.signals import ended_by_signals

if TYPE_CHECKING:
    from langgraph_pingpong.engines.server_processes import LocalServers


def serve(  # noqa: PLR0913 - a parameter for each option
    devices: Annotated[
        str | None, typer.Option(help="One server each, like cuda:0,cuda:1; without it two if there are.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder or Hugging Face id; without it a small default model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The first server's; others follow. 0: free ones.", min=0)] = 8000,
    dtype: Annotated[str | None, typer.Option(help="vLLM's dtype, like bfloat16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt plus answer, in tokens.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory that vLLM may take.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="GPUs of one server, from its device on.")] = None,
    exact: Annotated[
        Exact, typer.Option(help="bits: an answer does not depend on what was cached or runs beside it; slower.")
    ] = "ids",
    same_device: Annotated[
        bool, typer.Option("--same-device", help='For overlap="same-device": prefills ride on decode steps.')
    ] = False,
    engine_args: Annotated[
        str | None, typer.Option(metavar="JSON", help="Other arguments of vLLM's engine, under vLLM's names.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
) -> None:
    """Start a vLLM server for each device, for ChatPingPong(base_urls=[...]).

    They end together: at an interrupt, or when one of them ends. The key to ask for is read from VLLM_API_KEY.
    """
    settings = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        "tensor_parallel_size": tensor_parallel_size,
        "exact": exact,
        "same_device": same_device,
        "engine_args": _read_engine_args(engine_args),
    }
    console = Console()
    with plain_errors(), ended_by_signals(lambda _: 0), ExitStack() as stack:  # to be ended is no error
        folder = logs or Path(stack.enter_context(TemporaryDirectory(prefix="pingpong-serve-")))
        servers = stack.enter_context(_prepare(model, devices, settings, folder)(host=host, port=port))
        _run(servers, console)


def _prepare(
    model: str | None, devices: str | None, settings: dict[str, Any], logs: Path
) -> Callable[..., LocalServers]:
    """What makes the servers, given where they listen."""
    from langgraph_pingpong.config import EngineConfig, default_devices, parse_devices, resolve_model
    from langgraph_pingpong.engines.server_processes import LocalServers  # here: --help need not wait for it

    places = parse_devices(devices.split(",") if devices else default_devices())
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {logs} cannot be written: {error.strerror}.") from None
    return partial(LocalServers, EngineConfig(resolve_model(model), places, **settings), logs)


def _run(servers: LocalServers, console: Console) -> None:
    started = time.monotonic()
    for server in servers.servers:
        console.print(f"Starting {server.device} at {server.base_url} ...", highlight=False, soft_wrap=True)
    servers.start()
    console.print(f"Ready after {time.monotonic() - started:.0f} s: base_urls={servers.base_urls}", soft_wrap=True)
    servers.watch()


def _read_engine_args(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return TypeAdapter(dict[str, Any]).validate_python(json.loads(text))
    except (ValueError, ValidationError):
        raise typer.BadParameter(f"--engine-args {text} is no JSON object.") from None
