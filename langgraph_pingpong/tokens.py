"""Chat template and tokenizer: from messages to token ids, also while the text is still growing.

Text is the truth: a prompt's ids are `encode(render(messages))`, whatever ids an upstream model sampled. While
an upstream speaks, only ids that no later text can change are given out (`GrowingPrompt`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from langgraph_pingpong.errors import CallRefused, ModelNotFound, NoChatTemplate, TemplateRefused
from langgraph_pingpong.growing import HARD_TEXT, GrowingIds, growing_kind
from langgraph_pingpong.model_files import UNREADABLE, why
from langgraph_pingpong.segments import MARKER_BREAK, take_apart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A message in OpenAI's form: role, content, and for tool turns tool_calls or tool_call_id."""

NOT_SAID = (
    *("reasoning", "thinking", "redacted_thinking"),
    *("tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"),
)
"""Content blocks that are no text: thoughts, and calls, which stand beside the content as well.

LangChain's v1 form has them, and what other models of a conversation have said (OpenAI's Responses API).
"""

Starts = tuple[frozenset[str], int]

_BREAKS = re.compile(f"{MARKER_BREAK}({MARKER_BREAK}?)")


def load_tokenizer(model: str, *, trust_remote_code: bool = False, **how: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or Hugging Face id, loaded as `model_files.tokenizer_args` says.

    Raises:
        ModelNotFound: it could not be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, **how)
    except UNREADABLE as error:
        raise ModelNotFound(f"No tokenizer could be loaded from {model!r}: {why(error)}") from error


class ChatTemplate:
    """A model's chat template and tokenizer.

    With `escape_markers` no text inside a message or tool becomes a marker such as `<|im_end|>`, however it is
    spelled: it is encoded as plain text. Markers are the tokenizer's special tokens; its other added tokens, such
    as `<think>` for Qwen 3, are text. It takes a fast tokenizer that can write a marker as plain text: with others
    `escape_markers` is False afterwards. Without it markers count wherever they stand, as on vLLM's server.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, *, escape_markers: bool = True
    ) -> None:
        """Use `chat_template` (Jinja) in place of the tokenizer's own where given.

        Raises:
            NoChatTemplate: there is neither.
        """
        if not (chat_template or tokenizer.chat_template):
            raise NoChatTemplate(f"The tokenizer of {tokenizer.name_or_path!r} has no chat template.")
        self.tokenizer = tokenizer
        self._template = chat_template
        added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
        self._added_starts = _starts(added)
        self.segments = take_apart(tokenizer)
        self._marker_starts = _starts(self.segments.marker_texts if self.segments else ())
        self.escape_markers = escape_markers and self.segments is not None and self.segments.spells_markers
        if self.escape_markers and self.encode(self.hard_text) != self._encode_whole(self.hard_text):
            self.segments, self.escape_markers = None, False
        self._growing_kind = growing_kind(self)

    def using(self, chat_template: str | None) -> Self:
        """The same tokenizer with another chat template (Jinja); None is the tokenizer's own."""
        if chat_template == self._template:
            return self
        other = copy.copy(self)
        other._template = chat_template
        other.__dict__.pop("_opening", None)
        return other

    def opens_answer(self, text: str) -> bool:
        """Whether rendered text has in it what a prompt ends with, so that the next answer can begin."""
        return bool(self._opening) and self._opening in text

    @cached_property
    def _opening(self) -> str:
        """What a prompt ends with: what the template adds for the answer, or what closes the user's turn."""
        text = "A question."
        turn = [{"role": "user", "content": text}]
        with contextlib.suppress(TemplateRefused):
            rendered = self.render(turn)
            return rendered.removeprefix(self.render(turn, add_generation_prompt=False)) or rendered.rpartition(text)[2]
        return ""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> str:
        """The prompt as text, ending where the answer begins.

        `template_kwargs` are the template's own, such as enable_thinking; with continue_final_message=True the
        text ends with the last message, left open. Text that spells a marker has a `MARKER_BREAK` in it.

        Raises:
            TemplateRefused: the template refused the messages.
            NoChatTemplate: it is no template.
            CallRefused: a text has a character in it that no tokenizer takes.
        """
        try:
            return self._apply(messages, tools, template_kwargs)
        except TemplateSyntaxError as error:
            raise NoChatTemplate(f"The chat template cannot be read. Line {error.lineno}: {error.message}") from error
        except TemplateError as error:
            order = self._refused_order(messages, tools, template_kwargs)
            raise TemplateRefused(f"The chat template refused {order}: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateRefused(f"The chat template failed on {_roles(messages)}: {error}") from error

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> str:
        rendered: str = self.tokenizer.apply_chat_template(  # type: ignore[assignment]
            [self._escaped(dict(message)) for message in messages],
            tools=self._escaped(list(tools)) if tools else None,
            chat_template=self._template,
            tokenize=False,
            **{"add_generation_prompt": not kwargs.get("continue_final_message"), **kwargs},
        )
        return rendered

    def _refused_order(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> str:
        """The first message that is too much and the one before it, where a beginning is accepted; else all."""
        for count in range(len(messages) - 1, 0, -1):
            with contextlib.suppress(TemplateError, TypeError, ValueError):
                self._apply(messages[:count], tools, kwargs)
                last, refused = messages[count - 1].get("role"), messages[count].get("role")
                return f"message {count + 1} ({refused}) after message {count} ({last}) in {_roles(messages)}"
        return _roles(messages)

    def _escaped(self, value: Any) -> Any:
        """Break up the markers in every text of a message or tool."""
        if isinstance(value, str):
            return self.escape(_checked(value))
        if isinstance(value, Mapping):
            return {self._escaped(key): self._escaped(part) for key, part in value.items()}
        return [self._escaped(part) for part in value] if isinstance(value, list | tuple) else value

    def escape(self, text: str) -> str:
        """User-supplied text with its markers broken up, also one that it may form with text that follows."""
        if not self.escape_markers or self.segments is None:
            return text
        text = text.replace(MARKER_BREAK, MARKER_BREAK * 2)
        while markers := [marker.start for marker in self.segments.markers(text) if marker.stop - marker.start > 1]:
            text = _broken(text, markers)
        opened = self.opens_marker(text)
        return _broken(text, [len(text) - opened]) if opened else text

    def opens_marker(self, text: str) -> int:
        """How many characters at the end of `text` are the beginning of a marker."""
        return _open_end(text, self._marker_starts)

    def unescape(self, text: str) -> str:
        """A piece of rendered text between two markers, with what `escape` did to it undone."""
        return _BREAKS.sub(r"\1", text) if self.escape_markers and MARKER_BREAK in text else text

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text. The template writes its own start token, so none is added here."""
        if not self.escape_markers or self.segments is None:
            return self._encode_whole(text)
        growing = GrowingIds(self, text)
        return growing.ids + growing.rest()

    def _encode_whole(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @property
    def hard_text(self) -> str:
        """A short text with markers that is hard to take apart."""
        markers = self.segments.marker_texts[:8] if self.segments else []
        return "".join(f"{marker} it's  {marker}\n" for marker in markers) + HARD_TEXT

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> tuple[int, ...]:
        """Token ids of the full prompt; the arguments are those of `render`.

        Raises:
            TemplateRefused: the template refused the messages.
        """
        return tuple(self.encode(self.render(messages, tools, **template_kwargs)))

    def growing(self, text: str = "") -> GrowingIds:
        """Token ids of a text that starts with `text`, which was rendered, and goes on with what a model says."""
        return self._growing_kind(self, text)

    def unsettled_from(self, text: str) -> int:
        """Where the end of `text` begins that later text may still fuse with, as an index into `text`.

        That is trailing white space (a template may strip it), replacement marks (an unfinished character),
        and the beginning of an added token such as `<|im_end|>`.
        """
        settled = len(text.rstrip().rstrip("\N{REPLACEMENT CHARACTER}"))
        return min(settled, len(text) - _open_end(text, self._added_starts))


def _checked(text: str) -> str:
    """A text of a message or tool, which is to be encoded.

    Raises:
        CallRefused: it holds half of a character, as is left where UTF-16 was cut.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half, repair = text[error.start], ".encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        raise CallRefused(
            f"A text in the messages or tools holds half of a character, {half!r}, which no token stands for. "
            f"text{repair} mends it."
        ) from error
    return text


def _starts(texts: Iterable[str]) -> Starts:
    """Every proper beginning of the texts, and the length of the longest."""
    starts = frozenset(text[:end] for text in texts for end in range(1, len(text)))
    return starts, max(map(len, starts), default=0)


def _open_end(text: str, starts: Starts) -> int:
    """The length of the longest of the beginnings that `text` ends with."""
    lengths = range(min(starts[1], len(text)), 0, -1)
    return next((length for length in lengths if text[-length:] in starts[0]), 0)


def _broken(text: str, starts: Sequence[int]) -> str:
    """Text with a break behind the first character of each marker that starts at one of these places."""
    cuts = [0, *(start + 1 for start in starts), len(text)]
    return MARKER_BREAK.join(text[begin:end] for begin, end in itertools.pairwise(cuts))


def _roles(messages: Sequence[Message]) -> str:
    return f"the messages (roles: {', '.join(str(message.get('role')) for message in messages)})"


def as_text(message: Message) -> Message:
    """A message with its content as one text, as chat templates take it; as it is if that holds something else."""
    if not isinstance(message.get("content"), list):
        return message
    blocks = [block for block in message["content"] if block.get("type") not in NOT_SAID]
    if any(block.get("type") != "text" for block in blocks):
        return message
    return {**message, "content": "\n".join(block["text"] for block in blocks)}


def parse_tool_arguments(message: Message) -> Message:
    """Tool calls with their arguments as objects, the way chat templates expect them."""
    if not message.get("tool_calls"):
        return message
    calls = [_parse_call(call) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _parse_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
