"""Five agents in series: researcher, analyst, critic, planner, writer.

Each has a long brief of its own, which never changes, and gets the task and the whole answer of the agent before
it; the researcher gets the document. It is the shape in which streaming edges pay most: while one agent speaks,
the next one's brief and what has been said so far are prefilled on the other device.
"""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from graphs.briefs import brief
from langgraph_pingpong import ChatPingPong, agent_node


class State(TypedDict, total=False):
    """The user's task and document, and what each agent wrote."""

    task: str
    document: str
    findings: str
    analysis: str
    critique: str
    plan: str
    report: str


CHAIN = (
    ("researcher", "document", "findings", "List the facts in this document that matter for the task."),
    ("analyst", "findings", "analysis", "Say what these findings mean for the task."),
    ("critic", "analysis", "critique", "Name what is weak or missing in this analysis."),
    ("planner", "critique", "plan", "Plan the steps that answer the task in the light of this critique."),
    ("writer", "plan", "report", "Write the short report that this plan asks for."),
)
"""Node, the state key it reads, the state key it writes, and what it is asked."""


def build(
    model: ChatPingPong, *, brief_tokens: int = 768, max_tokens: int = 256, last_max_tokens: int = 64
) -> CompiledStateGraph[State]:
    """The compiled chain.

    Args:
        model: the chat model of every agent.
        brief_tokens: length of each agent's brief, in tokens, from 50 to about 8,000.
        max_tokens: the longest answer of the first four agents, in tokens.
        last_max_tokens: the longest answer of the last one, in tokens.

    Raises:
        ValueError: `brief_tokens` is out of range.
    """
    builder = StateGraph(State)
    nodes = [node for node, *_ in CHAIN]
    for node, reads, writes, ask in CHAIN:
        limit = last_max_tokens if node == nodes[-1] else max_tokens
        prompt = ChatPromptTemplate.from_messages(
            [
                ("system", "{brief}"),
                ("human", f"Task: {{task}}\n\n{reads.capitalize()}:\n{{{reads}}}\n\n{ask}"),
            ]
        ).partial(brief=brief(node, brief_tokens, model.get_num_tokens))
        builder.add_node(node, agent_node(model.bind(max_tokens=limit), prompt=prompt, writes=writes))
    for source, target in zip([START, *nodes], [*nodes, END], strict=True):
        builder.add_edge(source, target)
    return builder.compile()
