"""Chat template and tokenizer: from messages to token ids, also while the text is still growing.

Text is the truth: a prompt's ids are `encode(render(messages))`, whatever ids an upstream model sampled. While
an upstream speaks, only ids that no later text can change are given out (`GrowingPrompt`).
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from langgraph_pingpong.errors import ModelNotFound, NoChatTemplate, TemplateRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A message in OpenAI's form: role, content, and for tool turns tool_calls or tool_call_id."""

HELD_PRETOKENS = 2
"""Younger pre-tokens that must stand behind a token before it is final.

One is not enough for GPT-2's rule of contractions (`it'l` + `l`); two held over 300,000 cuts of real and hostile
text in six tokenizers.
"""


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or Hugging Face id.

    Raises:
        ModelNotFound: it could not be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"No tokenizer could be loaded from {model!r}: {error}") from error


class ChatTemplate:
    """A model's chat template and tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        """Use `chat_template` (Jinja) in place of the tokenizer's own where given.

        Raises:
            NoChatTemplate: there is neither.
        """
        self.tokenizer = tokenizer
        self._template = chat_template or tokenizer.chat_template
        if not self._template:
            raise NoChatTemplate(f"The tokenizer of {tokenizer.name_or_path!r} has no chat template.")
        added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
        self._marker_starts = frozenset(marker[:end] for marker in added for end in range(1, len(marker)))
        self._longest_start = max(map(len, self._marker_starts), default=0)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, ending where the answer begins.

        Raises:
            TemplateRefused: the template refused the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(  # type: ignore[return-value]
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateRefused(f"The chat template refused the messages (roles: {roles}): {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text. The template writes its own start token, so none is added here."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the full prompt.

        Raises:
            TemplateRefused: the template refused the messages.
        """
        return tuple(self.encode(self.render(messages)))

    def growing(self, text: str = "") -> GrowingIds:
        """Token ids of a text that starts with `text` and goes on."""
        growing = GrowingIds(self)
        growing.append(text)
        return growing

    def unsettled_from(self, text: str) -> int:
        """Where the end of `text` begins that later text may still fuse with, as an index into `text`.

        That is trailing white space (a template may strip it), replacement marks (an unfinished character),
        and the beginning of an added token such as `<|im_end|>`.
        """
        settled = len(text.rstrip().rstrip("\N{REPLACEMENT CHARACTER}"))
        for length in range(min(self._longest_start, len(text)), 0, -1):
            if text[-length:] in self._marker_starts:
                return min(settled, len(text) - length)
        return settled


class GrowingIds:
    """The token ids of a growing text that no later text can change.

    Only the tail that is not final yet is encoded again when text comes in, so a piece costs the same at any
    length. That is exact because pre-tokenizers look forward only: a tail that starts at a pre-token is split the
    way it is split within the whole text.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tail = ""
        self.ids: list[int] = []
        """The final ids so far."""

    def append(self, text: str) -> int:
        """Add text; returns how many ids became final."""
        self._tail += text
        encoding = self._template.tokenizer(
            self._tail, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
        )
        starts = _pretoken_starts(encoding)
        limit = self._template.unsettled_from(self._tail)
        final = bisect.bisect_right(starts.characters, limit) - 1 - HELD_PRETOKENS
        if final <= 0:
            return 0
        count = starts.tokens[final]
        self.ids.extend(encoding["input_ids"][:count])
        self._tail = self._tail[starts.characters[final] :]
        return count


@dataclass(frozen=True, slots=True)
class _Starts:
    """Where each pre-token starts: as a token index and as a character index."""

    tokens: list[int]
    characters: list[int]


def _pretoken_starts(encoding: Any) -> _Starts:
    words, offsets = encoding.word_ids(), encoding["offset_mapping"]
    tokens = [i for i in range(len(words)) if i == 0 or words[i] is None or words[i] != words[i - 1]]
    return _Starts(tokens, [offsets[i][0] for i in tokens])


def parse_tool_arguments(message: Message) -> Message:
    """Tool calls with their arguments as objects, the way chat templates expect them."""
    if not message.get("tool_calls"):
        return message
    calls = [_parse_call(call) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _parse_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
