"""The agents of the gallery: a role's long brief, the task, what others wrote, and what is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage

from graphs.briefs import brief
from langgraph_pingpong import ChatPingPong, agent_node
from langgraph_pingpong.edges import AgentNode


@dataclass(frozen=True, slots=True)
class Agents:
    """Makes agents that share a model; lengths are in tokens."""

    model: ChatPingPong
    brief_tokens: int
    max_tokens: int

    def node(
        self, role: str, reads: Sequence[str], writes: str | Callable[[AIMessage], Mapping[str, Any]], ask: str
    ) -> AgentNode:
        """A node that declares its prompt.

        Args:
            role: one of `graphs.briefs.ROLES`.
            reads: keys of the state that the prompt shows beside task and document, as far as the state has them.
            writes: the key that gets the answer, or a function from the answer to the node's update.
            ask: what the agent is asked.

        Raises:
            ValueError: `brief_tokens` is out of range.
        """
        system = brief(role, self.brief_tokens, self.model.get_num_tokens)

        def prompt(state: Mapping[str, Any]) -> list[tuple[str, str]]:
            shown = [f"{key.capitalize()}:\n{state[key]}" for key in ("task", "document", *reads) if state.get(key)]
            return [("system", system), ("human", "\n\n".join([*shown, ask]))]

        return agent_node(self.model.bind(max_tokens=self.max_tokens), prompt=prompt, writes=writes)
