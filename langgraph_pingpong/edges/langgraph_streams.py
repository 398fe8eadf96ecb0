"""The private names of LangGraph that have to do with what a graph and its tools say, and in which run.

A second part of langgraph_internals.py, under the same version guard: a task comes from there.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from langgraph_pingpong.edges.tasks import RunningTask


def run_of(config: RunnableConfig) -> object | None:
    """What every task of a run shares, the same as a task's `owner`; None outside a graph."""
    return getattr(config.get("configurable", {}).get("__pregel_runtime"), "control", None)


def custom_stream(task: RunningTask) -> Callable[[Any], None]:
    """Writes into the custom stream of the task's graph, from any thread; where nobody asked for it, nowhere.

    It is the graph's writer, which does not end with the task. What it keeps is neither the task nor the loop.
    """
    write = task.loop.config["configurable"]["__pregel_runtime"].stream_writer
    where: RunnableConfig = {"configurable": {"checkpoint_ns": task.config["configurable"]["checkpoint_ns"]}}

    def write_as_task(item: Any) -> None:
        var_child_runnable_config.set(where)  # from which the writer reads which graph it is
        write(item)

    return lambda item: contextvars.Context().run(write_as_task, item)


def watch_stream(task: RunningTask, heard: Callable[[Any], None]) -> None:
    """Let `heard` see what later tasks of a graph write to its stream; all of it goes on to where it went."""
    configurable = task.loop.config["configurable"]
    runtime = configurable["__pregel_runtime"]
    if getattr(runtime.stream_writer, "heard_by", None) is not heard:
        configurable["__pregel_runtime"] = runtime.override(stream_writer=_tee(runtime.stream_writer, heard))


def tee_output_deltas(heard: Callable[[Any], None]) -> None:
    """Let `heard` see what the tool that runs in this context emits as `ToolRuntime.emit_output_delta`."""
    with contextlib.suppress(ImportError):
        from langgraph.pregel._tools import _tool_call_writer

        _tool_call_writer.set(_tee(_tool_call_writer.get(), heard))


def _tee(write: Callable[[Any], None] | None, heard: Callable[[Any], None]) -> Callable[[Any], None]:
    def both(value: Any) -> None:
        if write is not None:
            write(value)
        heard(value)

    both.heard_by = heard  # type: ignore[attr-defined]
    return both
