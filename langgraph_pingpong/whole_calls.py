"""Tool calls that can be carried out: their arguments are one whole JSON object.

LangChain completes the arguments of a streamed call that was cut off, so that they can be shown as they grow. In a
message that a graph goes on with, such a call is not to be carried out: "Do not delete the" is no text to send. So the
last chunk of an answer tells the calls as the model wrote them, where one of them is no whole one, and messages that
LangChain makes of chunks are read again from that.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall, ToolCall
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.outputs import ChatResult
from langchain_core.utils.utils import LC_ID_PREFIX

from langgraph_pingpong.engines.base import ToolCallPart

RAW_CALLS = "raw_tool_calls"
"""The key in the response metadata of a last chunk under which it tells them, in OpenAI's form."""

_CALL_BLOCKS = ("tool_call", "tool_call_chunk", "invalid_tool_call")


class RawCalls:
    """The tool calls of one answer, as the model writes them."""

    def __init__(self, parts: Iterable[ToolCallPart] = ()) -> None:
        self._calls: dict[int, ToolCallPart] = {}
        self.add(parts)

    def add(self, parts: Iterable[ToolCallPart]) -> None:
        """More was said of them."""
        for part in parts:
            call = self._calls.get(part.index, ToolCallPart(part.index))
            self._calls[part.index] = ToolCallPart(
                part.index, call.id or part.id, call.name or part.name, call.arguments + part.arguments
            )

    def told(self) -> list[dict[str, Any]]:
        """All that was said, in OpenAI's form."""
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self._calls.values()
        ]

    def whole(self) -> bool:
        """Whether LangChain reads each as it is meant."""
        return all(isinstance(_json(call.arguments or "{}", strict=True), dict) for call in self._calls.values())


def parse_calls(raw: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls that can be carried out, and the others. Without arguments, or with null, a call has none."""
    calls: list[ToolCall] = []
    wrong: list[InvalidToolCall] = []
    for call in raw:
        name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
        args = {} if arguments.strip() == "null" else _json(arguments)
        if isinstance(args, dict):
            calls.append(tool_call(name=name or "", args=args, id=call["id"]))
        else:
            wrong.append(invalid_tool_call(name=name, args=arguments, id=call["id"]))
    return calls, wrong


def _json(text: str, *, strict: bool = False) -> Any:
    """None if it is no JSON; small models write line breaks in strings as they are, which can be read nevertheless."""
    try:
        return json.loads(text, strict=strict)
    except (ValueError, RecursionError):  # a number of thousands of digits is refused, too, by another ValueError
        return None


def read_again(message: BaseMessage) -> None:
    """Let a message that was made of chunks have the calls that the model has made, if its last chunk tells them."""
    if not isinstance(message, AIMessage) or RAW_CALLS not in message.response_metadata:
        return
    metadata = dict(message.response_metadata)
    message.tool_calls, message.invalid_tool_calls = parse_calls(metadata.pop(RAW_CALLS))
    message.response_metadata = metadata
    if isinstance(message.content, list):  # LangChain's v1 form holds the calls here as well
        said = [each for each in message.content if not (isinstance(each, dict) and each.get("type") in _CALL_BLOCKS)]
        message.content = [*said, *({**call} for call in message.tool_calls)]


class WholeCalls(BaseChatModel):
    """A chat model whose messages hold whole calls also where LangChain streams to make them.

    That is where somebody listens to chunks, as with `stream_mode="messages"`, or with `streaming=True`. There is no
    public method between making the message and handing it out. (Who adds up the chunks of `stream` has LangChain's
    reading of them; the last chunk's `response_metadata["raw_tool_calls"]` tells where it is too kind.)
    """

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _read_again(super()._generate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs))

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        made = await super()._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)
        return _read_again(made)

    # LangChain's third stream of events looks for these two, else makes the events itself, by the same functions. It
    # takes any JSON for arguments, and fails on the message.

    def _stream_chat_model_events(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        from langchain_core.language_models._compat_bridge import chunks_to_events

        chunks = self._stream(messages, stop=stop, run_manager=run_manager, **kwargs)
        for event in chunks_to_events(chunks, message_id=_message_id(run_manager)):
            yield _with_object(event)

    async def _astream_chat_model_events(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        from langchain_core.language_models._compat_bridge import achunks_to_events

        chunks = self._astream(messages, stop=stop, run_manager=run_manager, **kwargs)
        async for event in achunks_to_events(chunks, message_id=_message_id(run_manager)):
            yield _with_object(event)


def _message_id(run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> str | None:
    return f"{LC_ID_PREFIX}-{run_manager.run_id}" if run_manager else None


def _with_object(event: Any) -> Any:
    """The event, where it ends a call whose arguments are no object as one that is invalid."""
    block = event.get("content")
    if event["event"] != "content-block-finish" or block["type"] != "tool_call" or isinstance(block["args"], dict):
        return event
    raw = {"id": block["id"], "function": {"name": block["name"], "arguments": json.dumps(block["args"])}}
    calls, wrong = parse_calls([raw])
    return {**event, "content": (calls or wrong)[0]}


def _read_again(result: ChatResult) -> ChatResult:
    for generation in result.generations:
        read_again(generation.message)
    return result
