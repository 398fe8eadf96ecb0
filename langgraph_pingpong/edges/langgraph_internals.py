"""Every private name of LangGraph that this package uses, and nothing else uses any.

From the config a node's model call carries, it finds the running task and its loop, and it asks LangGraph's own
functions which tasks would come next if the node returned a given update. Where LangGraph has moved, `usable()`
is false: edges are then off, with one warning, and every call runs plain.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

logger = logging.getLogger(__name__)

TESTED = ((1, 2), (2, 0))
"""LangGraph versions from the first up to, not including, the second."""


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A node's task while it runs: where it stands in the graph, and the loop that runs it.

    `site` names the enclosing graphs' nodes and the node; `owner` is shared by every task of one run.
    """

    site: tuple[str, ...]
    step: int
    owner: object
    task_id: str
    loop: Any


@dataclass(frozen=True, slots=True)
class NextTask:
    """A task that would run next, with the input it would get."""

    site: tuple[str, ...]
    step: int
    node: Runnable[Any, Any]
    input: Any


def running_task(config: RunnableConfig) -> RunningTask | None:
    """The task whose node carries this config; None outside a graph or where LangGraph is not understood."""
    if "langgraph_node" not in config.get("metadata", {}) or not usable():
        return None
    try:
        return _read_task(config)
    except Exception:
        logger.debug("no running task found in the config", exc_info=True)
        return None


def _read_task(config: RunnableConfig) -> RunningTask:
    metadata, configurable = config["metadata"], config["configurable"]
    return RunningTask(
        site=_site(metadata["langgraph_checkpoint_ns"]),
        step=metadata["langgraph_step"],
        owner=configurable["__pregel_runtime"].control,
        task_id=configurable["__pregel_task_id"],
        loop=configurable["__pregel_call"].keywords["schedule_task"].__self__,
    )


def _site(namespace: str) -> tuple[str, ...]:
    """'writer:1f0…|draft:8c2…' -> ('writer', 'draft'): the ids change from run to run, the names do not."""
    return tuple(part.partition(":")[0] for part in namespace.split("|"))


def node_of(task: RunningTask) -> Runnable[Any, Any] | None:
    """What was given to `add_node`; None for a task of the functional API, which is no node."""
    node = task.loop.nodes.get(task.site[-1])
    return node.bound if node is not None else None


def next_tasks(task: RunningTask, update: Any) -> list[NextTask]:
    """The tasks that would run if the node returned `update` now.

    This is LangGraph's own superstep on copies of its channels. Only static edges are followed: a conditional
    edge would run the user's function on text that nobody has said. Nothing is foreseen beyond a breakpoint, or
    while other tasks of the superstep are still running.
    """
    loop = task.loop
    if len(loop.tasks) > 1 or _breaks(loop.interrupt_after, task.site[-1]):
        return []
    tasks = _superstep(loop, loop.tasks[task.task_id], update)
    return [
        NextTask((*task.site[:-1], ahead.name), task.step + 1, loop.nodes[ahead.name].bound, ahead.input)
        for ahead in tasks.values()
        if not _breaks(loop.interrupt_before, ahead.name)
    ]


def _superstep(loop: Any, running: Any, update: Any) -> Mapping[str, Any]:
    from langgraph.checkpoint.base import copy_checkpoint
    from langgraph.pregel._algo import PregelTaskWrites, apply_writes, prepare_next_tasks

    channels, checkpoint = _copy_channels(loop.channels), copy_checkpoint(loop.checkpoint)
    writes = PregelTaskWrites(running.path, running.name, _writes(running, update), running.triggers)
    get_next_version = loop.checkpointer_get_next_version
    updated = apply_writes(checkpoint, channels, [writes], get_next_version, loop.trigger_to_nodes)
    return prepare_next_tasks(
        checkpoint,
        [],
        loop.nodes,
        channels,
        loop.managed,
        loop.config,
        loop.step + 1,
        loop.stop,
        for_execution=True,
        store=None,
        checkpointer=None,
        manager=None,
        trigger_to_nodes=loop.trigger_to_nodes,
        updated_channels=updated,
    )


def _writes(running: Any, update: Any) -> deque[tuple[str, Any]]:
    """What the node's static edges and state keys would be given."""
    from langgraph.pregel._write import ChannelWrite

    writes: deque[tuple[str, Any]] = deque()
    config: RunnableConfig = {"configurable": {"__pregel_send": writes.extend}}
    for writer in running.writers:
        if isinstance(writer, ChannelWrite):
            writer.invoke(update, config)
    return writes


def _copy_channels(channels: Mapping[str, Any]) -> dict[str, Any]:
    """Deep copies, since reducers may change values in place; the mark for 'no value' must stay itself."""
    from langgraph._internal._typing import MISSING

    memo = {id(MISSING): MISSING}
    return {name: copy.deepcopy(channel, memo) for name, channel in channels.items()}


def _breaks(breakpoints: Any, name: str) -> bool:
    return bool(breakpoints) and (breakpoints == "*" or name in breakpoints)


@functools.cache
def usable() -> bool:
    """Whether this LangGraph is understood: its version is in the tested range, and a small graph reads right."""
    try:
        installed = tuple(int(part) for part in version("langgraph").split(".")[:2])
        problem = "" if TESTED[0] <= installed < TESTED[1] else "its version was not tested"
        # In an empty context: the first question comes from within a node, and this graph must not be its child.
        problem = problem or contextvars.Context().run(_self_test)
    except Exception as error:  # noqa: BLE001 - anything at all means that LangGraph has moved
        problem = repr(error)
    if problem:
        logger.warning("Streaming edges are off: LangGraph %s is not understood (%s).", version("langgraph"), problem)
    return not problem


def _self_test() -> str:
    """Foresee the second node of a two-node graph from within the first; returns what went wrong, or ''."""
    from langgraph.graph import END, START, StateGraph
    from typing_extensions import TypedDict

    class State(TypedDict):
        text: str

    foreseen: list[NextTask] = []

    def first(state: State, config: RunnableConfig) -> dict[str, str]:
        foreseen.extend(next_tasks(_read_task(config), {"text": "b"}))
        return {"text": "b"}

    builder = StateGraph(State)
    builder.add_node("first", first)
    builder.add_node("second", lambda state: {"text": state["text"] + "c"})
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", END)
    result = builder.compile().invoke({"text": "a"})
    if result != {"text": "bc"}:
        return "a small graph did not run as expected"
    if [(task.site, task.input) for task in foreseen] != [(("second",), {"text": "b"})]:
        return f"the next task was read as {foreseen!r}"
    return ""
