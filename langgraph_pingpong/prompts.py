"""From LangChain's messages and tools to the text of a prompt."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_openai_messages

from langgraph_pingpong.errors import CallRefused, TemplateRefused
from langgraph_pingpong.tokens import NOT_SAID, ChatTemplate, Message, as_text, parse_tool_arguments
from langgraph_pingpong.tools import Tool

HERMES = ("hermes", "qwen3_json")
"""The names of vLLM's parsers that read the Hermes format."""

_MARKUP_TOKENS = 4
"""What chat templates write round a message, about."""

_TOOLS_BEFORE = """\
You can call functions. Their signatures are between <tools> and </tools>, one a line:
<tools>
"""
_TOOLS_AFTER = """
</tools>
To call one, answer with its name and arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{"name": "a function's name", "arguments": {"an argument's name": "its value"}}
</tool_call>"""


def render_prompt(
    template: ChatTemplate,
    messages: Sequence[BaseMessage],
    tools: Sequence[Tool] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt as text, ending where the answer begins.

    A chat template that has no place for tools gets them, their calls and their results written out in the Hermes
    format: in the system message, in the assistant's messages, and in messages of the user.

    Raises:
        TemplateRefused: the template refused the messages.
        CallRefused: a message holds something other than text.
    """
    return render_turns(template, _in_openai_form(messages), tools, template_kwargs)


def render_turns(
    template: ChatTemplate,
    turns: Sequence[Message],
    tools: Sequence[Tool] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The same for messages in OpenAI's form.

    Templates take text only, and the arguments of tool calls as objects.
    """
    turns = [parse_tool_arguments(_text_only(turn)) for turn in turns]
    if not has_place_for_tools(template):
        return template.render(in_hermes_format(turns, tools), **(template_kwargs or {}))
    return template.render(turns, tools=[dict(tool) for tool in tools] or None, **(template_kwargs or {}))


def estimate_tokens(template: ChatTemplate, messages: Sequence[BaseMessage], tools: Sequence[Tool] = ()) -> int:
    """About how many tokens these messages are in a prompt, also where the template does not take them alone."""
    turns = [parse_tool_arguments(_text_only(turn)) for turn in _in_openai_form(messages)]
    written = [turn["content"] + "".join(_written(turn)) for turn in _with_tools(turns, tools)]
    return sum(len(template.encode(template.escape(text))) + _MARKUP_TOKENS for text in written)


def _in_openai_form(messages: Sequence[BaseMessage]) -> Sequence[Message]:
    try:
        return convert_to_openai_messages(messages)
    except KeyError as error:
        raise CallRefused(f"A content block of a message has no {error}.") from error


def _text_only(message: Message) -> Message:
    said = as_text(message)
    if isinstance(said["content"], str):
        return said
    other = next(kind for block in said["content"] if (kind := block.get("type")) not in ("text", *NOT_SAID))
    raise CallRefused(f"A message of the {message['role']} holds a block of type {other!r}; only text is read.")


@functools.lru_cache(maxsize=64)
def template_with(template: ChatTemplate, chat_template: str | None) -> ChatTemplate:
    """The same tokenizer with another chat template, one object each time: what is known of one is kept by object."""
    return template.using(chat_template)


@functools.lru_cache(maxsize=64)
def has_place_for_tools(template: ChatTemplate) -> bool:
    """Whether a chat template writes tools into the prompt."""
    tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
    messages = [{"role": "user", "content": "probe"}]
    try:
        return template.render(messages, tools=[tool]) != template.render(messages)
    except TemplateRefused:
        return True  # it looks at more than was probed with; the real messages will tell


def in_hermes_format(turns: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same conversation with everything about tools written out in its texts.

    Results of calls that were made together share one message of the user.
    """
    written: list[Message] = []
    for are_results, group in itertools.groupby(_with_tools(turns, tools), lambda turn: turn["role"] == "tool"):
        if are_results:
            written.append({"role": "user", "content": "\n".join(map(_result, group))})
        else:
            written.extend(map(_without_calls, group))
    return written


def _with_tools(turns: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
    if not tools:
        return turns
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    described = _TOOLS_BEFORE + signatures + _TOOLS_AFTER
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{described}"}, *turns[1:]]
    return [{"role": "system", "content": described}, *turns]


def _without_calls(turn: Message) -> Message:
    if not turn.get("tool_calls"):
        return turn
    return {"role": turn["role"], "content": "\n".join(text for text in (turn["content"], *_written(turn)) if text)}


def _written(turn: Message) -> list[str]:
    """The calls of a message."""
    calls = [{key: call["function"][key] for key in ("name", "arguments")} for call in turn.get("tool_calls", ())]
    return [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]


def _result(turn: Message) -> str:
    return f"<tool_response>\n{turn['content']}\n</tool_response>"
