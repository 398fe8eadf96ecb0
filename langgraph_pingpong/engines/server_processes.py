"""vLLM servers on this machine: one process a device, started and stopped together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from langgraph_pingpong.config import Device, EngineConfig
from langgraph_pingpong.engines.server_engine import NO_KEY
from langgraph_pingpong.engines.vllm_setup import check_machine, engine_environment
from langgraph_pingpong.errors import ConfigError, DeviceError, ServerEnded
from langgraph_pingpong.keys import check_key

KEY_VARIABLE = "VLLM_API_KEY"
"""Where vLLM finds the key to ask for. A key on the command line could be read by every user of the machine."""

STOP_WITHIN_S = 20.0
"""How long servers may take to end when asked to, in seconds; then they are killed."""

_POLL_S = 0.5
_LAST_LINES = 20
_NOISE = re.compile(r" - |nanobind: |See https://nanobind|.*resource_tracker|  warnings\.warn")
"""What native libraries say of their own clean-up when a process ends: it hides why it ended."""

# What streaming edges need of a server beyond what an engine in this process needs.
_SERVER_ARGS: dict[str, Any] = {
    "scheduling_policy": "priority",
    "enable_prompt_tokens_details": True,
    "disable_uvicorn_access_log": True,
}


@dataclass
class ServerProcess:
    """One server: where it runs, where it listens, and where it logs to."""

    device: Device
    host: str
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def base_url(self) -> str:
        """The base URL of its OpenAI API; a server that listens everywhere is reached on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it runs."""
        return self.process.poll() if self.process else None

    def start(self, config: EngineConfig) -> None:
        """Start the process, which takes seconds to minutes to be ready."""
        command = [*server_command(config), "--host", self.host, "--port", str(self.port)]
        environment = {**os.environ, **engine_environment(config, self.device), **_logging()}
        with self.log.open("wb") as log:
            # In a session of its own: an interrupt at the terminal reaches this process alone, which stops them all.
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def is_ready(self) -> bool:
        """Whether it serves its model."""
        from openai import APIConnectionError, InternalServerError, OpenAI

        key = os.environ.get(KEY_VARIABLE) or NO_KEY
        with OpenAI(base_url=self.base_url, api_key=key, max_retries=0, timeout=5.0) as client:
            try:
                client.models.list()
            except (APIConnectionError, InternalServerError):
                return False
        return True

    def last_lines(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join([line for line in lines if not _NOISE.match(line)][-_LAST_LINES:])
        return ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and the processes it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class LocalServers:
    """One vLLM server for each device of a configuration. Use it with `with`: servers end with the block."""

    def __init__(self, config: EngineConfig, logs: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Prepare servers on `port` and those that follow it, or on free ones if it is 0.

        Args:
            config: the model, the devices and vLLM's settings.
            logs: the folder for a log file of each server.
            host: where to listen.
            port: the first server's port.

        Raises:
            ConfigError: vLLM is missing, a device does not exist, memory does not suffice, or a port is taken.
            BadKey: no client could send the key in VLLM_API_KEY, for which the servers ask.
        """
        if config.devices[0].kind == "fake":
            raise DeviceError("A server needs a real device: cuda:N or cpu:N.")
        check_key(os.environ.get(KEY_VARIABLE))
        check_machine(config)
        self._config = config
        count = len(config.devices)
        ports = list(range(port, port + count)) if port else _free_ports(host, count)
        for each in ports:
            _check_port(host, each)
        self.servers = [
            ServerProcess(device, host, own, logs / f"{device.kind}-{device.index}.log")
            for device, own in zip(config.devices, ports, strict=True)
        ]

    @property
    def base_urls(self) -> list[str]:
        """One for each server, in the order of the devices."""
        return [server.base_url for server in self.servers]

    def start(self) -> None:
        """Start the servers; returns when all are ready.

        On GPUs one starts after the other: a second one finds the compiled code of the first, and memory is measured
        by difference. CPU servers have a fixed share of memory, and start together.

        Raises:
            ServerEnded: a server ended before it was ready; its last log lines are in the message.
        """
        together = self._config.devices[0].kind == "cpu"
        for server in self.servers:
            server.start(self._config)
            if not together:
                self._wait_until_ready(server)
        for server in self.servers:
            self._wait_until_ready(server)

    def _wait_until_ready(self, server: ServerProcess) -> None:
        while not server.is_ready():
            for ended in self._ended():
                raise ServerEnded(f"The server on {ended.device} did not start.\n{ended.last_lines()}")
            time.sleep(_POLL_S)

    def watch(self) -> None:
        """Return never; an interrupt ends it.

        Raises:
            ServerEnded: a server ended; its last log lines are in the message.
        """
        while True:
            for ended in self._ended():
                message = f"The server on {ended.device} ended with exit code {ended.exit_code}."
                raise ServerEnded(f"{message}\n{ended.last_lines()}")
            time.sleep(_POLL_S)

    def _ended(self) -> Iterator[ServerProcess]:
        return (server for server in self.servers if server.exit_code is not None)

    def stop(self) -> None:
        """End every server and whatever it started. Safe to call twice."""
        try:
            for server in self.servers:
                server.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_WITHIN_S
            while any(s.process and s.exit_code is None for s in self.servers) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:  # also at a second interrupt; a group outlives its first process if that left children behind
            for server in self.servers:
                server.signal(signal.SIGKILL)
                if server.process is not None:
                    server.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()


def server_command(config: EngineConfig) -> list[str]:
    """The command of a server, without host and port. Its device is in its environment."""
    needed = {name: value for name, value in _SERVER_ARGS.items() if name not in config.engine_args}
    args = {**config.vllm_args, **needed}
    args.pop("disable_log_stats")  # the metrics tell the block size
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_flags(args)]


def _flags(args: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of vLLM's engine as options of its server."""
    for name, value in args.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif isinstance(value, list | tuple):
            yield from (f"--{option}", *map(str, value))
        else:
            yield from (f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value))


def _logging() -> dict[str, str]:
    """Into a file a server may say more than an engine to the user's terminal."""
    return {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO")}


def _probe(host: str) -> socket.socket:
    """A socket that may listen there; vLLM's server takes addresses of both kinds, too."""
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _free_ports(host: str, count: int) -> list[int]:
    with contextlib.ExitStack() as stack:  # held together, so that they are different
        probes = [stack.enter_context(_probe(host)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _check_port(host: str, port: int) -> None:
    with _probe(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Port {port} of {host} cannot be used: {error}. Choose another with --port.") from None
