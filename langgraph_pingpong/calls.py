"""What one call asks for: from a model's settings and a call's keyword arguments to vLLM's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph_pingpong.config import refuse_unknown
from langgraph_pingpong.errors import CallRefused
from langgraph_pingpong.tools import Tool, parse_tool_choice, structured_outputs

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n")
"""Names of vLLM's SamplingParams that are settings of a model and may be given to a call."""

OWN = ("logprobs", "top_logprobs", "chat_template_kwargs")
"""Further names that may be given to either."""

_MORE_SAMPLING = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "skip_special_tokens",
    "structured_outputs",
)
"""Names of vLLM's SamplingParams that only a call may carry."""

_TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")

_LANGCHAINS = ("stream",)
"""LangChain's own switch, whether it makes the message from chunks: it looks at it, and passes it on."""

PROMPT_SHAPING = ("tools", "tool_choice", "chat_template_kwargs")
"""The keyword arguments that the prompt depends on."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What one call asks for.

    `sampling` has vLLM's names and plain values. `tools` are those the model is shown, in OpenAI's form; with
    `tool_choice` "none" it is shown none.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """How many answers to the prompt are wanted."""
        return int(self.sampling.get("n", 1))


def terms_of(settings: Mapping[str, Any], stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> Terms:
    """The terms of a call: its own keyword arguments before the model's `settings`.

    Args:
        settings: the model's values for `SAMPLING`, `OWN` and "stop"; None is the engine's own default.
        stop: the call's stop strings, in place of the model's.
        kwargs: the call's keyword arguments.

    Raises:
        UnknownSetting: a keyword argument is unknown.
        CallRefused: the keyword arguments do not fit together.
    """
    refuse_unknown(kwargs, (*SAMPLING, *OWN, *_MORE_SAMPLING, *_TOOLS, *_LANGCHAINS), "A call")
    given = {**settings, **{name: value for name, value in kwargs.items() if value is not None}}
    sampling = {name: given[name] for name in (*SAMPLING, *_MORE_SAMPLING) if given.get(name) is not None}
    for name in sampling.keys() & _CONVERTED.keys():
        sampling[name] = _converted(name, sampling[name])
    if stops := stop if stop is not None else given.get("stop"):
        sampling["stop"] = [stops] if isinstance(stops, str) else list(stops)
    if (logprobs := _logprobs(given)) is not None:
        sampling["logprobs"] = logprobs
    if constraint := structured_outputs(given.get("response_format")):
        sampling["structured_outputs"] = constraint
    choice = parse_tool_choice(given.get("tool_choice"), given.get("tools") or ())
    return Terms(
        sampling=sampling,
        tools=() if choice == "none" else given.get("tools") or (),
        tool_choice=choice,
        parallel_tool_calls=given.get("parallel_tool_calls", True),
        template_kwargs=_template_kwargs(settings) | _template_kwargs(kwargs),
    )


def _template_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template is told beside the messages."""
    named = given.get("chat_template_kwargs") or {}
    if not isinstance(named, Mapping) or "messages" in named or "tools" in named:
        raise CallRefused(f"chat_template_kwargs are the template's own settings, and no messages or tools: {named!r}.")
    return dict(named)


def _converted(name: str, value: Any) -> Any:
    try:
        return _CONVERTED[name](value)
    except (TypeError, ValueError, AttributeError) as error:
        raise CallRefused(f"{name}={value!r} cannot be: {error}") from error


def _biases(given: Mapping[Any, Any]) -> dict[int, float]:
    """Of OpenAI's form, where ids are texts, and of ids that are numbers; within the bounds of OpenAI's API.

    As vLLM's server makes it, so that engines in this process take the same and answer alike.
    """
    return {int(token): min(100.0, max(-100.0, float(bias))) for token, bias in given.items()}


def _count(given: Any) -> int:
    """As the model's own settings, at least one."""
    if (count := operator.index(given)) < 1:
        raise ValueError("it is at least 1")
    return count


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "logit_bias": _biases,
    "n": _count,
    "max_tokens": _count,
    "top_logprobs": int,
}
"""Arguments that have several forms, or that this side counts with before an engine sees them."""


def _logprobs(given: Mapping[str, Any]) -> int | None:
    """LangChain has a switch and a number of alternatives, vLLM has the number alone."""
    wanted, top = given.get("logprobs"), given.get("top_logprobs")
    if top and not wanted:
        raise CallRefused(f"top_logprobs={top} needs logprobs=True.")
    if not wanted:
        return None
    return int(_converted("top_logprobs", top or 0))
