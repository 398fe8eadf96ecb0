"""The pool: who gets which device, and engines that start once and end with their owner."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from langgraph.pregel._loop import PregelLoop

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine, session
from langgraph_pingpong.errors import DeviceError, EngineDead, EngineStartFailed
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Lab


@dataclass(eq=False)
class SlowStart(FakeEngine):
    """Takes a while to come up."""

    async def start(self) -> None:
        await asyncio.sleep(0.05)
        await super().start()


@dataclass(eq=False)
class NoStart(FakeEngine):
    """Does not come up."""

    async def start(self) -> None:
        raise EngineStartFailed("out of memory")


@dataclass(eq=False)
class NoStop(FakeEngine):
    """Does not go down either."""

    async def stop(self) -> None:
        raise OSError("no such process")


def pool_of(*kinds: type[FakeEngine]) -> EnginePool:
    return EnginePool([kind(f"fake:{index}") for index, kind in enumerate(kinds)])


def threads_of(pool: EnginePool) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread is pool.loop._thread]


class TestLeases:
    def test_the_engine_whose_turn_it_is_is_given(self) -> None:
        pool = pool_of(FakeEngine, FakeEngine)
        assert [pool.lease(index).index for index in (0, 0, 1, 2, 5)] == [0, 0, 1, 0, 1]
        assert repr(pool) == "<EnginePool fake:0=3 fake:1=2>"

    def test_a_lease_counts_from_the_moment_it_is_handed_out(self) -> None:
        pool = pool_of(FakeEngine, FakeEngine, FakeEngine)
        first = pool.lease(pool.start_of_run())
        second = pool.lease(pool.start_of_run())
        assert (first.index, second.index, pool.start_of_run()) == (0, 1, 2)
        first.release()
        assert pool.start_of_run() == 0

    def test_releasing_twice_counts_once(self) -> None:
        pool = pool_of(FakeEngine)
        lease, _other = pool.lease(0), pool.lease(0)
        lease.release()
        lease.release()
        assert repr(pool) == "<EnginePool fake:0=1>"

    def test_an_edge_gets_the_least_loaded_other_where_its_turn_is_at_its_upstreams(self) -> None:
        pool = pool_of(FakeEngine, FakeEngine, FakeEngine)
        upstream = pool.lease(0)
        pool.lease(1)
        ahead = pool.lease_ahead(upstream, 3)
        assert ahead is not None and ahead.index == 2

    def test_on_a_single_engine_there_is_no_place_for_an_edge(self) -> None:
        pool = pool_of(FakeEngine)
        assert pool.lease_ahead(pool.lease(0), 1) is None

    def test_a_pool_needs_an_engine(self) -> None:
        with pytest.raises(DeviceError, match="at least one engine"):
            EnginePool([])


class TestStart:
    def test_happens_once_whoever_asks(self) -> None:
        pool = pool_of(SlowStart, SlowStart)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: pool.start(), range(8)))
        assert [engine.starts for engine in pool.engines] == [1, 1]

    def test_happens_with_the_first_call(self, lab: Lab) -> None:
        model = lab.model()
        assert [engine.starts for engine in lab.engines] == [0, 0]
        model.invoke("Hello.")
        model.invoke("Hello.")
        assert [engine.starts for engine in lab.engines] == [1, 1]

    def test_a_failure_shuts_down_what_came_up(self) -> None:
        pool = pool_of(FakeEngine, NoStart, FakeEngine)
        with pytest.raises(EngineStartFailed, match="out of memory"):
            pool.start()
        assert [engine.stopped for engine in pool.engines] == [True, True, True]
        assert pool.engines[2].starts == 0
        assert pool.closed
        assert not threads_of(pool)

    def test_a_closed_pool_stays_closed_and_says_so(self) -> None:
        pool = pool_of(FakeEngine)
        model = ChatPingPong(pool=pool)
        assert model.invoke("Hello.").text
        pool.close()
        for call in (pool.start, pool.reset_prefix_cache, lambda: model.invoke("Hello.")):
            with pytest.raises(EngineDead, match=r"closed(.|\n)*new model or pool"):
                call()
        with pytest.raises(EngineDead, match="closed"):
            asyncio.run(model.ainvoke("Hello."))
        assert pool.engines[0].starts == 1

    def test_a_model_starts_its_own_engines_again_after_close(self) -> None:
        model = ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=8)
        first = model.invoke("Hello.").text
        engines = model._serving().pool.engines
        model.close()
        assert all(engine.stopped for engine in engines)
        assert model.invoke("Hello.").text == first
        model.close()

    def test_a_model_leaves_a_pool_alone_that_it_was_given(self, lab: Lab) -> None:
        model = lab.model()
        with model:
            pass
        assert not model.pool.closed
        assert model.invoke("Hello.").text


class TestClose:
    def test_stops_engines_and_ends_the_thread(self) -> None:
        pool = pool_of(FakeEngine, FakeEngine)
        with pool as entered:
            assert entered is pool
            assert pool.started
        assert pool.closed
        assert not pool.started
        assert all(engine.stopped for engine in pool.engines)
        assert not threads_of(pool)
        pool.close()

    async def test_works_from_async_code(self) -> None:
        async with pool_of(FakeEngine) as pool:
            assert pool.engines[0].starts == 1
        assert pool.engines[0].stopped

    def test_may_come_from_several_threads(self) -> None:
        pool = pool_of(FakeEngine)
        pool.start()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: pool.close(), range(4)))
        assert pool.closed

    def test_an_engine_that_does_not_stop_keeps_nobody_up(self) -> None:
        pool = pool_of(NoStop, FakeEngine)
        pool.start()
        pool.close()
        assert pool.engines[1].stopped
        assert not threads_of(pool)

    def test_from_the_pools_own_thread_does_not_hang(self) -> None:
        pool = pool_of(FakeEngine)
        thread = pool.loop._thread

        async def close() -> None:
            pool.close()

        pool.loop.run(close())
        thread.join(2)
        assert not thread.is_alive()

    def test_ends_a_call_that_waits(self, lab: Lab) -> None:
        model = lab.model(speed={"decode_speed": 10.0})
        threading.Timer(0.2, model.pool.close).start()
        with pytest.raises(EngineDead, match="closed while"):
            model.invoke("Hello.")

    def test_happens_when_the_pool_is_collected(self, lab: Lab) -> None:
        model = lab.model()
        lab.chain(model).invoke({"task": "Be forgotten."})
        engines, thread = lab.engines, model.pool.loop._thread
        collected = weakref.ref(model.pool)
        del model
        deadline = time.monotonic() + 5
        while collected() is not None:  # what the run left in other threads goes first
            gc.collect()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        thread.join(2)
        assert not thread.is_alive()
        assert all(engine.stopped for engine in engines)

    def test_happens_at_the_interpreters_end(self) -> None:
        """Before multiprocessing, which is imported with vLLM, ends the engines' processes."""
        script = """
import atexit
from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine

atexit.register(print, "what was registered before the start")

class Telling(FakeEngine):
    async def stop(self):
        print("stopped", self.device, flush=True)

model = ChatPingPong(pool=EnginePool([Telling("fake:0", time_scale=1.0), Telling("fake:1")]))
words = model.stream("Hello.")
next(words)
print("said something", flush=True)
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        first, *stops, last = done.stdout.splitlines()
        assert (first, sorted(stops)) == ("said something", ["stopped fake:0", "stopped fake:1"])
        assert last == "what was registered before the start"


class TestCopies:
    @pytest.mark.parametrize("deep", [False, True])
    def test_of_a_model_share_its_engines(self, deep: bool) -> None:
        model = ChatPingPong(devices=["fake:0"], max_tokens=8)
        twin = copy.deepcopy(model) if deep else model.model_copy(update={"temperature": 0.0})
        seen: list[Any] = []
        model.trace.subscribe(seen.append)
        assert twin.invoke("Hello.").text == model.invoke("Hello.").text
        assert twin._serving().pool is model._serving().pool
        assert model._serving().pool.engines[0].starts == 1
        assert [event.name for event in seen].count("finish") == 2
        model.close()

    def test_of_a_pool_are_the_pool(self) -> None:
        pool = pool_of(FakeEngine)
        assert copy.deepcopy(pool) is pool


class TestMemory:
    def test_a_pool_forgets_runs_that_are_over(self, lab: Lab) -> None:
        model = lab.model(speed={"time_scale": 0.0})
        graph = lab.chain(model)
        for number in range(6):
            graph.invoke({"task": f"Number {number}."})
        wait_until(lambda: not model.pool.runs, 5.0, "end of every run")

    def test_forgetting_a_run_drops_its_edges(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "MAX_RUNS", 1)
        model = lab.model()
        record = lab.record(model)

        forgotten = threading.Event()

        def prompt(state: Any) -> str:
            if state["writer"].startswith("Enough"):
                assert forgotten.wait(5)
            return "You are the critic. " + state["writer"]

        graph = lab.chain(model, prompts={"critic": prompt})
        for engine in lab.engines:
            engine.reply = lambda prompt: "Enough " * 10
        with ThreadPoolExecutor(1) as threads:
            run = threads.submit(graph.invoke, {"task": "Take a while."})
            record.wait_for("finish", "writer")
            assert not record.named("edge.dropped")
            lab.chain(model, ("writer",)).invoke({"task": "Another run."})
            assert record.named("edge.dropped", "critic")[0].data["reason"] == "run ended"
            forgotten.set()
            assert run.result()["critic"] == "Enough " * 10

    def test_nothing_of_the_graph_is_kept_after_a_run(self, lab: Lab) -> None:
        model = lab.model()
        lab.chain(model, ("writer", "critic", "leaver")).invoke({"task": "Leave nothing."})
        asyncio.run(lab.chain(model, ("leaver", "critic")).ainvoke({"task": "Leave nothing."}))

        def left() -> list[PregelLoop]:
            gc.collect()
            loops = [each for each in gc.get_objects() if issubclass(type(each), PregelLoop)]
            return [loop for loop in loops if "leaver" in loop.nodes]

        deadline = time.monotonic() + 2
        while left():
            assert time.monotonic() < deadline, gc.get_referrers(*left())
            time.sleep(0.05)

    def test_resetting_the_cache_makes_a_cold_start(self, lab: Lab) -> None:
        model = lab.model(1)

        def cached() -> int:
            return model.invoke("You are the writer. " * 4).usage_metadata["input_token_details"]["cache_read"]

        assert [cached(), cached() > 0] == [0, True]
        model.reset_prefix_cache()
        assert cached() == 0
