"""Three experts look at the same task at the same time, then a chair sums up what they said.

The experts share the devices. The chair's prompt holds all three answers, in a fixed order: it is prefilled while they
speak, one answer after the other, and what a later expert says meanwhile waits for its turn.
"""

from __future__ import annotations

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from graphs.agents import Agents
from langgraph_pingpong import ChatPingPong


class State(TypedDict, total=False):
    """The task, what each expert said, and the summary."""

    task: str
    document: str
    facts: str
    analysis: str
    doubts: str
    summary: str


EXPERTS = (
    ("researcher", "facts", "Say which facts matter for the task."),
    ("analyst", "analysis", "Say how you would weigh them up."),
    ("critic", "doubts", "Say what could go wrong, or be misunderstood."),
)
"""Role, the state key it writes, and what it is asked."""


def build(model: ChatPingPong, *, brief_tokens: int = 512, max_tokens: int = 96) -> CompiledStateGraph[State]:
    """The compiled graph.

    Args:
        model: the chat model of all agents.
        brief_tokens: length of each agent's brief, in tokens.
        max_tokens: the longest answer, in tokens.

    Raises:
        ValueError: `brief_tokens` is out of range.
    """
    agents, builder = Agents(model, brief_tokens, max_tokens), StateGraph(State)
    for role, writes, ask in EXPERTS:
        builder.add_node(role, agents.node(role, [], writes, ask))
        builder.add_edge(START, role)
    said = [writes for _, writes, _ in EXPERTS]
    builder.add_node("chair", agents.node("writer", said, "summary", "Sum up what the three say, and decide."))
    builder.add_edge([role for role, *_ in EXPERTS], "chair")
    builder.add_edge("chair", END)
    return builder.compile()
