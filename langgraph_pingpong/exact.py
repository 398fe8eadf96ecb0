"""What `exact` asks of an engine.

"ids": the prompt's token ids are those of its full rendering. vLLM rounds a token's values differently when other
tokens are computed with it, so that a near tie can fall the other way when part of a prompt was prefilled before.

"bits": so is every number the engine computes, and with it the answer, since every kernel sees the same shapes. One KV
block is one step's worth of tokens (`CHUNK`), and one request runs at a time, so a prompt is computed in whole blocks
from its beginning and a rest, whatever of it was cached: a prefix is reused in whole blocks, and vLLM computes the last
one again where it holds the prompt's last token. A block that decoding filled was computed token by token, and is never
reused: `PromptScheduler` keeps it out of the cache.

vLLM's batch-invariant mode does not do instead. On H200s (vLLM 0.26) it left 14 of 96 answers different: it covers what
runs beside a request, not in which pieces its prompt was computed (docs/results/h200x2/exact-batch-invariant.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from langgraph_pingpong.errors import NotExact

Exact = Literal["ids", "bits"]

CHUNK = 128
"""Tokens in a block and in a step, where `block_size` is not given.

A multiple of 32, as the CPU's attention asks for (GPUs' ask for 16). An edge sends whole blocks: of an answer of a few
hundred tokens, blocks of 256 would leave most to the moment the node starts. And a prompt reads all weights once a
step: steps of 64 tokens would read them twice as often.
"""

_SAME_SHAPES: dict[str, Any] = {
    "max_num_seqs": 1,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "long_prefill_token_threshold": 0,
    # The class below is made from vLLM's plain scheduler; the asynchronous one is another class.
    "async_scheduling": False,
    "scheduler_cls": "langgraph_pingpong.engines.prompt_scheduler.PromptScheduler",
}

_CHANGE_SHAPES = (
    "speculative_config",  # takes tokens of a step's budget
    "max_num_scheduled_tokens",  # another budget than max_num_batched_tokens
    "prefix_match_unit",  # hits within a block
    "kv_transfer_config",  # blocks that another engine computed
    "kv_offloading_size",
)


def exact_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's engine that make every prompt come in the same shapes.

    Raises:
        NotExact: an argument that was given contradicts one of them.
    """
    chunk = given.get("block_size") or given.get("max_num_batched_tokens") or CHUNK
    needed = {"block_size": chunk, "max_num_batched_tokens": chunk, **_SAME_SHAPES, **dict.fromkeys(_CHANGE_SHAPES)}
    for name, value in given.items():
        if name in needed and value != needed[name]:
            raise NotExact(f"{name}={value!r} contradicts exact='bits', which needs {name}={needed[name]!r} here.")
    return {name: value for name, value in needed.items() if name not in _CHANGE_SHAPES}


def check_exact(exact: str) -> None:
    """Check that there is such a guarantee.

    Raises:
        NotExact: there is not.
    """
    if exact not in get_args(Exact):
        raise NotExact(f"exact= is 'ids' or 'bits', and not {exact!r}.")


def check_settled(wanted: Mapping[str, Any], settled: Any) -> None:
    """Compare the arguments of an engine that shall be exact with what vLLM made of them, its `VllmConfig`.

    Raises:
        NotExact: vLLM had to use other values, as for models whose layers do not all have attention.
    """
    have = {
        "block_size": settled.cache_config.block_size,
        "enable_prefix_caching": settled.cache_config.enable_prefix_caching,
        "max_num_batched_tokens": settled.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": settled.scheduler_config.max_num_seqs,
    }
    for name, value in have.items():
        if wanted.get(name, value) != value:
            raise NotExact(f"vLLM uses {name}={value!r} for this model, and exact='bits' needs {wanted[name]!r}.")
