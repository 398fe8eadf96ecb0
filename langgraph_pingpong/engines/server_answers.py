"""Reads what a vLLM server answers: OpenAI's forms, and the fields that vLLM adds to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.engines.base import Delta, TokenLogprob
from langgraph_pingpong.errors import ServerFailed, WrongServer

if TYPE_CHECKING:
    from openai.types import Completion, CompletionChoice, Model
    from openai.types.completion_choice import Logprobs


def status(error: Any) -> int | None:
    """Of the response, or that of an error within a stream, which began well."""
    if (status := getattr(error, "status_code", None)) is not None:
        return int(status)
    code = error.body.get("code") if isinstance(error.body, dict) else None
    return code if isinstance(code, int) else None


def words(error: Any) -> str:
    """What the server says of an error, without the rest of what it sent."""
    body = error.body
    words = body.get("message") if isinstance(body, dict) else body
    return str(words or error.message)


def served_as(model: str, cards: Sequence[Model], device: str) -> tuple[str, int]:
    """The served name that fits a model on this side, and the longest prompt plus answer, in tokens."""
    if not any(extra(card, "max_model_len") for card in cards):
        raise ServerFailed(f"{device} does not tell its max_model_len, as vLLM does.")
    if (card := _card_of(model, cards)) is None:
        served = ", ".join(card.id for card in cards)
        raise WrongServer(f"{device} serves {served}, and this side has the model {model}.")
    if (length := _length_of(card, cards)) is None:
        raise ServerFailed(f"{device} does not tell the max_model_len of {card.id}, as vLLM does.")
    return card.id, length


def _card_of(model: str, cards: Sequence[Model]) -> Model | None:
    """That of a model by its name, else by the end of its name: one folder can be at two places."""
    for card in cards:
        if model in (card.id, extra(card, "root")):
            return card
    for card in cards:
        if PurePath(model).name in {PurePath(name).name for name in (card.id, extra(card, "root")) if name}:
            return card
    return None


def _length_of(card: Model, cards: Sequence[Model]) -> int | None:
    """Its own, else that of the model it adapts; behind a gateway other models have other lengths."""
    base = [each for each in cards if each.id == extra(card, "parent")]
    for each in (card, *base):
        if length := extra(each, "max_model_len"):
            return int(length)
    lengths = {int(length) for each in cards if (length := extra(each, "max_model_len"))}
    return lengths.pop() if len(lengths) == 1 else None


def extra(answer: Any, name: str) -> Any:
    """A field that vLLM adds to OpenAI's API."""
    return (answer.model_extra or {}).get(name)


def cached_tokens(answer: Completion) -> int | None:
    """Known where the server was started with `--enable-prompt-tokens-details`."""
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return details.cached_tokens if details else None


def to_delta(choice: CompletionChoice, first: bool, likeliest: int) -> Delta:
    """A part of an answer; the first of all carries the prompt's ids."""
    return Delta(
        choice.text,
        tuple(extra(choice, "token_ids") or ()),
        choice.finish_reason or None,
        extra(choice, "stop_reason"),
        tuple(extra(choice, "prompt_token_ids") or ()) if first else None,
        index=choice.index,
        logprobs=tuple(_to_logprobs(choice.logprobs, likeliest)) if choice.logprobs else (),
    )


def _to_logprobs(logprobs: Logprobs, likeliest: int) -> Iterator[TokenLogprob]:
    """For each token there is one table of the sampled token and the likeliest ones, by their texts."""
    tables = logprobs.top_logprobs or ()
    for token, logprob, table in zip(logprobs.tokens or (), logprobs.token_logprobs or (), tables, strict=False):
        ranked = sorted((table or {}).items(), key=lambda each: -each[1])[:likeliest]
        yield TokenLogprob(token, logprob, tuple(ranked))
