"""A run that is stopped, in whatever way and at whatever moment, leaves nothing behind, and the engines serve on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, StateGraph
from langgraph.pregel._loop import PregelLoop
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine, agent_node, session
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.errors import CallTimedOut
from langgraph_pingpong.planning import planner_of
from tests.conftest import edges_on, leases_on, tasks_on, wait_until

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

    from tests.conftest import Lab, Recorder

TASK = {"task": "Say what a tide pool is."}
WITHIN_S = 1.0
LIMIT_S = 0.6
LONG = "abcdefgh" * 3
"""Takes 1.2 s to say: longer than the limit, which leaves a busy machine time for the first token."""


@dataclass(eq=False)
class Telling(FakeEngine):
    """Tells when three tokens were said."""

    third: threading.Event = field(default_factory=threading.Event)

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        said = 0
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta
                said += 1
                if said == 3:
                    self.third.set()


class State(TypedDict, total=False):
    task: str
    writer: str
    critic: str


@dataclass
class Stopping:
    """A writer whose tokens are 50 ms apart, and a critic that reads them; stopped at the third token of eight."""

    lab: Lab
    says: str = "abcdefgh"
    settings: dict[str, Any] = field(default_factory=dict)
    add: dict[str, Any] = field(default_factory=dict)
    model: ChatPingPong = field(init=False)
    record: Recorder = field(init=False)
    graph: CompiledStateGraph[Any] = field(init=False)
    held: Any = None

    def __post_init__(self) -> None:
        engines = [
            self.lab.engine(f"fake:{n}", {"writer": self.says}, Telling, decode_speed=20.0, block_size=4)
            for n in range(2)
        ]
        self.model = self.lab.model(engines, **self.settings)
        self.record = self.lab.record(self.model)
        self.graph = self.lab.chain(self.model, add={"writer": self.add} if self.add else None)

    @property
    def third(self) -> threading.Event:
        return self.lab.engines[0].third  # type: ignore[attr-defined]

    async def at_the_third(self) -> None:
        assert await asyncio.to_thread(self.third.wait, 5)

    def expect_quiet(self, ended: bool = False, foreseen: bool = True) -> None:
        """Nothing is left within a second; with `ended`, the writer was left to end its answer."""
        pool = self.model.pool
        wait_until(lambda: not any(engine.num_unfinished for engine in self.lab.engines), WITHIN_S, "quiet engines")
        wait_until(lambda: not edges_on(pool) and leases_on(pool) == 0, WITHIN_S, f"free {pool}")
        wait_until(lambda: not tasks_on(pool), WITHIN_S, "quiet loop")
        assert not self.record.named("generate.started", "critic")
        assert len(self.record.named("finish", "writer")) == ended
        (asked,) = [request.request_id for engine in self.lab.engines for request in engine.requests]
        assert [asked in engine.aborted for engine in self.lab.engines] == [not ended, False]
        assert bool(self.lab.engines[1].prefills) == foreseen, "the edge was open"

    def expect_healthy(self) -> None:
        """The next run of the same graph, on the same engines, is what it would have been."""
        plain = type(self.lab)()
        replies = {"writer": self.says}
        expected = plain.chain(plain.model(replies=replies, overlap="off", speed={"time_scale": 0.0})).invoke(TASK)
        for engine in self.lab.engines:
            engine.decode_speed = 5000.0
        assert self.lab.chain(self.model.model_copy(update={"timeout": None})).invoke(TASK) == expected


async def cancel_the_task(run: Stopping) -> None:
    task = asyncio.create_task(run.graph.ainvoke(TASK))
    await run.at_the_third()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_a_reader(run: Stopping) -> None:
    async def read() -> None:
        async for _ in run.graph.astream(TASK, stream_mode="messages"):
            pass

    task = asyncio.create_task(read())
    await run.at_the_third()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(run: Stopping) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            waiting = asyncio.create_task(run.at_the_third())
            waiting.add_done_callback(lambda _: limit.reschedule(0.0))
            await run.graph.ainvoke(TASK)


async def break_out(run: Stopping) -> None:
    seen = 0
    async for _ in run.graph.astream(TASK, stream_mode="messages"):
        seen += 1
        if seen == 3:
            break


async def close(run: Stopping) -> None:
    async with aclosing(run.graph.astream(TASK, stream_mode="messages", subgraphs=True)) as parts:
        for _ in range(3):
            await anext(parts)


async def close_events(run: Stopping) -> None:
    async with aclosing(run.graph.astream_events(TASK, version="v2")) as events:
        async for event in events:
            if event["event"] == "on_chat_model_stream" and run.third.is_set():
                break


async def forget(run: Stopping) -> None:
    parts = run.graph.astream(TASK, stream_mode="messages")
    for _ in range(3):
        await anext(parts)
    del parts
    gc.collect()
    await asyncio.sleep(0.2)
    assert not any(engine.num_unfinished for engine in run.lab.engines), "before its loop ends, too"


async def forget_in_a_cycle(run: Stopping) -> None:
    parts = run.graph.astream(TASK, stream_mode="messages")
    for _ in range(3):
        await anext(parts)
    holder: list[Any] = [parts]
    holder.append(holder)
    del parts, holder
    gc.collect()


async def leave_open(run: Stopping) -> None:
    """The loop ends with the stream open."""
    parts = run.graph.astream(TASK, stream_mode="messages")
    for _ in range(3):
        await anext(parts)
    run.held = parts


async def raise_within(run: Stopping) -> None:
    with pytest.raises(LookupError):
        async for _ in run.graph.astream(TASK, stream_mode="messages"):
            if run.third.is_set():
                raise LookupError("in the reader")


ASYNC_WAYS = [
    cancel_the_task,
    cancel_a_reader,
    time_out,
    break_out,
    close,
    close_events,
    forget,
    forget_in_a_cycle,
    leave_open,
    raise_within,
]


def break_out_sync(run: Stopping) -> None:
    for seen, _ in enumerate(run.graph.stream(TASK, stream_mode="messages"), start=1):
        if seen == 3:
            break


def close_sync(run: Stopping) -> None:
    parts = run.graph.stream(TASK, stream_mode="messages")
    for _ in range(3):
        next(parts)
    parts.close()


def forget_sync(run: Stopping) -> None:
    parts = run.graph.stream(TASK, stream_mode="messages")
    for _ in range(3):
        next(parts)
    holder: list[Any] = [parts]
    holder.append(holder)
    del parts, holder
    gc.collect()


def interrupt(run: Stopping) -> None:
    with interrupted_at(run.third), pytest.raises(KeyboardInterrupt):
        run.graph.invoke(TASK)


def interrupt_async(run: Stopping) -> None:
    with interrupted_at(run.third), pytest.raises(KeyboardInterrupt):
        asyncio.run(run.graph.ainvoke(TASK))


@contextlib.contextmanager
def interrupted_at(moment: threading.Event) -> Iterator[None]:
    """Ctrl-C at the main thread then."""
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        if moment.wait(5):
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


class TestStopping:
    """Case 14: a run that was stopped goes on on the engine."""

    @pytest.mark.parametrize("way", ASYNC_WAYS, ids=lambda way: way.__name__)
    def test_an_async_run(self, lab: Lab, way: Callable[[Stopping], Awaitable[None]]) -> None:
        run = Stopping(lab)
        asyncio.run(way(run))
        run.expect_quiet()
        run.expect_healthy()

    @pytest.mark.parametrize("way", [interrupt, interrupt_async], ids=lambda way: way.__name__)
    def test_a_run_by_an_interrupt(self, lab: Lab, way: Callable[[Stopping], None]) -> None:
        run = Stopping(lab)
        way(run)
        run.expect_quiet()
        run.expect_healthy()

    @pytest.mark.parametrize("way", [break_out_sync, close_sync, forget_sync], ids=lambda way: way.__name__)
    def test_a_sync_stream(self, lab: Lab, way: Callable[[Stopping], None]) -> None:
        """LangGraph waits for the thread of the node: nothing can interrupt that, and nothing follows it."""
        run = Stopping(lab)
        way(run)
        run.expect_quiet(ended=True)
        run.expect_healthy()

    def test_an_async_node_by_its_own_timeout(self, lab: Lab) -> None:
        run = Stopping(lab, LONG, add={"timeout": LIMIT_S})
        with pytest.raises(Exception, match=r"(?i)timeout"):
            asyncio.run(run.graph.ainvoke(TASK))
        run.expect_quiet()
        run.expect_healthy()

    @pytest.mark.parametrize("is_async", [True, False])
    def test_a_step_by_the_graphs_timeout(self, lab: Lab, is_async: bool) -> None:
        run = Stopping(lab, LONG)
        run.graph.step_timeout = LIMIT_S
        with pytest.raises(TimeoutError):
            asyncio.run(run.graph.ainvoke(TASK)) if is_async else run.graph.invoke(TASK)
        run.expect_quiet(ended=not is_async)
        run.expect_healthy()

    @pytest.mark.parametrize("is_async", [True, False])
    def test_a_call_by_the_models_timeout(self, lab: Lab, is_async: bool) -> None:
        run = Stopping(lab, LONG, {"timeout": LIMIT_S})
        with pytest.raises(CallTimedOut):
            asyncio.run(run.graph.ainvoke(TASK)) if is_async else run.graph.invoke(TASK)
        run.expect_quiet()
        run.expect_healthy()

    @pytest.mark.parametrize("is_async", [True, False])
    def test_a_node_by_an_error_beside_it(self, lab: Lab, is_async: bool) -> None:
        run = Stopping(lab)

        def fail(state: State) -> None:
            assert run.third.wait(5)
            raise LookupError("beside it")

        async def afail(state: State) -> None:
            await run.at_the_third()
            raise LookupError("beside it")

        builder = StateGraph(State).add_node("sibling", afail if is_async else fail)
        for node, reads in (("writer", "task"), ("critic", "writer")):
            builder.add_node(node, agent_node(run.model, prompt=lab.prompt(node, reads), writes=node))
        graph = builder.add_edge(START, "writer").add_edge(START, "sibling").add_edge("writer", "critic").compile()
        with pytest.raises(LookupError):
            asyncio.run(graph.ainvoke(TASK)) if is_async else graph.invoke(TASK)
        run.expect_quiet(ended=not is_async, foreseen=False)  # nobody knows what the sibling writes
        run.expect_healthy()

    def test_a_sync_node_of_an_async_run(self, lab: Lab) -> None:
        """Nothing can interrupt its thread: what it asked for ends by itself."""
        run = Stopping(lab)
        node = run.graph.nodes["writer"].bound
        run.graph.builder.nodes["writer"].runnable = RunnableLambda(lambda state: node.invoke(state))
        run.graph = run.graph.builder.compile()
        asyncio.run(cancel_the_task(run))
        wait_until(lambda: bool(run.record.named("finish", "writer")), WITHIN_S, "end of the answer")
        assert not run.record.named("generate.started", "critic")
        assert [engine.num_unfinished for engine in lab.engines] == [0, 0]
        wait_until(lambda: not edges_on(run.model.pool), WITHIN_S, "closed edge")
        run.expect_healthy()

    @pytest.mark.parametrize("way", [cancel_the_task, close], ids=lambda way: way.__name__)
    def test_a_loop_in_a_subgraph(self, lab: Lab, way: Callable[[Stopping], Awaitable[None]]) -> None:
        run = Stopping(lab)
        inner = StateGraph(State)
        inner.add_node("writer", agent_node(run.model, prompt=lab.prompt("writer", "task"), writes="writer"))
        inner.add_edge(START, "writer").add_conditional_edges("writer", lambda _: "writer", ["writer"])
        run.graph = StateGraph(State).add_node("inner", inner.compile()).add_edge(START, "inner").compile()
        asyncio.run(way(run))
        pool = run.model.pool
        wait_until(lambda: not any(engine.num_unfinished for engine in lab.engines), WITHIN_S, "quiet engines")
        wait_until(lambda: not edges_on(pool) and leases_on(pool) == 0, WITHIN_S, f"free {pool}")
        rounds = len(run.record.named("generate.started"))
        assert rounds <= 2
        time.sleep(0.2)
        assert len(run.record.named("generate.started")) == rounds


async def stop_at_random(
    graph: CompiledStateGraph[Any], chance: random.Random, task: dict[str, str], most_s: float
) -> None:
    """Read the stream of a run, and stop it: at a random chunk and in a random way, or after a random time."""
    way = chance.choice(("cancel", "close", "raise", "by time", "by time"))
    chunk, seconds = chance.randint(1, 14), chance.uniform(0.0, most_s)

    async def read() -> None:
        seen = 0
        async with aclosing(graph.astream(task, stream_mode="messages")) as parts:
            async for _ in parts:
                seen += 1
                if seen < chunk or way == "by time":
                    continue
                if way == "raise":
                    raise LookupError("the reader's own")
                if way == "cancel":
                    reading.cancel()
                    await asyncio.sleep(0)
                return

    reading = asyncio.create_task(read())
    await asyncio.wait([reading], timeout=seconds if way == "by time" else None)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError, LookupError):
        await reading


async def stop_many(graph: CompiledStateGraph[Any], runs: int, at_once: int, most_s: float) -> None:
    chance, free = random.Random(14), asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with free:
            await stop_at_random(graph, chance, {"task": f"Number {number}."}, most_s)

    await asyncio.gather(*(one(number) for number in range(runs)))


class TestManyRuns:
    """Whatever the moment, and however many."""

    def test_a_thousand(self, lab: Lab) -> None:
        replies = {"writer": "abcdefgh", "critic": "ijklmnop"}
        model = lab.model(replies=replies, speed={"decode_speed": 100.0})
        record = lab.record(model)
        graph = lab.chain(model)
        asyncio.run(stop_many(graph, 1000, at_once=64, most_s=0.3))
        wait_until(lambda: not any(engine.num_unfinished for engine in lab.engines), WITHIN_S, "quiet engines")
        wait_until(lambda: not tasks_on(model.pool), WITHIN_S, "quiet loop")
        assert leases_on(model.pool) == 0
        assert edges_on(model.pool) == []
        for node in ("writer", "critic"):
            begun, spoken, ended = (len(record.named(n, node)) for n in ("generate.started", "first_token", "finish"))
            assert begun > ended, f"some were stopped while the {node} spoke"
            assert node == "critic" or begun > spoken, "some before the first token"
            aborted = {ids for engine in lab.engines for ids in engine.aborted}
            asked = [r.request_id for e in lab.engines for r in e.requests if self.node_of(lab, r) == node]
            assert len(aborted & set(asked)) == len(asked) - ended
        assert record.named("edge.dropped")
        assert graph.invoke({"task": "Number 1."}) == lab.chain(lab.model(replies=replies)).invoke(
            {"task": "Number 1."}
        )

    def test_take_no_more_memory_than_the_last_few(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "MAX_RUNS", 10)
        model = lab.model(replies={"writer": "abcdefgh", "critic": "ijklmnop"}, speed={"decode_speed": 100.0})
        graph = lab.chain(model)
        asyncio.run(stop_many(graph, 40, at_once=40, most_s=0.3))
        assert len(model.pool.runs) <= 10

        def left() -> list[PregelLoop]:
            gc.collect()
            loops = [each for each in gc.get_objects() if issubclass(type(each), PregelLoop)]
            return [loop for loop in loops if set(loop.nodes) >= {"writer", "critic"}]

        wait_until(lambda: not left(), 2.0, "end of what LangGraph made for a run")
        assert len(planner_of(model.pool)._books) == 0

    def test_is_let_go_of_when_the_pool_forgot_it_before_its_end(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session, "MAX_RUNS", 1)
        model = lab.model(replies={"writer": "abcd", "critic": "efgh"}, speed={"time_scale": 0.0})
        graph = lab.chain(model)
        for update in graph.stream(TASK, stream_mode="updates"):
            if "writer" in update:
                graph.invoke({"task": "Say what a reef is."})
        wait_until(lambda: not planner_of(model.pool)._books, WITHIN_S, "end of what is known of both runs")

    @staticmethod
    def node_of(lab: Lab, request: Request) -> str:
        text = lab.engines[0].tokenizer.decode(list(request.prompt_token_ids))
        return "writer" if "You are the writer." in text else "critic"


PROGRAM = """
import atexit, json, sys
engines = []

def report():  # the first that is registered comes last
    print(json.dumps({
        "unfinished": [engine.num_unfinished for engine in engines],
        "aborted": [len(engine.aborted) for engine in engines],
        "asked": [len(engine.requests) for engine in engines],
        "stopped": [engine.stopped for engine in engines],
    }), flush=True)

atexit.register(report)
import asyncio, os, signal, threading
from tests.conftest import Lab
from tests.test_cancellation import TASK, LONG, Stopping

run = Stopping(Lab(), LONG)
engines += run.lab.engines
third = run.third

def interrupt():
    third.wait(30)
    os.kill(os.getpid(), signal.SIGINT)

if sys.argv[1] == "exit":
    threading.Thread(target=run.graph.invoke, args=[TASK], daemon=True).start()
    third.wait(30)
    sys.exit(3)
threading.Thread(target=interrupt, daemon=True).start()
if sys.argv[1] == "invoke":
    run.graph.invoke(TASK)
else:
    asyncio.run(run.graph.ainvoke(TASK))
"""


def test_a_program_that_ends_takes_its_requests_along() -> None:
    """By its own exit, and by Ctrl-C in a sync and in an async run."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    programs = {
        how: subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for how in ("exit", "invoke", "ainvoke")
    }
    for how, program in programs.items():
        output, errors = program.communicate(timeout=60)
        left = json.loads(output.splitlines()[-1])
        assert left["unfinished"] == [0, 0], how
        assert left["asked"] == [1, 0]
        assert left["aborted"][0] == 1
        assert left["stopped"] == [True, True]
        if how == "exit":
            assert program.returncode == 3
        else:
            assert program.returncode == -signal.SIGINT
            assert errors.rstrip().endswith("KeyboardInterrupt")
        assert "Exception ignored" not in errors
        assert "never retrieved" not in errors


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestRealEngines:
    """The same on real vLLM: it says itself that it has nothing to do, and holds no block of its KV cache."""

    def test_two_hundred_runs(self, lab: Lab, real_model: ChatPingPong) -> None:
        pool, graph = real_model._serving().pool, lab.chain(real_model.bind(max_tokens=8))
        real_model.reset_prefix_cache()
        assert self.left(pool) == [(0, False, True)] * 2
        expected = graph.invoke(TASK)
        record = lab.record(real_model)
        asyncio.run(stop_many(graph, 200, at_once=8, most_s=1.0))
        wait_until(lambda: self.left(pool) == [(0, False, True)] * 2, 2.0, "idle engines")
        assert leases_on(pool) == 0
        assert edges_on(pool) == []
        for node in ("writer", "critic"):
            assert len(record.named("generate.started", node)) > len(record.named("finish", node))
        assert len(record.named("edge.dropped")) > 10
        assert graph.invoke(TASK) == expected

    @staticmethod
    def left(pool: EnginePool) -> list[tuple[int, bool, bool]]:
        """Of each engine: requests under way, whether vLLM has work, and whether all of its KV cache is free.

        vLLM's own process is asked. It empties its prefix cache only while no request holds a block, and tells.
        """

        async def ask(engine: Any) -> tuple[int, bool, bool]:
            llm = engine._engine
            under_way = engine.num_unfinished + llm.output_processor.get_num_unfinished_requests()
            return under_way, await llm.engine_core.call_utility_async("has_work"), await llm.reset_prefix_cache()

        async def ask_all() -> list[tuple[int, bool, bool]]:
            return [await ask(engine) for engine in pool.engines]

        return pool.loop.run(ask_all())
