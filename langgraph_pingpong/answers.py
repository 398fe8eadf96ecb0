"""From what an engine says to LangChain's messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, message_chunk_to_message
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langgraph_pingpong.certificate import Certificate
from langgraph_pingpong.engines.base import Delta, Said, TokenLogprob, ToolCallPart
from langgraph_pingpong.whole_calls import RAW_CALLS, RawCalls, parse_calls, read_again

Answer = tuple[Delta, Said, Certificate | None]
"""What an engine said since the last one of these, also taken apart; the certificate comes with the last."""

Certify = Callable[[Mapping[str, Any]], None]
"""Takes the certificate of a call, besides the message that carries it."""

BEHIND_BLOCKS = 1000
"""In LangChain's v1 form, calls count from here: it numbers its blocks from 0, and merges what has the same number."""


class AnswerChunks:
    """Makes the chunks of one call, which merge into its message."""

    def __init__(self, model_name: str, certify: Certify, output_version: str | None = None) -> None:
        self._model_name = model_name
        self._certify = certify
        self._first_call = BEHIND_BLOCKS if output_version == "v1" else 0
        self._called: set[tuple[int, int]] = set()
        self._raw: dict[int, RawCalls] = defaultdict(RawCalls)

    def chunks(self, delta: Delta, said: Said, certificate: Certificate | None) -> Iterator[ChatGenerationChunk]:
        """The chunks for a delta, none if it says nothing.

        Calls come in chunks of their own: content blocks, and the events made of them, leave out parts of calls that
        come with text or in the last chunk.
        """
        self._raw[delta.index].add(said.tool_calls)
        if said.tool_calls and (said.content or said.reasoning):
            yield ChatGenerationChunk(message=_saying(said))
        if said.tool_calls:
            parts = [self._tool_call_chunk(delta.index, part) for part in said.tool_calls]
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=parts))
            said = Said()
        if delta.finish_reason is not None or said.content or said.reasoning or delta.logprobs:
            yield self._chunk(delta, said, certificate)

    def result(self, answers: Iterable[Answer]) -> ChatResult:
        """The answers to one prompt from all deltas of the call.

        With several answers, each carries the usage of the whole call, as LangChain's other models have it.
        """
        by_index: dict[int, list[ChatGenerationChunk]] = defaultdict(list)
        for answer in _joined(answers):
            by_index[answer[0].index] += self.chunks(*answer)
        generations = [_to_generation(by_index[index]) for index in sorted(by_index)]
        messages = [each.message for each in generations if isinstance(each.message, AIMessage)]
        whole = next((message for message in messages if message.usage_metadata), None)
        for message in messages:
            if whole is not None:
                message.usage_metadata = whole.usage_metadata
                message.response_metadata["pingpong"] = whole.response_metadata["pingpong"]
        return ChatResult(generations=generations)

    def _chunk(self, delta: Delta, said: Said, certificate: Certificate | None) -> ChatGenerationChunk:
        message = _saying(said)
        if delta.logprobs:
            message.response_metadata["logprobs"] = {"content": _logprobs(delta.logprobs)}
        if delta.finish_reason is not None:
            message.chunk_position = "last"
            message.response_metadata.update(self._ending(delta))
        if certificate is not None:
            message.usage_metadata = _usage(certificate)
            message.response_metadata["pingpong"] = certificate.to_dict()
            self._certify(certificate.to_dict())
        return ChatGenerationChunk(message=message)

    def _tool_call_chunk(self, index: int, part: ToolCallPart) -> ToolCallChunk:
        """A call is named once: merging joins strings, so a name said twice would be doubled."""
        call = (index, part.index)
        name, id = (None, None) if call in self._called else (part.name, part.id)
        if part.name:
            self._called.add(call)
        return tool_call_chunk(name=name, id=id, args=part.arguments, index=self._first_call + part.index)

    def _ending(self, delta: Delta) -> dict[str, Any]:
        called = any(index == delta.index for index, _ in self._called)
        reason = "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason
        raw = self._raw[delta.index]
        calls = {} if raw.whole() else {RAW_CALLS: raw.told()}
        return {"model_name": self._model_name, "finish_reason": reason, **calls}


def _saying(said: Said) -> AIMessageChunk:
    return AIMessageChunk(
        content=said.content,
        additional_kwargs={"reasoning_content": said.reasoning} if said.reasoning else {},
    )


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """One entry a token, in the form of OpenAI's API."""
    return [
        {**_logprob(token.token, token.logprob), "top_logprobs": [_logprob(*other) for other in token.top]}
        for token in tokens
    ]


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(token.encode()), "logprob": logprob}


def _usage(certificate: Certificate) -> UsageMetadata:
    """The call's own tokens; what edges prefilled is in the certificate."""
    cached = certificate.cached
    return UsageMetadata(
        input_tokens=certificate.prompt_tokens,
        output_tokens=certificate.output_tokens,
        total_tokens=certificate.prompt_tokens + certificate.output_tokens,
        input_token_details=InputTokenDetails() if cached is None else InputTokenDetails(cache_read=cached),
    )


def _joined(answers: Iterable[Answer]) -> Iterator[Answer]:
    """Content that several deltas said in a row is one: a chunk for each token is for those who watch."""
    for (_, content_only), some in groupby(answers, lambda answer: (answer[0].index, _is_content(*answer))):
        row = list(some)
        yield from [(row[0][0], Said("".join(said.content for _, said, _ in row)), None)] if content_only else row


def _is_content(delta: Delta, said: Said, certificate: Certificate | None) -> bool:
    """Whether nothing but content is said."""
    more = delta.logprobs or delta.finish_reason or said.reasoning or said.tool_calls or certificate
    return not more


def _to_generation(chunks: Sequence[ChatGenerationChunk]) -> ChatGeneration:
    message = message_chunk_to_message((chunks[0] + list(chunks[1:])).message)
    read_again(message)
    return ChatGeneration(message=message)


def calling_message(said: Sequence[Said]) -> AIMessage | None:
    """The message that a complete answer becomes, as a prompt will hold it; None if it calls no tools, or calls wrong.

    Its calls are complete and have ids.
    """
    calls, wrong = parse_calls(RawCalls(part for each in said for part in each.tool_calls).told())
    if wrong or not calls or not all(call["id"] for call in calls):
        return None
    return AIMessage("".join(each.content for each in said), tool_calls=calls)
