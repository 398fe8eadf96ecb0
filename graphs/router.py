"""A dispatcher reads the task and sends it to one of three specialists.

The conditional edge declares its three ends, so while the dispatcher speaks, what is known of each specialist's prompt
is prefilled: brief and task. Once two runs in a row went the same way, the others are left out.
"""

from __future__ import annotations

from typing import Literal

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from graphs.agents import Agents
from langgraph_pingpong import ChatPingPong

Specialist = Literal["researcher", "analyst", "writer"]


class State(TypedDict, total=False):
    """The task, what the dispatcher said, and the answer of the specialist."""

    task: str
    document: str
    choice: str
    answer: str


ASKS: dict[Specialist, str] = {
    "researcher": "Answer with the facts that the task asks for.",
    "analyst": "Answer with the numbers that the task asks for, and what they mean.",
    "writer": "Write the text that the task asks for.",
}
"""The specialists, and what each is asked."""


def route(state: State) -> Specialist:
    """The specialist whose name the dispatcher said first; the writer if none."""
    said = state["choice"].lower()
    named = [name for name in ASKS if name in said]
    return min(named, key=said.index, default="writer")


def build(model: ChatPingPong, *, brief_tokens: int = 512, max_tokens: int = 128) -> CompiledStateGraph[State]:
    """The compiled graph.

    Args:
        model: the chat model of all agents.
        brief_tokens: length of each agent's brief, in tokens.
        max_tokens: the longest answer of a specialist, in tokens; the dispatcher says at most 16.

    Raises:
        ValueError: `brief_tokens` is out of range.
    """
    builder = StateGraph(State)
    choose = f"Who should do this? Answer with one word: {', '.join(ASKS)}."
    builder.add_node("dispatcher", Agents(model, brief_tokens, 16).node("planner", [], "choice", choose))
    builder.add_edge(START, "dispatcher")
    builder.add_conditional_edges("dispatcher", route)
    for name, ask in ASKS.items():
        builder.add_node(name, Agents(model, brief_tokens, max_tokens).node(name, [], "answer", ask))
        builder.add_edge(name, END)
    return builder.compile()
