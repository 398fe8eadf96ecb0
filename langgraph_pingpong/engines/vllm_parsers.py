"""vLLM's own parsers of tool calls and reasoning, chosen by name.

They are what vLLM's server uses: one parser object for each answer, fed delta by delta. It also says how the engine
has to be asked, for example with a grammar that forces a tool call.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from langgraph_pingpong import heap
from langgraph_pingpong.engines.base import Delta, Reader, Said, ToolCallPart
from langgraph_pingpong.engines.vllm_setup import quiet_vllm
from langgraph_pingpong.errors import CallRefused, EngineNotInstalled, UnknownParser
from langgraph_pingpong.tokens import ChatTemplate

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.abstract_parser import Parser

_NO_MARKUP = "\0"
"""A character that no tool call starts with."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What an answer may hold beside content, and which of vLLM's parsers finds it.

    `tools` and `tool_choice` are in OpenAI's form. `template_kwargs` went into the prompt; some parsers look at them.
    """

    tool_parser: str
    reasoning_parser: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def _import_vllm() -> None:
    """Import what is used here, once and quietly; the imports elsewhere in this module then find it.

    Raises:
        EngineNotInstalled: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineNotInstalled("Tool calls and reasoning are found by vLLM's parsers, and vLLM is not installed.")
    with quiet_vllm():
        import vllm.entrypoints.openai.chat_completion.protocol
        import vllm.parser
        import vllm.reasoning
        import vllm.tokenizers.hf
        import vllm.tool_parsers  # noqa: F401
    heap.set_apart()


def check_parsers(tool_parser: str, reasoning_parser: str | None) -> None:
    """Refuse names that vLLM does not know.

    Raises:
        UnknownParser: vLLM has no parser of that name; the message names those it has.
        EngineNotInstalled: vLLM is not installed.
    """
    _import_vllm()
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    _check("tool", tool_parser, ToolParserManager.list_registered())
    _check("reasoning", reasoning_parser, ReasoningParserManager.list_registered())


def _check(kind: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise UnknownParser(f"vLLM has no {kind} parser {name!r}. It has: {', '.join(known)}.")


def open_parser(
    expected: Expected, template: ChatTemplate, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any]
) -> tuple[dict[str, Any], Reader]:
    """How to sample an answer so that its parser understands it, and the reader that takes it apart.

    Raises:
        UnknownParser: a parser's name is unknown, or it cannot work with the model's tokenizer.
        CallRefused: vLLM refuses the tools.
    """
    check_parsers(expected.tool_parser, expected.reasoning_parser)
    request = _request(expected, sampling.get("structured_outputs"))
    parsers = [_new_parser(expected, template, request) for _ in range(sampling.get("n", 1))]
    adjusted = _adjusted(parsers[0], request)
    lagging = template if sampling.get("stop") else None
    readers = [_AnswerReader(parser, adjusted, prompt_token_ids, lagging) for parser in parsers]
    return {**sampling, **_sampling_of(adjusted)}, lambda delta: readers[delta.index].read(delta)


def _request(expected: Expected, structured_outputs: Mapping[str, Any] | None) -> ChatCompletionRequest:
    """The call in the form of vLLM's server, which its parsers take."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked: dict[str, Any] = {"structured_outputs": structured_outputs}
    if expected.tools:
        asked["tools"] = [_strict(tool) for tool in expected.tools] if _forced(expected) else expected.tools
        asked["tool_choice"] = expected.tool_choice
        asked["parallel_tool_calls"] = expected.parallel_tool_calls
    try:
        return ChatCompletionRequest(model="", messages=[], **asked)
    except ValueError as error:
        raise CallRefused(f"vLLM refused the tools: {error}") from error


def _forced(expected: Expected) -> bool:
    return expected.tool_choice not in ("auto", "none")


def _strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A forced call follows the schema of its arguments too, or a small model would write anything there."""
    return {**tool, "function": {"strict": True, **tool["function"]}}


def _adjusted(parser: Parser, request: ChatCompletionRequest) -> Any:
    """The call with what the parser needs, such as a grammar that forces a tool call."""
    try:
        return parser.adjust_request(request)
    except Exception as error:
        raise CallRefused(f"vLLM refused the tools: {error}") from error


def _new_parser(expected: Expected, template: ChatTemplate, request: ChatCompletionRequest) -> Parser:
    from vllm.parser import ParserManager

    names: dict[str, Any] = {
        "tool_parser_name": expected.tool_parser if expected.tools else None,
        "reasoning_parser_name": expected.reasoning_parser,
    }
    tools: Any = request.tools
    try:
        parser = ParserManager.get_parser(**names, enable_auto_tools=True)
        assert parser is not None
        return parser(_tokenizer_of(template), tools, chat_template_kwargs=dict(expected.template_kwargs))
    except Exception as error:
        named = " and ".join(repr(name) for name in names.values() if name)
        raise UnknownParser(f"vLLM's parser {named} does not work with this model: {error}") from error


@functools.lru_cache(maxsize=8)
def _tokenizer_of(template: ChatTemplate) -> Any:
    """The tokenizer with its vocabulary at hand: parsers ask for it in every call, and it takes long to build."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    tokenizer: Any = template.tokenizer
    return get_cached_tokenizer(tokenizer)


def _sampling_of(request: ChatCompletionRequest) -> dict[str, Any]:
    """What a parser asks of the engine, as plain values."""
    sampling: dict[str, Any] = {}
    for name in ("skip_special_tokens", "spaces_between_special_tokens"):
        if getattr(request, name) is False:
            sampling[name] = False
    if (given := request.structured_outputs) is not None:
        fields = [each.name for each in dataclasses.fields(given) if each.init]
        constraint = {name: value for name in fields if (value := getattr(given, name)) not in (None, False)}
        if tag := constraint.get("structural_tag"):
            constraint["structural_tag"] = json.dumps(json.loads(tag, object_hook=_bound_white_space))
        sampling["structured_outputs"] = constraint
    return sampling


def _bound_white_space(part: dict[str, Any]) -> dict[str, Any]:
    """Where a grammar allows any amount of white space, a small model may go on with it for ever."""
    if part.get("max_whitespace_cnt", 0) is None:
        part["max_whitespace_cnt"] = 2
    return part


class _AnswerReader:
    """Takes one answer apart with one of vLLM's parsers."""

    def __init__(
        self,
        parser: Parser,
        request: ChatCompletionRequest,
        prompt_token_ids: Sequence[int],
        template: ChatTemplate | None,
    ) -> None:
        """Give `template` where text can lag behind its ids: then the ids are made from the text."""
        self._parser, self._request, self._template = parser, request, template
        self._prompt_token_ids = list(prompt_token_ids)
        self._text, self._content = "", ""
        self._forced = request.tool_choice not in ("auto", None)
        self._arguments: dict[int, _Arguments] = defaultdict(_Arguments)
        self._called: set[int] = set()

    def read(self, delta: Delta) -> Said:
        """The parts of what was said since the last delta."""
        finished = delta.finish_reason is not None
        text, ids = self._together(delta, finished)
        message = self._parser.parse_delta(text, ids, self._request, self._prompt_token_ids, finished=finished)
        content = (message and message.content) or ""
        parts = self._parts(message.tool_calls or ()) if message is not None else ()
        self._content += content
        if finished:
            content += self._unread() or self._held_back()
        return Said(content, (message and message.reasoning) or "", parts)

    def _parts(self, calls: Sequence[Any]) -> tuple[ToolCallPart, ...]:
        parts = _parts(calls)
        self._called.update(part.index for part in parts)
        parts = tuple(replace(part, arguments=self._arguments[part.index].add(part.arguments)) for part in parts)
        last = math.inf if self._request.parallel_tool_calls else 0
        return tuple(part for part in parts if part.index <= last and (part.name or part.arguments))

    def _together(self, delta: Delta, finished: bool) -> tuple[str, list[int]]:
        """Text and ids that belong together: some parsers look for a tag among the ids and cut it from the text."""
        if self._template is None:
            return delta.text, list(delta.token_ids)
        self._text += delta.text
        end = len(self._text) if finished else self._template.unsettled_from(self._text)
        text, self._text = self._text[:end], self._text[end:]
        return text, self._template.encode(text)

    def _unread(self) -> str:
        """The content from the first opening tag on that no call followed: some parsers drop what they cannot read."""
        tags = [getattr(self._parser.tool_parser, f"tool_call_{end}_token", None) for end in ("start", "end")]
        state = getattr(self._parser, "_stream_state", None)
        text = getattr(state, "previous_text", "") if getattr(state, "reasoning_ended", False) else ""
        if self._forced or not all(isinstance(tag, str) for tag in tags):
            return ""
        opening, closing = map(str, tags)
        if opening in self._content or not text.startswith(self._content):
            return ""  # others give more than what comes before the tag
        return _without_calls(text, opening, closing, self._called)

    def _held_back(self) -> str:
        """The end of the content, where it might have become a tool call: some parsers keep that to themselves."""
        if getattr(self._parser.tool_parser, "engine_based_streaming", True):
            return ""
        try:
            message = self._parser.parse_delta(_NO_MARKUP, [], self._request, finished=False)
        except Exception:  # noqa: BLE001 - not every parser takes text without ids; the answer stands without
            return ""
        content = (message and message.content) or ""
        return content.removesuffix(_NO_MARKUP) if content.endswith(_NO_MARKUP) else ""


class _Arguments:
    """The arguments of one call. Some parsers take for more of them what comes behind.

    That is further keys of the call, or "{}", which vLLM adds at the end where a tag was opened behind the call.
    """

    def __init__(self) -> None:
        self._text = ""
        self._end: int | None = None

    def add(self, text: str) -> str:
        """What of this text belongs to them."""
        before = len(self._text)
        self._text += text
        if self._end is None and "}" in text:
            self._end = _end_of_object(self._text)
        if self._end is None or not self._text[self._end :].lstrip().startswith((",", "{}")):
            return text
        return self._text[before : max(before, self._end)]


def _end_of_object(text: str) -> int | None:
    """Where the JSON object ends that a text begins with."""
    start = len(text) - len(text.lstrip())
    if not text.startswith("{", start):
        return None
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _without_calls(text: str, opening: str, closing: str, called: Container[int]) -> str:
    """A text from the first opening tag on behind which nothing was called, without the calls that follow."""
    region = rf"{re.escape(opening)}.*?(?:{re.escape(closing)}|\Z)"
    spans = [found.span() for found in re.finditer(region, text, re.DOTALL)]
    first = next((number for number in range(len(spans)) if number not in called), None)
    if first is None:
        return ""
    kept, position = "", spans[first][0]
    for number, (start, end) in enumerate(spans):
        if number > first and number in called:
            kept, position = kept + text[position:start], end
    return kept + text[position:]


def _parts(calls: Sequence[Any]) -> tuple[ToolCallPart, ...]:
    """One part for each call that a delta is about; a parser may say its name and its arguments apart."""
    parts: dict[int, ToolCallPart] = {}
    for call in calls:
        before = parts.get(call.index, ToolCallPart(call.index))
        name, arguments = (call.function.name, call.function.arguments) if call.function else (None, None)
        parts[call.index] = ToolCallPart(
            call.index, before.id or call.id, before.name or name, before.arguments + (arguments or "")
        )
    return tuple(parts.values())
