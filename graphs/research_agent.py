"""A planner, a `create_agent` agent with tools, and a writer.

The agent looks things up in the handbooks beside this module, with two tools, as often as it likes. Its first prompt is
declared: LangChain's own model node can be run ahead up to its call, so it is prefilled while the planner speaks. Its
next prompts, with the tools' results, are prefilled while the tools run, from the first run on. The way out of the
agent to the writer is learned in the first run.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.agents import Agents
from graphs.briefs import read_text
from langgraph_pingpong import ChatPingPong, agent_node


class State(MessagesState, total=False):
    """The task, the plan, what the agent said and found, and the report."""

    task: str
    document: str
    plan: str
    report: str


@tool
def list_handbooks() -> list[str]:
    """The names of the handbooks that can be read."""
    folder = files("graphs").joinpath("texts", "reference")
    return sorted(entry.name.removesuffix(".md") for entry in folder.iterdir())


@tool
def read_handbook(name: str) -> str:
    """The beginning of a handbook, by its name."""
    try:
        return read_text(f"reference/{name}.md")[:1500]
    except FileNotFoundError:
        return f"There is no handbook {name!r}; call list_handbooks for the names."


def _planned(answer: AIMessage) -> Mapping[str, Any]:
    return {"plan": answer.text, "messages": [HumanMessage(f"Find out what this plan needs.\n\n{answer.text}")]}


def build(model: ChatPingPong, *, brief_tokens: int = 512, max_tokens: int = 128) -> CompiledStateGraph[State]:
    """The compiled graph.

    Args:
        model: the chat model of planner, agent and writer.
        brief_tokens: length of the planner's brief, in tokens.
        max_tokens: the longest answer, in tokens.

    Raises:
        ValueError: `brief_tokens` is out of range.
    """

    def report(state: State) -> list[tuple[str, str]]:
        found = state["messages"][-1].text
        return [
            ("system", "You write short reports, in plain words, from what others have found."),
            ("human", f"Task: {state['task']}\n\nWhat was found:\n{found}\n\nWrite the report."),
        ]

    agent = create_agent(
        model.model_copy(update={"max_tokens": max_tokens}),
        [list_handbooks, read_handbook],
        system_prompt="You find things out. Look them up in the handbooks, then answer in a few sentences.",
    )
    builder = StateGraph(State)
    plan = Agents(model, brief_tokens, max_tokens).node("planner", [], _planned, "Plan what has to be found out.")
    builder.add_node("planner", plan)
    builder.add_node("agent", agent)
    builder.add_node("writer", agent_node(model.bind(max_tokens=max_tokens), prompt=report, writes="report"))
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "agent")
    builder.add_edge("agent", "writer")
    builder.add_edge("writer", END)
    return builder.compile()
