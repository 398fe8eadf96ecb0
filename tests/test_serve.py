"""`pingpong serve`: servers start together and end together. What they run here is a small stand-in for vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from langgraph_pingpong.cli import app
from langgraph_pingpong.config import EngineConfig, parse_base_urls, parse_devices
from langgraph_pingpong.engines import vllm_setup
from langgraph_pingpong.engines.server_processes import LocalServers, server_command
from langgraph_pingpong.engines.vllm_setup import engine_environment
from langgraph_pingpong.errors import ConfigError

STAND_IN = """
    import json, os, subprocess, sys, threading, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = os.environ.get("VLLM_API_KEY")
            known = not wanted or self.headers["Authorization"] == f"Bearer {wanted}"
            body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    print("cores", os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), flush=True)
    if os.environ["DEVICE"] in sys.argv:
        sys.exit("no memory left on the device")
    child = subprocess.Popen([sys.executable, "-c", STUBBORN])
    print("child", child.pid, flush=True)
    for _ in range(9):
        print("nanobind: leaked 514 functions!\\n - leaked function\\n - ... skipped remainder", flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
"""

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

PROGRAM = """
    import sys
    from langgraph_pingpong.engines import server_processes, vllm_setup

    environment = server_processes.engine_environment
    server_processes.engine_environment = lambda config, device: {{
        **environment(config, device), "DEVICE": str(device)
    }}
    server_processes.server_command = lambda config: [sys.executable, {stand_in!r}, *{fails!r}]
    vllm_setup.check_cpu_memory = lambda config: None
    from langgraph_pingpong.cli import app
    app()
"""

DEVICES = ("cpu:0", "cpu:1")

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two devices need two cores")


@dataclass
class Serving:
    """A running `pingpong serve`."""

    process: subprocess.Popen[str]
    logs: Path

    def wait_for(self, text: str) -> str:
        """The line that holds a text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return line
        raise AssertionError(f"no {text!r}; stderr: {self.process.stderr and self.process.stderr.read()}")

    def ends(self, code: int) -> str:
        """Its error output, once it has ended with an exit code."""
        _, errors = self.process.communicate(timeout=30)
        assert self.process.returncode == code, errors
        return errors

    def said(self, device: str, word: str) -> int:
        """The number after a word in a server's log."""
        log = (self.logs / f"{device.replace(':', '-')}.log").read_text()
        return int(log.split(f"{word} ")[1].split()[0])

    def children(self) -> list[int]:
        return [self.said(device, "child") for device in DEVICES]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def serve(tmp_path: Path, model_folder: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*arguments: str, fails: tuple[str, ...] = ()) -> Serving:
        stand_in = tmp_path / "stand_in.py"
        stand_in.write_text(f"STUBBORN = {STUBBORN!r}\n{textwrap.dedent(STAND_IN)}")
        program = textwrap.dedent(PROGRAM).format(fails=fails, stand_in=str(stand_in))
        command = [sys.executable, "-c", program, "serve", "--devices", ",".join(DEVICES), "--model", str(model_folder)]
        process = subprocess.Popen(
            [*command, "--logs", str(tmp_path / "logs"), "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "NO_PROXY": "*"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        started.append(Serving(process, tmp_path / "logs"))
        return started[-1]

    yield start
    for serving in started:
        if serving.process.poll() is None:
            serving.process.terminate()
        serving.process.communicate(timeout=30)


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "Interrupted.\n"), (signal.SIGTERM, 0, ""), (signal.SIGHUP, 0, "")],
)
def test_a_signal_ends_all_servers_and_what_they_started(
    serve: Callable[..., Serving], number: signal.Signals, code: int, words: str
) -> None:
    serving = serve()
    assert serving.wait_for("Ready after").count("http://127.0.0.1:") == 2
    children = serving.children()
    serving.process.send_signal(number)
    assert serving.ends(code) == words
    assert gone(children)


def test_a_signal_while_they_start_ends_them_too(serve: Callable[..., Serving]) -> None:
    serving = serve()
    serving.wait_for("Starting cpu:1")
    serving.process.send_signal(signal.SIGTERM)
    serving.ends(0)


def test_one_that_dies_ends_the_others_and_its_log_is_shown(serve: Callable[..., Serving]) -> None:
    serving = serve()
    serving.wait_for("Ready after")
    children = serving.children()
    os.kill(psutil.Process(children[1]).ppid(), signal.SIGKILL)
    errors = serving.ends(1)
    assert "Error: The server on cpu:1 ended with exit code -9." in errors
    assert f"child {children[1]}" in errors
    assert "leaked" not in errors
    assert "--logs FOLDER" in errors
    assert gone(children)


def test_one_that_does_not_start_ends_the_others_and_its_log_is_shown(serve: Callable[..., Serving]) -> None:
    errors = serve(fails=("cpu:1",)).ends(1)
    assert "Error: The server on cpu:1 did not start." in errors
    assert "no memory left on the device" in errors


def test_each_has_cores_of_its_own(serve: Callable[..., Serving]) -> None:
    serving = serve()
    serving.wait_for("Ready after")
    bound = [(serving.logs / f"cpu-{index}.log").read_text().split()[1] for index in range(2)]
    assert all(bound) and set(bound[0].split(",")).isdisjoint(bound[1].split(","))


def test_a_key_from_the_environment_is_asked_for(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret-key")
    serving = serve()
    assert "s3cret-key" not in serving.wait_for("Ready after")
    command = psutil.Process(psutil.Process(serving.children()[0]).ppid()).cmdline()
    assert "s3cret-key" not in " ".join(command)


class TestRefusals:
    def serve(self, model_folder: Path, *arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), *arguments])
        return result.exit_code, result.stderr

    def test_of_a_key_that_no_client_can_send(self, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_API_KEY", "s3cret-key\n")
        code, errors = self.serve(model_folder)
        assert code == 2
        assert "line break" in errors and "s3cret" not in errors

    def test_of_a_port_that_is_taken(self, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_setup, "check_cpu_memory", lambda config: None)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            code, errors = self.serve(model_folder, "--devices", "cpu:0", "--port", str(port))
        assert code == 2
        assert f"Error: Port {port} of 127.0.0.1 cannot be used" in errors

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--devices", "fake:0"), "A server needs a real device"),
            (("--devices", "cpu:4095"), "cpu:4095 does not exist"),
            (("--devices", "cpu:0", "--engine-args", "[1]"), "--engine-args [1] is no JSON object"),
            (("--devices", "cpu:0", "--engine-args", "{"), "is no JSON object"),
        ],
    )
    def test_of_what_cannot_work(self, model_folder: Path, arguments: tuple[str, ...], words: str) -> None:
        code, errors = self.serve(model_folder, *arguments)
        assert (code, words in " ".join(errors.split())) == (2, True), errors


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(("host", "reached"), [("::1", "[::1]"), ("::", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])
def test_addresses_of_both_kinds_can_be_listened_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, reached: str
) -> None:
    monkeypatch.setattr(vllm_setup, "check_cpu_memory", lambda config: None)
    config = EngineConfig("m", parse_devices(DEVICES))
    servers = LocalServers(config, tmp_path, host=host)
    ports = [server.port for server in servers.servers]
    assert servers.base_urls == [f"http://{reached}:{port}/v1" for port in ports]
    with socket.create_server((host, ports[0]), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        assert [str(address) for address in parse_base_urls(servers.base_urls)] == [f"{reached}:{p}" for p in ports]
        with pytest.raises(ConfigError, match=f"Port {ports[0]} of {host} cannot be used"):
            LocalServers(config, tmp_path, host=host, port=ports[0])


class TestCommand:
    def command(self, devices: list[str], **settings: object) -> str:
        config = EngineConfig("m", parse_devices(devices), **settings)  # type: ignore[arg-type]
        return " ".join(server_command(config)[1:])

    def test_on_a_cpu_has_what_streaming_edges_need(self) -> None:
        command = self.command(["cpu:0", "cpu:1"], dtype="float32")
        assert command.startswith("-m vllm.entrypoints.openai.api_server ")
        for option in (
            "--model m",
            "--dtype float32",
            "--block-size 32",
            "--enable-prefix-caching",
            "--scheduling-policy priority",
            "--enable-prompt-tokens-details",
        ):
            assert f"{option} " in f"{command} "
        assert "log-stats" not in command

    def test_on_gpus_takes_any_argument(self) -> None:
        arguments = {
            "compilation_config": {"mode": 0},
            "cudagraph_capture_sizes": [1, 2],
            "async_scheduling": False,
        }
        command = self.command(["cuda:0", "cuda:2"], tensor_parallel_size=2, engine_args=arguments)
        assert "--tensor-parallel-size 2" in command
        assert '--compilation-config {"mode": 0}' in command
        assert "--cudagraph-capture-sizes 1 2" in command
        assert "--no-async-scheduling" in command
        assert "block-size" not in command

    def test_on_gpus_each_server_sees_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        config = EngineConfig("m", parse_devices(["cuda:0", "cuda:2"]), tensor_parallel_size=2)
        seen = [engine_environment(config, device)["CUDA_VISIBLE_DEVICES"] for device in config.devices]
        assert seen == ["4,5", "6,7"]


def test_servers_that_were_never_started_can_be_stopped(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_setup, "check_cpu_memory", lambda config: None)
    with LocalServers(EngineConfig(str(model_folder), parse_devices(["cpu:0"])), tmp_path) as servers:
        assert len(servers.base_urls) == 1
    servers.stop()
