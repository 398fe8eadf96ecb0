"""A planner, then two graphs within the graph: one that finds things out, and one that writes and corrects.

Each subgraph is a compiled graph given to `add_node`. Where its first prompt is declared, it is foreseen from outside:
the researcher's is prefilled while the planner speaks. The way out of a subgraph is learned in the first run.
"""

from __future__ import annotations

from collections.abc import Sequence

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from graphs.agents import Agents
from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.edges import AgentNode


class State(TypedDict, total=False):
    """The task, and what each agent wrote."""

    task: str
    document: str
    plan: str
    facts: str
    analysis: str
    draft: str
    report: str


def chain(nodes: Sequence[tuple[str, AgentNode | CompiledStateGraph[State]]]) -> CompiledStateGraph[State]:
    """Nodes in a row, as a compiled graph."""
    builder, names = StateGraph(State), [name for name, _ in nodes]
    for name, node in nodes:
        builder.add_node(name, node)
    for source, target in zip([START, *names], [*names, END], strict=True):
        builder.add_edge(source, target)
    return builder.compile()


def build(model: ChatPingPong, *, brief_tokens: int = 512, max_tokens: int = 96) -> CompiledStateGraph[State]:
    """The compiled graph.

    Args:
        model: the chat model of all agents.
        brief_tokens: length of each agent's brief, in tokens.
        max_tokens: the longest answer, in tokens.

    Raises:
        ValueError: `brief_tokens` is out of range.
    """
    node = Agents(model, brief_tokens, max_tokens).node
    research = chain(
        [
            ("researcher", node("researcher", ["plan"], "facts", "List the facts that this plan needs.")),
            ("analyst", node("analyst", ["facts"], "analysis", "Say what these facts mean for the task.")),
        ]
    )
    writing = chain(
        [
            ("writer", node("writer", ["plan", "analysis"], "draft", "Write the report that the plan asks for.")),
            ("editor", node("critic", ["draft"], "report", "Write this draft once more, shorter and without faults.")),
        ]
    )
    planner = node("planner", [], "plan", "Plan the report that the task asks for.")
    return chain([("planner", planner), ("research", research), ("writing", writing)])
