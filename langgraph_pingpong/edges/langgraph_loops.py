"""The loops of LangGraph that run a task's graph and the graphs around it, and when they end.

A third part of langgraph_internals.py, under the same version guard and self-test.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from langgraph_pingpong.edges.tasks import RunningTask
from langgraph_pingpong.growing_prompt import RUN, GraphSite

logger = logging.getLogger(__name__)

NO_SENDS: Mapping[str, int] = {}


def loop_of(call: Any) -> Any:
    """The loop behind the function that schedules tasks; a node with a timeout has it wrapped in a closure."""
    if not hasattr(call, "keywords"):
        call = next(cell.cell_contents for cell in call.__closure__ if hasattr(cell.cell_contents, "keywords"))
    return call.keywords["schedule_task"].__self__


def push_of(path: tuple[Any, ...]) -> int | None:
    """The position of the `Send` that led to a task, given by its path."""
    return path[1] if path[0] == "__pregel_push" and isinstance(path[1], int) else None


def turn_of(loop: Any, task_id: str) -> int | None:
    """How many calls of the same function, from the same place, run that began before this functional task.

    None for the first, and so for each of calls that wait for one another, as in a loop.
    """
    own = loop.tasks.get(task_id)
    if own is None or own.path[0] != "__pregel_push" or isinstance(own.path[1], int):
        return None
    running = (each for each in list(loop.tasks.values()) if each.name == own.name and not each.writes)
    return sum(each.path[:2] == own.path[:2] and each.path[2] < own.path[2] for each in running) or None


def site_of(namespace: Iterable[str], sent: Mapping[str, int] = NO_SENDS) -> tuple[str, ...]:
    """('writer:1f0…', 'draft:8c2…') -> ('writer', 'draft'): the ids change from run to run, the names do not.

    Behind the name of a task that was `sent` stands the position of the `Send`, as in 'writer:0'.
    """
    parts = (part.partition(":") for part in namespace)
    return tuple(with_push(name, sent.get(id)) for name, _, id in parts)


def with_push(name: str, push: int | None) -> str:
    """The name of a node as a part of the sites within it. LangGraph allows no colon in a node's own."""
    return name if push is None else f"{name}:{push}"


def sends_around(loop: Any) -> dict[str, int]:
    """The positions of the `Send`s that led to a graph, and to those around it, by the ids of their tasks."""
    sent: dict[str, int] = {}
    try:
        while loop.is_nested:
            configurable = loop.config["configurable"]
            id, loop = configurable["__pregel_task_id"], loop_of(configurable["__pregel_call"])
            if (push := push_of(loop.tasks[id].path)) is not None:
                sent[id] = push
    except Exception:
        logger.debug("no task found around a subgraph", exc_info=True)
    return sent


def graphs_around(task: RunningTask) -> list[tuple[Any, GraphSite]]:
    """The task's own graph and those around it, from the inside out: of each the loop, and where it is within the run.

    The site of the last, the run's own graph, is (). It is not the task's site without the task: a functional task's
    has the name of its flow in it. Where the way up is not understood, the run is taken to end with what was found.
    """
    loops = [task.loop]
    try:
        while loops[-1].is_nested:
            loops.append(loop_of(loops[-1].config["configurable"]["__pregel_call"]))
    except Exception:
        logger.debug("no graph found around a subgraph", exc_info=True)
    sent = sends_around(task.loop)
    sites = (GraphSite(site_of(loop.checkpoint_ns, sent), frozenset(loop.nodes)) for loop in loops[:-1])
    return [*zip(loops, sites, strict=False), (loops[-1], RUN)]


def when_graph_ends(loop: Any, callback: Callable[[], None]) -> None:
    """Call back when the run of a graph is over: LangGraph leaves its loop then, or lets go of it.

    An error that somebody keeps, or that waits for the garbage collector, keeps the loop long after the run.
    """
    ended = weakref.finalize(loop, callback)  # calls back once, whatever comes first
    ended.atexit = False
    if stack := getattr(loop, "stack", None):
        stack.callback(ended)
