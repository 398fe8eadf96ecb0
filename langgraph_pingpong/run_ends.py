"""What happens when a run of a graph is over: its edges are dropped, what is known of it is let go of."""

from __future__ import annotations

import weakref
from functools import partial

from langgraph_pingpong.edges import RunningTask, when_graph_ends
from langgraph_pingpong.loop import LoopThread
from langgraph_pingpong.planning import PlannedCall, planner_of
from langgraph_pingpong.session import Session


def close_with_graph(session: Session, task: RunningTask | None, planned: PlannedCall | None) -> None:
    """End the session's edges within a graph, and at last the run itself, when the graph of this call has ended."""
    close = partial(_close, session.pool.loop, weakref.ref(session))
    if planned is not None:
        planned.close_with_graph(close)
    elif task is not None and session.is_new:
        when_graph_ends(task, partial(close, task.site[:-1]))


def _close(loop: LoopThread, session: weakref.ref[Session], graph: tuple[str, ...]) -> None:
    """The run of a graph is over. The session is held weakly: waiting for that must not keep the engines alive."""
    if (alive := session()) is not None:
        loop.call_soon(_end_graph, alive, graph)


def _end_graph(session: Session, graph: tuple[str, ...]) -> None:
    session.close(graph)
    if not graph:  # of the run's own graph: nothing follows any more
        planner_of(session.pool).forget(session.owner)
