"""Engines whose program was killed end by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.engines.orphans import GIVE_UP_AFTER_S, PARENT, end_with_parent
from langgraph_pingpong.engines.vllm_setup import engine_environment
from tests.engines_fixture import DEVICES

STARTS_A_CHILD = f"""
import os, subprocess, sys, time
from langgraph_pingpong.engines.orphans import end_with_parent

if sys.argv[1:] == ["child"]:
    end_with_parent()
    print("up", flush=True)
else:
    environment = {{**os.environ, "{PARENT}": (sys.argv[1:] or [str(os.getpid())])[0]}}
    program = [sys.executable, __file__, "child"]
    child = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
time.sleep(60)
"""

STARTS_AN_ENGINE = """
import time, psutil
from langgraph_pingpong import ChatPingPong

if __name__ == "__main__":
    model = ChatPingPong(devices={devices}, max_model_len=512).start()  # its engines end when nobody holds it
    print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(300)
"""


def killed(program: list[str], number: signal.Signals) -> list[psutil.Process]:
    """A program that tells the processes it started, and was ended then: those processes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, *program], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.send_signal(number)
    return children


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(STARTS_A_CHILD)
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ends_with_the_program_that_started_it(program: str, number: signal.Signals) -> None:
    children = killed([program], number)
    assert len(children) == 1
    assert psutil.wait_procs(children, timeout=GIVE_UP_AFTER_S)[1] == []


def test_a_process_that_somebody_else_started_stays(program: str) -> None:
    (child,) = killed([program, "1"], signal.SIGKILL)
    _, alive = psutil.wait_procs([child], timeout=2.5)
    assert alive == [child]
    child.kill()


def test_engines_know_their_program_and_vllm_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, "1")  # as an engine of another program would have it
    config = EngineConfig("m", parse_devices(["cpu:0"]))
    assert engine_environment(config, config.devices[0])[PARENT] == str(os.getpid())
    ours = [each for each in entry_points(group="vllm.general_plugins") if each.name == "langgraph_pingpong"]
    assert [each.load() for each in ours] == [end_with_parent]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_engine_ends_with_its_program(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(STARTS_AN_ENGINE.format(devices=DEVICES[:1]))
    children = killed([str(script)], signal.SIGKILL)
    assert len(children) >= 2
    assert psutil.wait_procs(children, timeout=2 * GIVE_UP_AFTER_S)[1] == []
