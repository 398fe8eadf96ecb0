"""From a call that is being answered to the growing prompts that follow it. Runs beside the call, never in its way."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langsmith import tracing_context

from langgraph_pingpong.edges.book import Answers, CallRecord, RunBook, Shaping, note_sources
from langgraph_pingpong.edges.langgraph_internals import (
    input_of,
    spec_of,
    state_of,
)
from langgraph_pingpong.edges.langgraph_loops import graphs_around, when_graph_ends
from langgraph_pingpong.edges.learned import LearnedEdges
from langgraph_pingpong.edges.sources import Ahead, Known, Moment, RendererOf, foresee, foresee_after_tools
from langgraph_pingpong.edges.tasks import RunningTask
from langgraph_pingpong.growing_prompt import CallKey, GraphSite, GrowingPrompt, Probes
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.prompts import render_turns, template_with
from langgraph_pingpong.streaming_edge import Upcoming
from langgraph_pingpong.tokens import ChatTemplate, Message

T = TypeVar("T")
Sampling = Mapping[str, Any]

PLAN_WITHIN_S = 2.0
"""How long the plan of a call may take, in seconds; what comes later is dropped."""

MAX_RUNS = 256
"""Runs whose calls are remembered."""

MAX_SAMPLINGS = 4096
"""Calls whose sampling is remembered."""


class Samplings:
    """How the calls of graphs sampled their last answers, so that an answer can be begun before its call comes.

    Told apart by node and number, and by whether the call reads the results of tools: an agent's first call may have to
    call one, and the next is free. A call of another graph, or another tenant, that samples in another way does not
    take over an answer that was begun in vain.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[CallKey, bool], Sampling] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: CallKey, after_tools: bool) -> Sampling | None:
        """That of the last such call, or of the other kind if there was none."""
        with self._lock:
            return self._last.get((key, after_tools), self._last.get((key, not after_tools)))

    def remember(self, key: CallKey, after_tools: bool, sampling: Sampling) -> None:
        """Keep what a call asked for."""
        with self._lock:
            self._last[key, after_tools] = sampling
            self._last.move_to_end((key, after_tools))
            if len(self._last) > MAX_SAMPLINGS:
                self._last.popitem(last=False)

    def forget(self, key: CallKey) -> None:
        """Let go of what such calls asked for."""
        with self._lock:
            for after_tools in (True, False):
                self._last.pop((key, after_tools), None)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call whose followers are being looked for."""

    record: CallRecord
    plan: Callable[[], Any]
    plan_after_tools: Callable[[], Any]
    """The same once the call is over and has called tools."""
    _book: RunBook
    _samplings: Samplings

    def remember_sampling(self, sampling: Sampling) -> None:
        """Let the answer of the next such call, which asks for the same, be begun before it comes."""
        self._samplings.remember(self.record.key, _reads_results(self.record.messages), sampling)

    def forget_sampling(self) -> None:
        """Let no answer of such a call be begun before it comes."""
        self._samplings.forget(self.record.key)

    def close_with_graph(self, close: Callable[[GraphSite], None]) -> None:
        """Call `close` with each graph around the call, the run's own included, when its run is over."""
        task = self.record.task
        for loop, graph in graphs_around(task) if task is not None else ():
            if self._book.is_new_graph(loop):
                when_graph_ends(loop, partial(close, graph))

    def end(self, answer: str | None, turn: Message | None = None) -> None:
        """The call is over; `answer` is its text, None if it did not finish, `turn` its message if it called tools."""
        self._book.end(self.record, answer, turn)


class Planner:
    """Knows the runs on one pool, and what was learned from them."""

    def __init__(self) -> None:
        self.learned = LearnedEdges()
        self._samplings = Samplings()
        self._books: OrderedDict[int, tuple[object, RunBook]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(
        self,
        task: RunningTask,
        turns: Sequence[Message],
        template: ChatTemplate,
        shaping: Shaping,
        others: RendererOf,
    ) -> PlannedCall:
        """A call begins. Its plan gives the prompts that follow it.

        Args:
            task: the task that makes the call.
            turns: its prompt, in OpenAI's form.
            template: the chat template of its model; the tokenizer is that of all models on the pool.
            shaping: what shapes its prompt beside the messages.
            others: how prompts of other nodes' models are rendered.
        """
        book = self._book(task.owner)
        answers = {key: text for key, text in book.answers().items() if text}
        record = book.begin(task, turns, shaping)

        async def plan() -> Sequence[Upcoming]:
            try:  # here: the node may go on before the thread comes to it
                state, given = state_of(task), input_of(task)
            except KeyError:  # it left the answer early, and is over
                return ()

            def look() -> list[Upcoming]:
                note_sources(record, state, given)
                self._learn(record, task, book, answers)
                ahead = self._look_ahead(record, task, book, template, others)
                return self._upcoming(record, ahead, template, after_tools=False)

            return await in_daemon_thread(look, PLAN_WITHIN_S)

        spec, tenant = spec_of(task), tenant_of(task.config)

        def after_tools() -> list[Upcoming]:
            ahead = self._look_after_tools(record, spec, tenant, book, template)
            return self._upcoming(record, ahead, template, after_tools=True)

        return PlannedCall(record, plan, partial(in_daemon_thread, after_tools, PLAN_WITHIN_S), book, self._samplings)

    def forget(self, owner: object) -> None:
        """A run is over: let go of the prompts and states of its calls."""
        with self._lock:
            self._books.pop(id(owner), None)

    def _learn(self, record: CallRecord, task: RunningTask, book: RunBook, answers: Answers) -> None:
        """Learn from a call, which may be over by now; `answers` are those that were given before it."""
        tenant, spec = tenant_of(task.config), spec_of(task)
        record.spec = weakref.ref(spec)
        for before in book.predecessors(record):
            if before.alone and record.alone:
                self.learned.observe(tenant, before, record, answers)
        self.learned.began(spec, tenant, record)

    def _look_ahead(
        self, record: CallRecord, task: RunningTask, book: RunBook, template: ChatTemplate, others: RendererOf
    ) -> list[Ahead]:
        if record.task is None or not record.alone:  # it is over already, or nobody can tell which call it is
            return []
        moment = Moment(record, book, Probes(), partial(_render, template), task, others)
        return foresee(moment, self.learned.memory_of(spec_of(task)), tenant_of(task.config))

    def _look_after_tools(
        self, record: CallRecord, spec: Any, tenant: Hashable, book: RunBook, template: ChatTemplate
    ) -> list[Ahead]:
        if not record.alone:
            return []
        known = Known(record, book, Probes(), partial(_render, template))
        return foresee_after_tools(known, self.learned.memory_of(spec), tenant)

    def _upcoming(
        self, record: CallRecord, ahead: Sequence[Ahead], template: ChatTemplate, *, after_tools: bool
    ) -> list[Upcoming]:
        """The growing prompts of these calls, as far as anything is known of them."""
        known = [(one, GrowingPrompt(template, one.segments)) for one in ahead if one.segments]
        return [
            Upcoming(
                one.key,
                one.step,
                one.source,
                prompt,
                self._samplings.of(one.key, after_tools),
                None if one.certain else record.step,
            )
            for one, prompt in known
        ]

    def _book(self, owner: object) -> RunBook:
        with self._lock:
            _, book = self._books.setdefault(id(owner), (owner, RunBook()))
            self._books.move_to_end(id(owner))
            if len(self._books) > MAX_RUNS:
                self._books.popitem(last=False)
            return book


def _reads_results(messages: Sequence[Message]) -> bool:
    """Whether a prompt ends with the result of a tool."""
    return bool(messages) and messages[-1]["role"] == "tool"


def tenant_of(config: RunnableConfig) -> Hashable:
    """Whose run it is: tenants do not learn from each other and share no cached prefixes. None is a tenant, too."""
    tenant = config.get("configurable", {}).get("tenant")
    return tenant if isinstance(tenant, Hashable) else repr(tenant)


def cache_salt(config: RunnableConfig) -> str | None:
    """What keeps a tenant's cached prefixes apart on the engines. It does not tell who the tenant is."""
    tenant = tenant_of(config)
    return None if tenant is None else hashlib.sha256(repr(tenant).encode()).hexdigest()


def _render(template: ChatTemplate, turns: Sequence[Message], shaping: Shaping) -> str:
    return render_turns(template_with(template, shaping.chat_template), turns, shaping.tools, shaping.template_kwargs)


def planner_of(pool: EnginePool) -> Planner:
    """The planner of a pool; models that share a pool share it."""
    if pool.planner is None:
        pool.planner = Planner()
    planner: Planner = pool.planner
    return planner


async def in_daemon_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Run blocking work in a thread that nothing waits for at exit, outside the caller's context.

    The context is left out so that no callback, tracer or config of the caller sees what happens there. What the
    environment has switched on needs no context: LangSmith is told to look away.

    Raises:
        TimeoutError: it took longer; the thread goes on, its result is dropped.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            with tracing_context(enabled=False):
                value = work()
        except BaseException as exc:  # noqa: BLE001 - handed to whoever waits
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=contextvars.Context().run, args=(run,), daemon=True, name="pingpong-plan").start()
    async with asyncio.timeout(timeout_s):
        return await result
