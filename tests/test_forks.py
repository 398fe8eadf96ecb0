"""A process that was forked from one with engines: it gets its own, and leaves those alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FORKS = """
import os, sys, warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from graphs.five_agents import build
from langgraph_pingpong import ChatPingPong, engine_pool
from langgraph_pingpong.errors import EngineDead

warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
MODEL = ChatPingPong(devices=["fake:0", "fake:1"])
ON_POOL = ChatPingPong(pool=engine_pool(devices=["fake:0"]))


def ask(question):
    return MODEL.invoke(question).text


def run(task):
    agents = build(MODEL, brief_tokens=50, max_tokens=20, last_max_tokens=5)
    return agents.invoke({"task": task, "document": "Tides turn. " * 50})


def ask_on_pool(question):
    try:
        return ON_POOL.invoke(question).text
    except EngineDead as error:
        return str(error)


def in_a_child(act):
    if (child := os.fork()) == 0:
        act()
        sys.exit(0)  # by the interpreter's usual end, finalizers included
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def tries():
    yield "never used there", in_a_child(lambda: None)
    yield "closed there", in_a_child(MODEL.close)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as workers:
        yield "asked", workers.submit(ask, "Hi.").result() == ask("Hi.")
        yield "a graph", workers.submit(run, "Hi.").result() == run("Hi.")
        yield "a pool of the parent's", workers.submit(ask_on_pool, "Hi.").result()


if __name__ == "__main__":
    ask("Hi."), ask_on_pool("Hi.")
    for name, result in tries():
        print(name, result, sep=": ", flush=True)
    print("still here", ask("Hi.") != "" and ask_on_pool("Hi.") != "", sep=": ")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_has_its_own_engines(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *others, pool, hint, still = done.stdout.splitlines()
    assert others == ["never used there: 0", "closed there: 0", "asked: True", "a graph: True"]
    assert pool == "a pool of the parent's: The engines belong to the process that this one was forked from."
    assert "create a new model or pool" in hint
    assert still == "still here: True"
