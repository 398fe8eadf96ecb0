"""Nodes that declare their prompt, so that it can be foreseen exactly from the first run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig

from langgraph_pingpong.errors import ConfigError

Prompt = BasePromptTemplate[Any] | Callable[[Any], LanguageModelInput]
"""A prompt template over the state's keys, or a function from the state to a prompt."""

Writes = str | Callable[[AIMessage], Mapping[str, Any]]
"""The state key that gets the answer's text, or a function from the answer to the node's update."""


class Declared(Protocol):
    """What is known of a node that declares its prompt: what it asks the model, and what it makes of the answer."""

    @property
    def model(self) -> Runnable[LanguageModelInput, AIMessage]:
        """The chat model it calls once, also with `bind(...)`."""

    def messages(self, state: Any) -> Sequence[BaseMessage] | None:
        """The prompt for a state; None if that cannot be told."""

    def update(self, answer: AIMessage) -> Any:
        """What the node returns for an answer; `UNKNOWN` if that cannot be told."""


class AgentNode(Runnable[Any, Mapping[str, Any]]):
    """A node that fills its prompt from the state, calls the model once, and writes the answer to the state."""

    def __init__(self, model: Runnable[LanguageModelInput, AIMessage], prompt: Prompt, writes: Writes) -> None:
        self.model = model
        self._prompt = prompt
        self._writes = writes

    def messages(self, state: Any) -> list[BaseMessage]:
        """The prompt for a state.

        Raises:
            ConfigError: the state lacks a variable of the prompt template.
        """
        if not isinstance(self._prompt, BasePromptTemplate):
            return to_messages(self._prompt(state))
        values = state if isinstance(state, Mapping) else vars(state)
        if missing := set(self._prompt.input_variables) - set(values):
            raise ConfigError(f"The state has no {', '.join(sorted(missing))}, which the prompt of the node needs.")
        return self._prompt.format_prompt(**values).to_messages()

    def update(self, answer: AIMessage) -> Mapping[str, Any]:
        """What the node returns for an answer."""
        return {self._writes: answer.text} if isinstance(self._writes, str) else self._writes(answer)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Mapping[str, Any]:
        """Run the node."""
        return self.update(self.model.invoke(self.messages(input), config))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Mapping[str, Any]:
        """Run the node."""
        return self.update(await self.model.ainvoke(self.messages(input), config))


def agent_node(model: Runnable[LanguageModelInput, AIMessage], *, prompt: Prompt, writes: Writes) -> AgentNode:
    """A node for `add_node` whose edges stream from the first run on.

    Args:
        model: the chat model, also with `bind(...)`.
        prompt: a prompt template over the state's keys, or a function from the state to messages. It is also
            run on states that have not happened yet, so a function must be pure.
        writes: the state key that gets the answer's text, or a pure function from the answer to the update, for
            example `lambda answer: {"messages": [answer]}`.

    Raises:
        ConfigError: an argument is of the wrong kind.
    """
    if not isinstance(model, Runnable):
        raise ConfigError(f"agent_node needs a chat model, not {type(model).__name__}.")
    if not (isinstance(prompt, BasePromptTemplate) or callable(prompt)):
        raise ConfigError(f"prompt must be a prompt template or a function of the state, not {prompt!r}.")
    if not (callable(writes) or (isinstance(writes, str) and writes)):
        raise ConfigError(f"writes must be a state key or a function of the answer, not {writes!r}.")
    return AgentNode(model, prompt, writes)


def to_messages(prompt: LanguageModelInput) -> list[BaseMessage]:
    """What a chat model makes of its input."""
    if isinstance(prompt, PromptValue):
        return prompt.to_messages()
    return convert_to_messages([prompt] if isinstance(prompt, str) else prompt)
