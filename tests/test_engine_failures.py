"""Real engines whose processes are killed: runs finish elsewhere, and the dead come back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from langchain_core.messages import AIMessage

from graphs.briefs import read_text
from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.vllm_engine import VllmEngine
from langgraph_pingpong.errors import EngineDead
from langgraph_pingpong.trace import Event
from tests.conftest import Recorder, wait_until
from tests.engines_fixture import DEVICES

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BACK_WITHIN_S = 240.0
NO_HANG_S = 10.0
TASK = {"task": "Explain this text to a new reader.\n\n" + read_text("documents/river_gauge.md")}


@pytest.fixture
def model(real_model: ChatPingPong) -> ChatPingPong:
    """The pair of all tests: whoever kills an engine of it waits for its return."""
    return real_model


@pytest.fixture
def record(model: ChatPingPong) -> Iterator[Recorder]:
    """What happens in one test. At its end every engine is back."""
    recorder = Recorder(model)
    yield recorder
    pool = model._serving().pool
    wait_until(lambda: all(place.up for place in pool._placement.places), BACK_WITHIN_S, f"return of {pool}")
    model.trace._sinks.remove(recorder.events.append)


@pytest.fixture(scope="module")
def expected(real_model: ChatPingPong) -> tuple[dict[str, Any], list[str]]:
    """What the chain gives, and the digests of its prompts."""
    from tests.conftest import Lab

    real_model.reset_prefix_cache()
    recorder = Recorder(real_model)
    state = Lab().chain(real_model).invoke(TASK)
    real_model.trace._sinks.remove(recorder.events.append)
    return state, digests(recorder)


def digests(recorder: Recorder) -> list[str]:
    """Those of the chain's prompts."""
    return [event.data["prompt_sha256"] for event in recorder.named("generate.started") if event.node]


def processes_of(model: ChatPingPong, index: int) -> list[psutil.Process]:
    """The processes that vLLM manages for an engine."""
    engine = model._serving().pool.engines[index]
    assert isinstance(engine, VllmEngine)
    manager = engine._engine.engine_core.resources.engine_manager  # type: ignore[attr-defined]
    return [psutil.Process(process.pid) for process in manager.processes]


def kill(model: ChatPingPong, index: int, by: signal.Signals = signal.SIGKILL) -> None:
    """End the process of an engine as an operator or the kernel would."""
    for process in processes_of(model, index):
        assert process in psutil.Process().children(recursive=True)
        os.kill(process.pid, by)


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


# test_failover.py has the other moments, on modelled engines.


def test_killed_during_the_first_nodes_decode_with_others_running(
    model: ChatPingPong, record: Recorder, expected: tuple[dict[str, Any], list[str]], lab: Lab
) -> None:
    """Case 19: the engine dies for all users. Here those on the other engine notice nothing."""
    questions = [f"Count to {number}, in words." for number in range(3, 9)]
    plain = [answer.text for answer in model.batch(questions)]
    model.reset_prefix_cache()
    asked: list[Future[AIMessage]] = []
    with ThreadPoolExecutor(len(questions)) as threads:

        def ask() -> None:
            asked.extend(threads.submit(model.invoke, question) for question in questions)

        with at(model, "first_token", "writer", ask, 0.0), at(model, "first_token", "", lambda: kill(model, 0), 0.2):
            assert lab.chain(model).invoke(TASK) == expected[0]
        answers = [each.result() for each in asked]
    assert [answer.text for answer in answers] == plain
    certificates = [answer.response_metadata["pingpong"] for answer in answers]
    assert {each["device"] for each in certificates if each["fallback"]} == {DEVICES[1]}
    assert any(each["fallback"] is None for each in certificates)
    assert digests(record) == expected[1]
    assert all(record.certificate(each)["ids_equal"] for each in ("writer", "critic"))
    assert died(record) == (DEVICES[0], f"The engine on {DEVICES[0]} died.")
    (moved,) = record.named("failover", "writer")
    assert moved.device == DEVICES[1]
    assert 0 < moved.data["said"] < 24
    serves_again(model, record, expected, lab)


def test_killed_during_the_edges_prefill(
    model: ChatPingPong, record: Recorder, expected: tuple[dict[str, Any], list[str]], lab: Lab
) -> None:
    model.reset_prefix_cache()
    with at(model, "append.started", "critic", lambda: kill(model, 1), 0.2):
        assert lab.chain(model).invoke(TASK) == expected[0]
    assert digests(record) == expected[1]
    assert all(record.certificate(each)["ids_equal"] for each in ("writer", "critic"))
    assert died(record) == (DEVICES[1], f"The engine on {DEVICES[1]} died.")
    serves_again(model, record, expected, lab)


def died(record: Recorder) -> tuple[str | None, str]:
    """Which engine, and how."""
    event = record.wait_for("engine.died")
    return event.device, event.data["error"]


def serves_again(model: ChatPingPong, record: Recorder, expected: tuple[dict[str, Any], list[str]], lab: Lab) -> None:
    """The engine that died comes back, and the chain is as ever on both."""
    record.wait_for("engine.restarted", within_s=BACK_WITHIN_S)
    assert lab.chain(model).invoke(TASK) == expected[0]
    assert {event.device for event in record.named("generate.started")[-2:]} == set(DEVICES)


def test_told_to_end_during_the_first_nodes_decode(
    model: ChatPingPong, record: Recorder, expected: tuple[dict[str, Any], list[str]], lab: Lab
) -> None:
    """vLLM then ends its answers as if they were complete, with the finish reason `abort`."""
    with at(model, "first_token", "writer", lambda: kill(model, 0, signal.SIGTERM), 0.2):
        assert lab.chain(model).invoke(TASK) == expected[0]
    (moved,) = record.named("failover", "writer")
    assert 0 < moved.data["said"] < 24
    assert died(record)[0] == DEVICES[0]
    serves_again(model, record, expected, lab)


def test_killed_while_idle(
    model: ChatPingPong, record: Recorder, expected: tuple[dict[str, Any], list[str]], lab: Lab
) -> None:
    model.reset_prefix_cache()  # a run may start where its prompt is cached
    kill(model, 0)
    time.sleep(2)
    assert lab.chain(model).invoke(TASK) == expected[0]
    assert digests(record) == expected[1]
    assert record.named("failover", "writer")[0].data["said"] == 0


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
    assert model._serving().pool._placement.up() == [0, 1]  # none is up: all are as good
    with pytest.raises(EngineDead, match="No engine is left"):
        model.invoke("Hello.")
    wait_until(lambda: len(record.named("engine.restarted")) == 2, BACK_WITHIN_S, "return of both")
    assert model.invoke("Hello.").text


def test_a_reset_does_not_wait_for_the_dead_and_closing_during_a_restart_leaves_no_process(
    spare_model: ChatPingPong,
) -> None:
    """On an engine of its own, which is closed."""
    processes = processes_of(spare_model, 0)
    known = set(psutil.Process().children(recursive=True))
    kill(spare_model, 0)
    began = time.monotonic()
    spare_model.reset_prefix_cache()
    assert time.monotonic() - began < NO_HANG_S, "a reset does not wait for the dead"
    wait_until(lambda: set(psutil.Process().children(recursive=True)) - known, BACK_WITHIN_S, "begin of the restart")
    new = set(psutil.Process().children(recursive=True)) - known
    spare_model.close()
    _, alive = psutil.wait_procs([*processes, *new], timeout=NO_HANG_S)
    assert [child for child in alive if "resource_tracker" not in " ".join(child.cmdline())] == []
