"""Every private name of LangGraph that this package uses, and nothing else uses any.

From the config of a node's model call it finds the running task and its loop, and asks LangGraph's own functions which
tasks would come next after a given update. Where LangGraph has moved, `usable()` is false: every call runs plain then.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langsmith import tracing_context

from langgraph_pingpong.edges.branches import may_send
from langgraph_pingpong.edges.langgraph_loops import (
    graphs_around,
    loop_of,
    push_of,
    sends_around,
    site_of,
    turn_of,
    with_push,
)
from langgraph_pingpong.edges.rehearsal import ReadOnlyStore
from langgraph_pingpong.edges.tasks import UNKNOWN, NextTask, RunningTask

logger = logging.getLogger(__name__)

TESTED = ((1, 2), (2, 0))
"""LangGraph versions from the first up to, not including, the second."""


_REDUCERS = (operator.add, operator.or_, operator.and_, operator.mul, max, min)  # Python's own that make a new value

_Writes = tuple[Any, Any]
"""What a task writes for certain, and that together with what its conditional edges might add."""

SiblingUpdate = Callable[[tuple[str, ...], int | None, Runnable[Any, Any]], Any]
"""What another running task (its site, push and node) would return, or `UNKNOWN`."""


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
    runtime, loop = configurable["__pregel_runtime"], loop_of(configurable["__pregel_call"])
    task_id, sent = configurable["__pregel_task_id"], push_of(metadata["langgraph_path"])
    return RunningTask(
        site=site_of(metadata["langgraph_checkpoint_ns"].split("|"), sends_around(loop)),
        push=turn_of(loop, task_id) if sent is None else sent,
        step=metadata["langgraph_step"],
        attempt=runtime.execution_info.node_attempt,
        owner=runtime.control,
        task_id=task_id,
        loop=loop,
        config=config,
        beside=frozenset(each.name for each in list(loop.tasks.values())),
    )


def spec_of(task: RunningTask) -> Any:
    """The node's own object in the compiled graph, the same in every run; for a functional task its caller's."""
    nodes = task.loop.nodes
    return nodes.get(task.site[-1]) or next(iter(nodes.values()))


def node_of(task: RunningTask) -> Runnable[Any, Any] | None:
    """What was given to `add_node`; None for a functional task."""
    spec = task.loop.nodes.get(task.site[-1])
    return spec.bound if spec is not None else None


def input_of(task: RunningTask) -> Any:
    """The state or `Send` argument that the node was given.

    Raises:
        KeyError: its superstep is over.
    """
    return task.loop.tasks[task.task_id].input


def state_of(task: RunningTask) -> Mapping[str, Any]:
    """The values of the graph's channels at the start of the superstep, without LangGraph's own."""
    channels = task.loop.channels
    return {
        name: channel.get()
        for name, channel in channels.items()
        if not name.startswith(("branch:", "__", "join:")) and channel.is_available()
    }


def next_tasks(task: RunningTask, update: Any, sibling_update: SiblingUpdate | None = None) -> list[NextTask]:
    """The tasks that would run if the node returned `update` now.

    This is LangGraph's own superstep on copies of its channels. Static edges and `Command`s are followed. A conditional
    edge would run the user's function on text that nobody has said: all that it declares as its ends may be next.
    `sibling_update` tells what the other tasks of the superstep that still run would return; if one of them is unknown,
    nothing is foreseen. Nothing is foreseen beyond a breakpoint.
    """
    loop = task.loop
    if _breaks(loop.interrupt_after, task.site[-1]):
        return []
    writes = [_task_writes(loop.tasks[task.task_id], update)]
    for other in _siblings(task):
        if other_writes := _sibling_writes(task, other, sibling_update):
            writes.append(other_writes)
        else:
            return []
    return _tasks_after(loop, task.site[:-1], (), writes)


def entered(task: NextTask) -> Iterator[NextTask]:
    """The task itself or, if its node is a compiled graph, the first tasks within it, however deep.

    A subgraph that keeps its state from run to run (`checkpointer=True`) is not entered: nothing here knows that state.
    """
    from langgraph.graph.state import CompiledStateGraph

    graph = task.node
    if not isinstance(graph, CompiledStateGraph):
        yield task
        return
    try:
        first = [] if graph.checkpointer is True else _first_tasks(task, graph)
    except Exception:  # the subgraph may refuse its input, as it then will at its turn
        logger.debug("a subgraph could not be entered", exc_info=True)
        return
    for inner in first:
        yield from entered(replace(inner, certain=inner.certain and task.certain))


def _first_tasks(task: NextTask, graph: Any) -> list[NextTask]:
    """The tasks of a subgraph's first superstep, when it is given the input of its own task."""
    from langgraph._internal._config import ensure_config
    from langgraph.constants import START
    from langgraph.pregel._algo import increment
    from langgraph.pregel._checkpoint import channels_from_checkpoint, empty_checkpoint

    checkpoint, start = empty_checkpoint(), graph.nodes[START]
    channels, managed = channels_from_checkpoint(graph.channels, checkpoint)
    config = ensure_config(graph.config, task.config)
    loop = SimpleNamespace(
        nodes=graph.nodes,
        channels=channels,
        managed=managed,
        checkpoint=checkpoint,
        config=config,
        step=0,
        stop=config["recursion_limit"],
        checkpointer_get_next_version=increment,
        trigger_to_nodes=graph.trigger_to_nodes,
        interrupt_before=graph.interrupt_before_nodes,
    )
    begin = SimpleNamespace(path=(), name=START, writers=start.flat_writers, triggers=start.triggers)
    around = (*task.site[:-1], with_push(task.site[-1], task.push))
    return _tasks_after(loop, around, task.specs, [_task_writes(begin, task.input)])


def _tasks_after(loop: Any, around: tuple[str, ...], specs: tuple[Any, ...], writes: list[_Writes]) -> list[NextTask]:
    """The tasks that would run after these writes, and those that might, in the graph that lies `around` them."""
    certain = _superstep(loop, [sure for sure, _ in writes])
    possible = certain if all(sure is might for sure, might in writes) else _superstep(loop, [m for _, m in writes])
    return [
        NextTask(
            site=(*around, ahead.name),
            push=push_of(ahead.path),
            step=loop.step + 1,
            specs=(*specs, loop.nodes[ahead.name]),
            node=loop.nodes[ahead.name].bound,
            input=ahead.input,
            config=ahead.config,
            certain=ahead.id in certain and ahead.id in possible,
        )
        for ahead in {**certain, **possible}.values()
        if not _breaks(loop.interrupt_before, ahead.name)
    ]


def _siblings(task: RunningTask) -> Iterator[Any]:
    return (other for other in task.loop.tasks.values() if other.id != task.task_id)


def _sibling_writes(task: RunningTask, other: Any, sibling_update: SiblingUpdate | None) -> _Writes | None:
    from langgraph.pregel._algo import PregelTaskWrites

    if other.writes:
        written = PregelTaskWrites(other.path, other.name, deque(other.writes), other.triggers)
        return written, written
    if sibling_update is None:
        return None
    site = (*task.site[:-1], other.name)
    update = sibling_update(site, push_of(other.path), task.loop.nodes[other.name].bound)
    return None if update is UNKNOWN else _task_writes(other, update)


def _superstep(loop: Any, writes: list[Any]) -> Mapping[str, Any]:
    from langgraph.checkpoint.base import copy_checkpoint
    from langgraph.pregel._algo import apply_writes, prepare_next_tasks

    channels, checkpoint = _copy_channels(loop.channels), copy_checkpoint(loop.checkpoint)
    get_next_version = loop.checkpointer_get_next_version
    updated = apply_writes(checkpoint, channels, writes, get_next_version, loop.trigger_to_nodes)
    # The users' own cache keys are for states that are.
    nodes = {at: node.copy({"cache_policy": None}) if node.cache_policy else node for at, node in loop.nodes.items()}
    return prepare_next_tasks(
        checkpoint,
        [],
        nodes,
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


def _task_writes(running: Any, update: Any) -> _Writes:
    """What a task writes if its node returns `update`."""
    from langgraph.constants import END
    from langgraph.pregel._algo import PregelTaskWrites
    from langgraph.pregel._write import ChannelWrite

    certain: deque[tuple[str, Any]] = deque()
    possible: deque[tuple[str, Any]] = deque()
    config: RunnableConfig = {"configurable": {"__pregel_send": certain.extend}}
    for writer in running.writers:
        if isinstance(writer, ChannelWrite):
            writer.invoke(update, config)
        else:
            ends = _ends(writer)
            (certain if len(ends) == 1 else possible).extend((end, None) for end in ends if end != END)
    sure = PregelTaskWrites(running.path, running.name, certain, running.triggers)
    return sure, sure._replace(writes=certain + possible) if possible else sure


def _ends(writer: Any) -> set[str]:
    """The channels of a conditional edge's ends; none if it does not declare them, or may send inputs of its own."""
    from langgraph.graph._branch import BranchSpec
    from langgraph.pregel._write import ChannelWrite

    branch = getattr(getattr(writer, "func", None), "__self__", None)
    if not isinstance(branch, BranchSpec) or may_send(branch.path):
        return set()
    return {channel for channel, *_ in ChannelWrite.get_static_writes(writer) or ()}


def declares_end(spec: Any, name: str) -> bool:
    """Whether a conditional edge behind a node of a compiled graph declares the node `name` as one of its ends."""
    from langgraph.pregel._write import ChannelWrite

    branches = (writer for writer in spec.flat_writers if not isinstance(writer, ChannelWrite))
    return any(f"branch:to:{name}" in _ends(writer) for writer in branches)


def rehearsal_config(task: RunningTask, state: Mapping[str, Any]) -> RunnableConfig:
    """A config under which a node can be run without anyone noticing: what it writes, asks or schedules is lost."""
    from langgraph.runtime import Runtime

    def read(select: str | list[str], fresh: bool = False) -> Any:
        return state.get(select) if isinstance(select, str) else {name: state[name] for name in select if name in state}

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a functional task cannot be rehearsed")

    runtime = task.config["configurable"]["__pregel_runtime"]
    store: Any = ReadOnlyStore(runtime.store) if runtime.store else None
    quiet = Runtime(context=runtime.context, store=store)
    return {
        "metadata": {},
        "configurable": {
            "__pregel_send": lambda writes: None,
            "__pregel_read": read,
            "__pregel_call": refuse,
            "__pregel_runtime": quiet,
        },
    }


def _copy_channels(channels: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of channels. They share their values, but for those that a reducer of the user's may change in place."""
    from langgraph._internal._typing import MISSING

    memo = {id(MISSING): MISSING}  # the mark for 'no value' must stay itself
    return {n: c.copy() if _leaves_values(c) else copy.deepcopy(c, memo) for n, c in channels.items()}


def _leaves_values(channel: Any) -> bool:
    """Whether a channel never changes a value in place: LangGraph's own do not, nor do its reducers and Python's."""
    reducer = getattr(channel, "operator", None) or getattr(channel, "reducer", None)
    own = reducer is None or reducer in _REDUCERS or getattr(reducer, "__module__", "").startswith("langgraph.")
    return own and type(channel).__module__.startswith("langgraph.channels.")


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


@tracing_context(enabled=False)  # the environment may have switched it on, for any context
def _self_test() -> str:
    """Foresee the second node of a graph, in a subgraph, from within the first, and look up from there.

    Returns what went wrong, or ''.
    """
    from langgraph.graph import END, START, StateGraph
    from typing_extensions import TypedDict

    class State(TypedDict):
        text: str

    foreseen: list[NextTask] = []
    around: list[tuple[str, ...]] = []

    def first(state: State, config: RunnableConfig) -> dict[str, str]:
        for task in next_tasks(_read_task(config), {"text": "b"}):
            foreseen.extend(entered(task))
        return {"text": "b"}

    def second(state: State, config: RunnableConfig) -> dict[str, str]:
        around.extend(graph.site for _, graph in graphs_around(_read_task(config)))
        return {"text": state["text"] + "c"}

    inner = StateGraph(State).add_node("inner", second).add_edge(START, "inner")
    builder = StateGraph(State)
    builder.add_node("first", first)
    builder.add_node("second", inner.compile())
    builder.add_edge(START, "first").add_edge("first", "second")
    builder.add_conditional_edges("first", lambda state: END, ["first", END])
    result = builder.compile().invoke({"text": "a"})
    if result != {"text": "bc"}:
        return "a small graph did not run as expected"
    next_one, again = (("second", "inner"), {"text": "b"}, True), (("first",), {"text": "b"}, False)
    if [(task.site, task.input, task.certain) for task in foreseen] != [next_one, again]:
        return f"the next task was read as {foreseen!r}"
    if around != [("second",), ()]:
        return f"the graphs around a task were read as {around!r}"
    return ""
