"""A writer and a critic, in turn until the draft is accepted.

The writer drafts, the critic accepts or says what to change, and a conditional edge leads back to the writer or on.
Both prompts are declared: the critic's is prefilled while the writer speaks, and of the next draft's what is known
before the critic has spoken, until runs have shown which way is usual. With `approve` a person has the last word: the
graph is interrupted, and goes on with what the person answers.
"""

from __future__ import annotations

import operator
from typing import Annotated, Literal

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict

from graphs.agents import Agents
from langgraph_pingpong import ChatPingPong


class State(TypedDict, total=False):
    """The task, the draft, what was said of it last, and how many drafts there were."""

    task: str
    document: str
    draft: str
    remarks: str
    drafts: Annotated[int, operator.add]


def approval(state: State) -> Command[Literal["writer", "__end__"]]:
    """Ask a person; an answer is a remark for the next draft, none accepts this one."""
    remarks = interrupt({"draft": state["draft"], "question": "What should change? Answer with nothing to accept."})
    return Command(goto="writer", update={"remarks": remarks}) if remarks else Command(goto="__end__")


def build(
    model: ChatPingPong,
    *,
    most_drafts: int = 3,
    approve: bool = False,
    brief_tokens: int = 512,
    max_tokens: int = 128,
) -> CompiledStateGraph[State]:
    """The compiled loop.

    Args:
        model: the chat model of both agents.
        most_drafts: after so many drafts the last one is taken, whatever the critic says.
        approve: whether a person is asked at the end; takes a checkpointer, as `langgraph dev` has.
        brief_tokens: length of each agent's brief, in tokens.
        max_tokens: the longest answer, in tokens.

    Raises:
        ValueError: `brief_tokens` is out of range.
    """
    accepted = "approval" if approve else END

    def decide(state: State) -> str:
        done = state["remarks"].lstrip().upper().startswith("ACCEPTED") or state["drafts"] >= most_drafts
        return accepted if done else "writer"

    agents, builder = Agents(model, brief_tokens, max_tokens), StateGraph(State)
    write = "Write the text that the task asks for. Where there are remarks, answer them."
    review = "If nothing has to change, answer with the word ACCEPTED alone. Else say what to change."
    drafted = agents.node("writer", ["draft", "remarks"], lambda answer: {"draft": answer.text, "drafts": 1}, write)
    builder.add_node("writer", drafted)
    builder.add_node("critic", agents.node("critic", ["draft"], "remarks", review))
    if approve:
        builder.add_node(approval)
    builder.add_edge(START, "writer")
    builder.add_edge("writer", "critic")
    builder.add_conditional_edges("critic", decide, ["writer", accepted])
    return builder.compile()
