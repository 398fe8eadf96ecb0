"""Reads what vLLM's engine says to a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from langgraph_pingpong.engines.base import ABORTED, FAILED, Delta, TokenLogprob
from langgraph_pingpong.errors import EngineDead, EngineError

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


def check_not_aborted(output: RequestOutput, device: str) -> None:
    """See that a request goes on.

    An engine whose process is asked to end, or that is paused, ends what runs as if it were complete.

    Raises:
        EngineDead: it was given up.
    """
    if any(answer.finish_reason == ABORTED for answer in output.outputs):
        raise EngineDead(f"The engine on {device} gave the request up, as when it is told to end.")


def to_delta(output: RequestOutput, answer: CompletionOutput, first: bool, likeliest: int, device: str) -> Delta:
    """What an output says; the first of all carries the prompt's ids.

    Raises:
        EngineError: vLLM ended the answer with an error of its own.
    """
    if answer.finish_reason == FAILED:
        raise EngineError(f"vLLM on {device} ended the answer with an error; its log says why.")
    return Delta(
        answer.text,
        tuple(answer.token_ids),
        answer.finish_reason,
        answer.stop_reason,
        tuple(output.prompt_token_ids or ()) if first else None,
        output.num_cached_tokens or 0 if first else None,
        answer.index,
        tuple(_to_logprobs(answer, likeliest)),
    )


def _to_logprobs(answer: CompletionOutput, likeliest: int) -> Iterator[TokenLogprob]:
    """For each token vLLM has one table of the sampled token and the likeliest ones; ranks start at 1."""
    for token_id, table in zip(answer.token_ids, answer.logprobs or (), strict=False):
        if table is None:
            continue
        ranked = sorted(table.values(), key=lambda each: each.rank or 0)[:likeliest]
        top = tuple((each.decoded_token or "", each.logprob) for each in ranked)
        yield TokenLogprob(table[token_id].decoded_token or "", table[token_id].logprob, top)
