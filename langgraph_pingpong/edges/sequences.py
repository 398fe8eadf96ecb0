"""`prompt | model | parser` as a node: declared by its steps, as far as they are LangChain's own.

Prompts, parsers and what only moves values about can be run on made-up values. A function of the user's cannot: what
stands before the model must be free of them, and what a node returns is told only if what stands after it is, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import BaseLLMOutputParser, JsonOutputToolsParser
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.prompts.chat import (
    AIMessagePromptTemplate,
    ChatMessagePromptTemplate,
    HumanMessagePromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
)
from langchain_core.runnables.passthrough import RunnableAssign, RunnablePick
from langsmith import tracing_context

from langgraph_pingpong.edges.book import MAX_VALUES
from langgraph_pingpong.edges.declared import to_messages
from langgraph_pingpong.edges.tasks import UNKNOWN

Steps = Sequence[Runnable[Any, Any]]


class ModelSequence:
    """A node whose steps lead through one chat model. `after` is None if a step there is the user's own."""

    def __init__(self, before: Steps, model: Runnable[LanguageModelInput, AIMessage], after: Steps | None) -> None:
        self.model = model
        self._before = before
        self._after = after

    def messages(self, state: Any) -> list[BaseMessage] | None:
        """The prompt for a state; None if the steps refuse it, as the node will at its turn."""
        try:
            prompt = _run(self._before, _without_own_values(state))
            return to_messages(prompt) if isinstance(prompt, PromptValue | str | Sequence) else None
        except Exception:  # noqa: BLE001 - a prompt may lack a variable, or be given one that it cannot format
            return None

    @property
    def tells_update(self) -> bool:
        """Whether what the node returns can be told."""
        return self._after is not None

    def update(self, answer: AIMessage) -> Any:
        """What the node returns for an answer; `UNKNOWN` if a step is the user's own, or refuses the answer."""
        if self._after is None:
            return UNKNOWN
        try:
            return _run(self._after, answer)
        except Exception:  # noqa: BLE001 - a parser may refuse an answer that nobody gave
            return UNKNOWN


def model_sequence(node: Runnable[Any, Any]) -> ModelSequence | None:
    """A node as a sequence around a chat model; None if it is something else, or its prompt cannot be told."""
    steps = _steps(node)
    at = next((index for index, step in enumerate(steps) if _is_model(step)), None)
    if at is None or not all(map(_is_pure, steps[:at])):
        return None
    after = steps[at + 1 :]
    return ModelSequence(steps[:at], steps[at], after if all(map(_is_pure, after)) else None)


def _steps(node: Any) -> list[Runnable[Any, Any]]:
    """The steps of a node in a row, without bindings that only carry a config."""
    if _is(node, RunnableBinding) and not node.kwargs:
        return _steps(node.bound)
    if _is(node, RunnableSequence):
        return [inner for step in node.steps for inner in _steps(step)]
    if _is(node, RunnableParallel) and len(node.steps__) == 1:
        ((name, only),) = node.steps__.items()
        return [*_steps(only), RunnableParallel({name: RunnablePassthrough()})]
    return [node]


def _is(step: Any, *kinds: type) -> bool:
    """Whether a step is of one of these kinds as LangChain made them, not a subclass of the user's."""
    return isinstance(step, kinds) and type(step).__module__.startswith("langchain_core.")


def _is_model(step: Runnable[Any, Any]) -> bool:
    while isinstance(step, RunnableBinding):
        step = step.bound
    return isinstance(step, BaseChatModel)


def _is_pure(step: Any) -> bool:
    """Whether a step is LangChain's own, runs nothing of the user's, and makes of made-up values what they are."""
    if _is(step, RunnableSequence, RunnableBinding):
        return (steps := _steps(step))[0] is not step and all(map(_is_pure, steps))
    if _is(step, RunnableParallel):
        return all(map(_is_pure, step.steps__.values()))
    if _is(step, RunnableAssign):
        return _is_pure(step.mapper)
    if _is(step, RunnablePassthrough):
        return step.func is None and step.afunc is None
    if _is(step, RunnableLambda):
        return isinstance(getattr(step, "func", None), operator.itemgetter)
    if _is(step, JsonOutputToolsParser):
        return False  # it is pure, but a made-up answer has no tool calls
    return _is(step, RunnablePick, BaseLLMOutputParser) or _is_pure_prompt(step)


_PROMPTS = (
    ChatPromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
    HumanMessagePromptTemplate,
    AIMessagePromptTemplate,
    ChatMessagePromptTemplate,
)


def _is_pure_prompt(part: Any) -> bool:
    """Whether a prompt, or a part of it, is LangChain's own and holds no function that fills in a variable."""
    if _is(part, BaseMessage, MessagesPlaceholder):
        return True
    if not _is(part, *_PROMPTS) or not _is_plain(getattr(part, "partial_variables", {})):
        return False
    inner = getattr(part, "messages", None) or getattr(part, "prompt", ())
    return all(map(_is_pure_prompt, inner if isinstance(inner, Sequence) else [inner]))


_PLAIN = (str, int, float, bool, type(None), bytes, date, datetime, Decimal, UUID)


def _is_plain(value: Any) -> bool:
    """Whether nothing of the user's runs when a value is put into a text."""
    values: list[Any] = [value]
    for seen, each in enumerate(values):  # it grows meanwhile
        kind = type(each)
        if kind is dict:
            values += [*each.keys(), *each.values()]
        elif kind in (list, tuple):
            values += each
        elif (kind not in _PLAIN and not kind.__module__.startswith("langchain_core.")) or seen > MAX_VALUES:
            return False
    return True


class _OwnValue:
    """Stands in for a value of a type of the user's: a prompt that would show it cannot be told."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("to show this value would run the user's code")

    __str__ = __repr__ = __format__ = __bool__ = _refuse


def _without_own_values(state: Any) -> Any:
    if type(state) is dict:
        return {name: value if _is_plain(value) else _OwnValue() for name, value in state.items()}
    return state if _is_plain(state) else _OwnValue()


def _run(steps: Steps, value: Any) -> Any:
    with tracing_context(enabled=False):
        for step in steps:
            value = step.invoke(value)
    return value
