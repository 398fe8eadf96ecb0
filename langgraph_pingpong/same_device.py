"""What an engine needs so that prefills ride on the decode steps of the same device.

A decode step reads all weights to compute a token or a few. A piece of a prompt computed in the same step comes almost
for free, as long as reading the weights takes longer than computing with them, and as long as the step stays inside a
captured CUDA graph: one token more than the largest captured size, and every kernel is launched by hand. (With graphs
of 1 to 64 tokens, pieces of 128 cost 15 ms a step on an H200 with a model of 14B parameters; a decode takes 9 ms.)

- `cudagraph_capture_sizes`: vLLM's own row, up to two pieces and the decodes at least. With few `max_num_seqs`, vLLM
  would capture twice as many tokens only.
- `cudagraph_mode` "FULL": a step that decodes and prefills is one graph, its attention included. Of the backends, those
  that cannot (in 0.26 all but FlashAttention 3, Triton, FlexAttention and ROCm's) make vLLM take FULL_AND_PIECEWISE
  instead, which launches the attention of such a step by hand, layer by layer.
- `long_prefill_token_threshold`: vLLM paces a prefill by itself, a piece a step, and it can be aborted between steps.
  Pieces sent one by one would each wait for the answer to the one before it, while steps go by without one. Since
  0.32 at the latest a prefill that is alone is not paced; 0.26 paces it, too, so that a prompt that nobody prefilled
  takes longer there. `engine_args={"long_prefill_token_threshold": 0}` leaves pacing to the edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEP = 128
"""Tokens of a step that decodes and prefills. A GPU computes one to three hundred tokens in the time in which it reads
16-bit weights (an H200 at its peak 206, an H100 295, an A100 153), fewer at what kernels really reach, and fewer with
smaller weights."""

DECODES = 8
"""Decodes that a step has place for beside a piece. With more it is as large as the next captured size."""

_LARGEST = 512
"""The largest size that vLLM captures by itself."""

_USUAL_MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class Riding:
    """How prefills ride on the decode steps of their device.

    `piece` is how many tokens of a prompt a step takes at most; `paced` tells that the engine sees to that itself, so
    that a prefill can be sent whole. `engine_args` are what vLLM needs for it.
    """

    piece: int
    paced: bool
    engine_args: Mapping[str, Any]


def riding(kind: str, given: Mapping[str, Any]) -> Riding | None:
    """What engines on devices of a kind need beside the arguments that the user gave, which stay as they are.

    None on a CPU: it has no graphs, and a piece takes its time there whatever it rides on.
    """
    if kind != "cuda":
        return None
    compilation = given.get("compilation_config") or {}
    if not isinstance(compilation, Mapping):  # vLLM takes a level, too
        compilation = {"mode": compilation}
    args: dict[str, Any] = {"compilation_config": {"cudagraph_mode": "FULL", **compilation}}
    sizes = given.get("cudagraph_capture_sizes") or compilation.get("cudagraph_capture_sizes")
    if not sizes:
        sizes = args["cudagraph_capture_sizes"] = capture_sizes(given.get("max_num_seqs") or _USUAL_MAX_NUM_SEQS)
    piece = max((size for size in sizes if size <= STEP), default=STEP) - DECODES
    threshold = given.get("long_prefill_token_threshold")
    if threshold is None:
        threshold = args["long_prefill_token_threshold"] = max(piece, 1)
    return Riding(threshold or max(piece, 1), threshold > 0, args)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The sizes that vLLM captures by itself, up to where it would end, or where two pieces and the decodes fit."""
    largest = max(2 * STEP, min(2 * max_num_seqs, _LARGEST))
    return [1, 2, 4, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
