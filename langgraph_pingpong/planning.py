"""From a running task to the growing prompts that follow it. Runs beside the call, never in its way."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from langchain_core.messages import BaseMessage

from langgraph_pingpong.edges import Predicted, RunningTask, predict
from langgraph_pingpong.session import Plan, Upcoming
from langgraph_pingpong.tokens import PROBES, ChatTemplate, GrowingPrompt, prompt_shape

T = TypeVar("T")

PLAN_WITHIN_S = 2.0
"""How long the plan of a call may take, in seconds; what comes later is dropped."""

Render = Callable[[Sequence[BaseMessage]], str]
"""Renders a prompt the way a node's model does, with what was bound to it: tools, template arguments."""

RendererOf = Callable[[Any], Render | None]
"""The renderer of a node's model, or None if that model is not served by the same pool."""


def make_plan(task: RunningTask, template: ChatTemplate, renderer_of: RendererOf) -> Plan:
    """A plan for the call that `task` is making, on a pool that serves the model of `template`."""

    async def plan() -> Sequence[Upcoming]:
        return await in_daemon_thread(lambda: upcoming_calls(task, template, renderer_of), PLAN_WITHIN_S)

    return plan


def upcoming_calls(task: RunningTask, template: ChatTemplate, renderer_of: RendererOf) -> list[Upcoming]:
    """The calls that follow the one `task` is making, each with its prompt up to where the answer goes.

    Each prompt is rendered for two made-up answers; their difference shows where and how the answer is used.
    """
    first, second = (predict(task, probe) for probe in PROBES)
    if [ahead.site for ahead in first] != [ahead.site for ahead in second]:
        return []
    return [up for pair in zip(first, second, strict=True) if (up := _upcoming(*pair, template, renderer_of))]


def _upcoming(first: Predicted, second: Predicted, template: ChatTemplate, renderer_of: RendererOf) -> Upcoming | None:
    render = renderer_of(first.model)
    if render is None:
        return None
    shape = prompt_shape(render(first.messages), render(second.messages))
    return Upcoming(first.site[-1], first.site, first.step, GrowingPrompt(template, shape))


async def in_daemon_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Run blocking work in a thread that nothing waits for at exit, outside the caller's context.

    The context is left out so that no callback, tracer or config of the caller sees what happens there.

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
            value = work()
        except BaseException as exc:  # noqa: BLE001 - handed to whoever waits
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=contextvars.Context().run, args=(run,), daemon=True, name="pingpong-plan").start()
    async with asyncio.timeout(timeout_s):
        return await result
