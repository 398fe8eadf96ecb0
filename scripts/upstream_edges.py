"""Puts streaming edges behind every call of every chat model, for tests that know nothing of them.

A call is answered as before; then, still inside the node's call, the same messages and the same answer go through a
`ChatPingPong` on two modelled engines. So the running graph is read while it runs, and edges to the next calls open,
are fed, claimed and dropped. One pool serves the whole process: what one test's graphs taught is there in the next
test. No error of this package reaches a test; each is kept and reported.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import os
import time
import traceback
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langgraph.errors import InvalidUpdateError

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.edges.langgraph_internals import next_tasks, spec_of, state_of
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.errors import EngineError, PingPongError
from langgraph_pingpong.planning import PlannedCall, Planner, in_daemon_thread
from langgraph_pingpong.streaming_edge import StreamingEdge, Upcoming
from langgraph_pingpong.trace import Event

PLAN_WITHIN_S = 0.5
"""How long an answer waits at most for the plan of its call, in seconds."""

QUIET_WITHIN_S = 3.0
"""How long the engines may take at the end to be at rest, in seconds."""

PIECES = 8
"""Parts that an answer is spoken in."""

_INSIDE: ContextVar[bool] = ContextVar("upstream_edges_inside", default=False)
"""Whether a chat model is being called: some of its public methods call each other."""


class Tally:
    """What happened, counted, and every error of this package with the test in which it happened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._tests: set[str] = set()

    def call(self, in_task: bool) -> None:
        """Count a call that went through the edges, and the tests that make any."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self.counts["model calls in tasks" if in_task else "model calls outside of tasks"] += 1
        self.counts["tests that call models"] += test not in self._tests
        self._tests.add(test)

    def refused(self, what: str, error: Exception) -> None:
        """Count something that this package rightly does not do, by its reason."""
        reason = str(error).partition("\n")[0]
        self.counts[what] += 1
        self.counts[f"{what}: {type(error).__name__}: {reason}"] += 1

    def error(self, what: str, error: BaseException | str) -> None:
        """Keep an error."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        text = error if isinstance(error, str) else "".join(traceback.format_exception(error)[-4:])
        self.counts["errors"] += 1
        self.errors.append(f"{what}, during {test}:\n{text}")

    def event(self, event: Event) -> None:
        """Count an event of the model's trace."""
        counts, data = self.counts, event.data
        if event.name == "finalize":
            counts["edges claimed"] += 1
            counts["prompt tokens prefilled right"] += data["static"] + data["streamed"]
            counts["prompt tokens prefilled in vain"] += data["wasted"]
            counts["prompts with a right prefill"] += data["static"] + data["streamed"] > 0 and not data["wasted"]
            counts["prompts with a wasted prefill"] += data["wasted"] > 0
        elif event.name == "edge.dropped":
            counts["edges dropped"] += 1
            counts[f"edges dropped: {data['reason']}"] += 1
        elif event.name == "finish" and not data["certificate"]["ids_equal"]:
            self.error("an engine saw another prompt", str(data["certificate"]))
        elif event.name == "append.failed":
            self.error("a prefill failed", data["error"])


class _Log(logging.Handler):
    """Keeps what this package logs about errors that it does not raise."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None or record.levelno >= logging.WARNING:
            self._tally.error(record.getMessage(), error or "")


class _Planner(Planner):
    """Plans as always; beside that it has LangGraph's next superstep computed for every call, whatever its node."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.loops: weakref.WeakSet[Any] = weakref.WeakSet()
        """The loops of LangGraph that were read and still exist."""

    def begin(self, *args: Any, **kwargs: Any) -> PlannedCall:
        planned = super().begin(*args, **kwargs)
        return replace(planned, plan=functools.partial(self._plan, planned))

    async def _plan(self, planned: PlannedCall) -> Sequence[Upcoming]:
        self._under_way += 1
        self._idle.clear()
        try:
            spec = self._meet(planned)
            unknown = spec is not None and spec not in self._known
            await in_daemon_thread(functools.partial(self._next_superstep, planned), PLAN_WITHIN_S)
            upcoming: Sequence[Upcoming] = await planned.plan()
            self._note(spec, unknown, upcoming)
            return upcoming
        except Exception as error:
            self._tally.counts["plans failed"] += 1
            self._tally.error("a plan failed", error)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    def _meet(self, planned: PlannedCall) -> Any:
        if (task := planned.record.task) is None:
            return None
        self.loops.add(task.loop)
        return spec_of(task)

    def _note(self, spec: Any, unknown: bool, upcoming: Sequence[Upcoming]) -> None:
        self._tally.counts["plans made"] += 1
        self._tally.counts["prompts foreseen"] += len(upcoming)
        if spec is not None:
            self._known.add(spec)
        if unknown and upcoming:
            keys = [one.key for one in upcoming]
            self._tally.error("a graph that never ran got edges of another", f"{keys}")

    def _next_superstep(self, planned: PlannedCall) -> None:
        if (task := planned.record.task) is None:
            return
        # The id is given: LangGraph would make one, and some tests count on what ids it makes.
        update = {"messages": [AIMessage("made up", id="made up")]} if "messages" in state_of(task) else None
        try:
            ahead = next_tasks(task, update)
        except (InvalidUpdateError, TypeError) as error:  # the update does not fit, or the state cannot be copied
            self._tally.refused("supersteps not foreseen", error)
        else:
            self._tally.counts["supersteps foreseen"] += 1
            self._tally.counts["tasks foreseen"] += len(ahead)

    async def settled(self) -> None:
        """Wait until no plan is under way and the edges of the last one are open, but not for ever."""
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(PLAN_WITHIN_S):
                await self._idle.wait()
        except TimeoutError:
            self._tally.counts["plans that came too late"] += 1
        await asyncio.sleep(0.001)


class _Parrot(FakeEngine):
    """Says what the call's own model has said, and pauses after the first piece until the plan is ready."""

    said: dict[int, str]
    planner: _Planner

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        async with aclosing(super().generate(request)) as deltas:
            yield await anext(deltas)
            await self.planner.settled()
            async for delta in deltas:
                yield delta

    def _deltas(self, request: Request) -> list[Delta]:
        text = self.said.pop(request.sampling["seed"])
        size = len(text) // PIECES + 1
        pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
        spoken = [Delta(piece, tuple(self.tokenizer.encode(piece))) for piece in pieces]
        return [*spoken, Delta(finish_reason="stop")]


class Edges:
    """Sends every model call through the streaming edges as well."""

    def __init__(self) -> None:
        self.tally = tally = Tally()
        self._numbers = itertools.count(1)
        self._said: dict[int, str] = {}
        self._planner = _Planner(tally)
        tokenizer = fake_tokenizer()
        engines = [_Parrot(f"fake:{index}", tokenizer) for index in range(2)]
        for engine in engines:
            engine.said, engine.planner = self._said, self._planner
        self.pool = EnginePool(engines)
        self.pool.planner = self._planner
        self.model = ChatPingPong(pool=self.pool).start()
        self.model.trace.subscribe(tally.event)
        self.pool.loop.run(self._watch_loop())
        logger = logging.getLogger("langgraph_pingpong")
        logger.addHandler(_Log(tally))
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # tests look at what is logged

    async def _watch_loop(self) -> None:
        def record(_: Any, context: dict[str, Any]) -> None:
            self.tally.error(context["message"], context.get("exception") or "")

        asyncio.get_running_loop().set_exception_handler(record)

    def follow(self, model: BaseChatModel, input: Any, config: RunnableConfig | None, answer: str) -> None:
        """Send a call that was answered through the edges."""
        with self._call(model, input, config, answer) as (messages, number):
            for chunk in self.model._stream(messages, seed=number):
                self._check(chunk)

    async def afollow(self, model: BaseChatModel, input: Any, config: RunnableConfig | None, answer: str) -> None:
        """Send a call that was answered through the edges."""
        with self._call(model, input, config, answer) as (messages, number):
            async for chunk in self.model._astream(messages, seed=number):
                self._check(chunk)

    @contextmanager
    def _call(
        self, model: BaseChatModel, input: Any, config: RunnableConfig | None, answer: str
    ) -> Iterator[tuple[Any, int]]:
        number = next(self._numbers)
        self._said[number] = answer
        token = var_child_runnable_config.set(ensure_config(config))
        try:
            yield model._convert_input(input).to_messages(), number
        except EngineError as error:
            self.tally.error("an engine failed", error)
        except PingPongError as error:
            self.tally.refused("calls refused", error)
        except Exception as error:  # noqa: BLE001 - it must not reach the test
            self.tally.error("a call failed", error)
        finally:
            var_child_runnable_config.reset(token)
            self._said.pop(number, None)

    def _check(self, chunk: Any) -> None:
        if (certificate := chunk.message.response_metadata.get("pingpong")) is None:
            return
        in_task = "langgraph_node" in ensure_config().get("metadata", {})
        self.tally.call(in_task)
        if in_task and not certificate["node"]:
            self.tally.error("a task was not recognized", str(ensure_config()["metadata"]))

    def finish(self) -> None:
        """Wait for the engines to come to rest, note what does not, and close them."""
        until = time.monotonic() + QUIET_WITHIN_S
        while (left := self._left()) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.05)
        if left:
            self.tally.error("left over at the end", left)
        self.pool.close()

    def _left(self) -> str:
        requests = sum(engine.num_unfinished for engine in self.pool.engines)
        left = {
            "requests": requests,
            "leases": sum(self.pool._placement.leases),
            "runs of graphs": len(self._planner.loops),
        }
        return ", ".join(f"{count} {name}" for name, count in left.items() if count)

    def patch(self) -> None:
        """Put the edges behind the public methods of all chat models."""
        opened = StreamingEdge.__init__

        def count(edge: StreamingEdge, *args: Any) -> None:
            self.tally.counts["edges opened"] += 1
            opened(edge, *args)

        StreamingEdge.__init__ = count  # type: ignore[method-assign, assignment]
        for name, patched in (("invoke", _invoke), ("ainvoke", _ainvoke), ("stream", _stream), ("astream", _astream)):
            original = getattr(BaseChatModel, name)
            setattr(BaseChatModel, name, functools.wraps(original)(patched(original, self)))


@contextmanager
def _inside() -> Iterator[bool]:
    """Marks a call of a model; gives whether it is the outermost."""
    outermost = not _INSIDE.get()
    token = _INSIDE.set(True)
    try:
        yield outermost
    finally:
        _INSIDE.reset(token)


def _invoke(original: Callable[..., Any], edges: Edges) -> Callable[..., Any]:
    def invoke(self: BaseChatModel, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with _inside() as outermost:
            answer = original(self, input, config, **kwargs)
        if outermost:
            edges.follow(self, input, config, str(answer.text))
        return answer

    return invoke


def _ainvoke(original: Callable[..., Any], edges: Edges) -> Callable[..., Any]:
    async def ainvoke(self: BaseChatModel, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with _inside() as outermost:
            answer = await original(self, input, config, **kwargs)
        if outermost:
            await edges.afollow(self, input, config, str(answer.text))
        return answer

    return ainvoke


def _stream(original: Callable[..., Any], edges: Edges) -> Callable[..., Any]:
    def stream(self: BaseChatModel, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        said = []
        with closing(original(self, input, config, **kwargs)) as chunks:
            while True:
                with _inside() as outermost:
                    chunk = next(chunks, None)
                if chunk is None:
                    break
                said.append(str(chunk.text))
                yield chunk
        if outermost:
            edges.follow(self, input, config, "".join(said))

    return stream


def _astream(original: Callable[..., Any], edges: Edges) -> Callable[..., Any]:
    async def astream(
        self: BaseChatModel, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        said = []
        async with aclosing(original(self, input, config, **kwargs)) as chunks:
            while True:
                with _inside() as outermost:
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                said.append(str(chunk.text))
                yield chunk
        if outermost:
            await edges.afollow(self, input, config, "".join(said))

    return astream
