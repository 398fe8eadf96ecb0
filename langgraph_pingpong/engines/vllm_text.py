"""The text of answers, made by vLLM's own detokenizer from the end of the prompt only.

vLLM decodes a whole prompt when the answer's first token comes, to know what text that token adds: 4 to 5 ms for
4,400 tokens beside an H200 (docs/results/h200x2/short-steps-14b.md), more for more, during which no other answer of the
process gets on. The last tokens of the prompt are enough.
So engines are asked for ids, and their text is made here. Stop strings and log-probabilities need vLLM's own text:
requests with those leave it to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.engines.base import Delta, Request

if TYPE_CHECKING:
    from vllm import SamplingParams

PRIMING = 32
"""Tokens of the prompt that an answer's text is told apart from. A token's text can depend on those before it where it
is part of a character, or at the beginning of a text; so vLLM once took the last few tokens, too."""

_NEED_TEXT = ("stop", "logprobs", "prompt_logprobs")
"""Settings of sampling with which vLLM has to make the text itself."""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a request, as far as vLLM's detokenizer looks at it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prompt_embeds: None = None


class AnswerText:
    """Turns the ids of one answer into its text, delta by delta."""

    def __init__(self, tokenizer: Any, request: Request, params: SamplingParams) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        end = _End(request.request_id, list(request.prompt_token_ids[-PRIMING:]), params)
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, end)  # type: ignore[arg-type]

    def told(self, delta: Delta) -> Delta:
        """The same with its text. A token that ended the answer is no part of it."""
        self._detokenizer.update(list(delta.token_ids), delta.finish_reason == "stop")
        text = self._detokenizer.get_next_output_text(delta.finish_reason is not None, delta=True)
        return replace(delta, text=text)


def is_made_here(sampling: Mapping[str, Any]) -> bool:
    """Whether the text of an answer can be left out by the engine."""
    return (
        sampling.get("n", 1) == 1
        and sampling.get("detokenize", True)
        and all(sampling.get(name) in (None, [], ()) for name in _NEED_TEXT)
    )


def can_make_text(tokenizer: Any, params: SamplingParams, prompt: Sequence[int]) -> bool:
    """Whether vLLM's detokenizer can be used like this. It is an internal: where it moved, engines make all texts."""
    try:
        text = AnswerText(tokenizer, Request(tuple(prompt)), params)
        return bool(text.told(Delta(token_ids=tuple(prompt))).text)
    except Exception:  # noqa: BLE001 - whatever moved
        return False
