"""Tasks of a LangGraph run: the one that makes a call, and those that would come next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A node's task while it runs: where it stands in the graph, and the loop that runs it.

    `site` names the enclosing graphs' nodes and the node; `push` is the position of its own `Send`, those of the graphs
    around are in `site`; `owner` is shared by every task of one run. `beside` names the nodes of its superstep, its own
    included.
    """

    site: tuple[str, ...]
    push: int | None
    step: int
    attempt: int
    owner: object
    task_id: str
    loop: Any
    config: RunnableConfig
    beside: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NextTask:
    """A task that would run next: its node as it was given to `add_node`, and the input and config it would get.

    `specs` are the node's own object in the compiled graph and, before it, those of the subgraphs that were entered.
    It is not `certain` if it lies behind a conditional edge that may lead elsewhere.
    """

    site: tuple[str, ...]
    push: int | None
    step: int
    specs: tuple[Any, ...]
    node: Runnable[Any, Any]
    input: Any
    config: RunnableConfig
    certain: bool


UNKNOWN = object()
"""An update that cannot be told."""
