"""Real engines whose processes are killed: runs finish elsewhere, and the dead come back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from graphs.briefs import read_text
from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.vllm_engine import VllmEngine
from langgraph_pingpong.errors import EngineDead
from langgraph_pingpong.trace import Event
from tests.conftest import Recorder, wait_until
from tests.engines_fixture import DEVICES, SETTINGS

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BACK_WITHIN_S = 240.0
NO_HANG_S = 10.0
TASK = {"task": "Explain this text to a new reader.\n\n" + read_text("documents/river_gauge.md")}
OWN = {**SETTINGS, "max_model_len": 4096, **({"gpu_memory_utilization": 0.1} if DEVICES[0].startswith("cuda") else {})}


@pytest.fixture(scope="module")
def model() -> Iterator[ChatPingPong]:
    """The default model on a pair of engines that may be killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with ChatPingPong(devices=DEVICES, temperature=0.0, max_tokens=24, **OWN) as pair:
            yield pair


@pytest.fixture
def record(model: ChatPingPong) -> Iterator[Recorder]:
    """What happens in one test. At its end every engine is back."""
    recorder = Recorder(model)
    yield recorder
    pool = model._serving().pool
    wait_until(lambda: all(place.up for place in pool._placement.places), BACK_WITHIN_S, f"return of {pool}")
    model.trace._sinks.remove(recorder.events.append)


@pytest.fixture(scope="module")
def expected(model: ChatPingPong) -> tuple[dict[str, Any], list[str]]:
    """What the chain gives, and the digests of its prompts."""
    from tests.conftest import Lab

    model.reset_prefix_cache()
    recorder = Recorder(model)
    state = Lab().chain(model).invoke(TASK)
    return state, digests(recorder)


def digests(recorder: Recorder) -> list[str]:
    return [event.data["prompt_sha256"] for event in recorder.named("generate.started")]


def kill(model: ChatPingPong, index: int) -> None:
    """End the process of an engine as an operator or the kernel would."""
    engine = model._serving().pool.engines[index]
    assert isinstance(engine, VllmEngine)
    for process in engine._engine.engine_core.resources.engine_manager.processes:  # type: ignore[attr-defined]
        assert process.pid in [child.pid for child in psutil.Process().children(recursive=True)]
        os.kill(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def at(model: ChatPingPong, name: str, node: str, act: Callable[[], None], later_s: float) -> Iterator[None]:
    """Act so long after the first event of a name."""
    pending = [threading.Timer(later_s, act)]

    def sink(event: Event) -> None:
        if pending and (event.name, event.node) == (name, node):
            pending.pop().start()

    with model.trace.subscribed(sink):
        yield
    assert not pending, f"there was no {name}"


MOMENTS = {
    "the first node's decode": (0, "first_token", "writer", 0.4),
    "the edge's prefill": (1, "append.started", "critic", 0.2),
}
"""Which engine is killed, and how many seconds after which event. test_failover.py has the others, on modelled ones."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_during(
    moment: str, model: ChatPingPong, record: Recorder, expected: tuple[dict[str, Any], list[str]], lab: Lab
) -> None:
    index, name, node, later_s = MOMENTS[moment]
    model.reset_prefix_cache()
    with at(model, name, node, lambda: kill(model, index), later_s):
        assert lab.chain(model).invoke(TASK) == expected[0]
    assert digests(record) == expected[1]
    assert all(record.certificate(each)["ids_equal"] for each in ("writer", "critic"))
    died = record.wait_for("engine.died")
    assert (died.device, died.data["error"]) == (DEVICES[index], f"The engine on {DEVICES[index]} died.")
    if "decode" in moment:
        (moved,) = record.named("failover")
        assert (moved.node, moved.device) == (node, DEVICES[1 - index])
        assert 0 < moved.data["said"] < 24
    record.wait_for("engine.restarted", within_s=BACK_WITHIN_S)
    assert lab.chain(model).invoke(TASK) == expected[0]
    assert {event.device for event in record.named("generate.started")[-2:]} == set(DEVICES)


def test_killed_while_idle(
    model: ChatPingPong, record: Recorder, expected: tuple[dict[str, Any], list[str]], lab: Lab
) -> None:
    kill(model, 0)
    time.sleep(2)
    assert lab.chain(model).invoke(TASK) == expected[0]
    assert digests(record) == expected[1]
    assert record.named("failover", "writer")[0].data["said"] == 0


def test_killed_in_mid_run_with_others_running(model: ChatPingPong, record: Recorder, lab: Lab) -> None:
    """Case 19: the engine dies for all users. Here those on the other engine notice nothing."""
    questions = [f"Count to {number}, in words." for number in range(3, 9)]
    plain = [model.invoke(question).text for question in questions]
    with ThreadPoolExecutor(len(questions)) as threads, at(model, "first_token", "", lambda: kill(model, 1), 0.2):
        answers = list(threads.map(model.invoke, questions))
    assert [answer.text for answer in answers] == plain
    certificates = [answer.response_metadata["pingpong"] for answer in answers]
    assert {each["device"] for each in certificates if each["fallback"]} == {DEVICES[0]}
    assert any(each["fallback"] is None for each in certificates)


def test_both_killed_is_one_clear_error(model: ChatPingPong, record: Recorder, lab: Lab) -> None:
    def both() -> None:
        kill(model, 0)
        kill(model, 1)

    began = time.monotonic()
    with at(model, "first_token", "writer", both, 0.2), pytest.raises(EngineDead) as caught:
        lab.chain(model).invoke(TASK)
    died = next(event.t for event in record.events if event.name == "engine.died")
    assert time.monotonic() - max(began, died) < NO_HANG_S
    assert [f"The engine on {device} died." in str(caught.value) for device in DEVICES] == [True, True]
    assert model._serving().pool._placement.usable(time.monotonic()) == [0, 1]  # none is up: all are as good
    with pytest.raises(EngineDead, match="No engine is left"):
        model.invoke("Hello.")
    wait_until(lambda: len(record.named("engine.restarted")) == 2, BACK_WITHIN_S, "return of both")
    assert model.invoke("Hello.").text


def test_a_reset_does_not_wait_for_the_dead_and_closing_during_a_restart_leaves_no_process(model: ChatPingPong) -> None:
    """The last one: it closes the pair."""
    pool = model._serving().pool
    ours = [engine._engine.engine_core.resources.engine_manager.processes for engine in pool.engines]  # type: ignore[attr-defined]
    before = [psutil.Process(process.pid) for processes in ours for process in processes]
    known = set(psutil.Process().children(recursive=True))
    kill(model, 0)
    began = time.monotonic()
    model.reset_prefix_cache()
    assert time.monotonic() - began < NO_HANG_S, "a reset does not wait for the dead"
    wait_until(lambda: set(psutil.Process().children(recursive=True)) - known, BACK_WITHIN_S, "begin of the restart")
    new = set(psutil.Process().children(recursive=True)) - known
    model.close()
    _, alive = psutil.wait_procs([*before, *new], timeout=NO_HANG_S)
    assert [child for child in alive if "resource_tracker" not in " ".join(child.cmdline())] == []
