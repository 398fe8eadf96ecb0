"""What happens when a run of a graph is over: its edges are dropped, what is known of it is let go of."""

from __future__ import annotations

import weakref
from functools import partial

from langgraph_pingpong.edges import RunningTask, graphs_around, when_graph_ends
from langgraph_pingpong.growing_prompt import GraphSite
from langgraph_pingpong.planning import PlannedCall, planner_of
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.session import Session


def close_with_graph(session: Session, task: RunningTask | None, planned: PlannedCall | None) -> None:
    """End the session's edges within a graph when it has ended, and with the run's own graph the run itself."""
    close = partial(_close, weakref.ref(session), weakref.ref(session.pool), session.owner)
    if planned is not None:
        planned.close_with_graph(close)
    elif task is not None and session.is_new:
        whole, site = graphs_around(task)[-1]  # without edges, only the end of the run counts
        when_graph_ends(whole, partial(close, site))


def _close(session: weakref.ref[Session], pool: weakref.ref[EnginePool], owner: object, graph: GraphSite) -> None:
    """The run of a graph is over. The pool is held weakly: waiting for that must not keep the engines alive."""
    if (alive := pool()) is not None:
        alive.loop.call_soon(_end_graph, session(), alive, owner, graph)


def _end_graph(session: Session | None, pool: EnginePool, owner: object, graph: GraphSite) -> None:
    if session is not None:  # of too many runs at once the pool forgets the sessions used least recently
        session.close(graph)
    if graph.site:
        return
    planner_of(pool).forget(owner)  # the run's own graph: nothing follows any more
    if session is not None and pool.runs.get(id(owner)) is session:
        del pool.runs[id(owner)]  # it holds the pool: no circle is left that only a full collection finds
