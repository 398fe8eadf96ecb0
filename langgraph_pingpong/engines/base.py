"""The seam between this package and whatever serves the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from langgraph_pingpong.kv_budget import KvBudget

PREFILL_PRIORITY = 1
"""vLLM serves lower numbers first; answers have 0."""

ABORTED, FAILED = "abort", "error"
"""vLLM's finish reasons of requests that were given up, or met an error: their answers are not complete."""


def new_request_id() -> str:
    """A request id that is unique across engines and processes."""
    return uuid4().hex


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to sample the answer.

    `sampling` uses the names of vLLM's `SamplingParams`, with plain values only (`structured_outputs` is a dict of
    vLLM's `StructuredOutputsParams`); what it leaves out is the model's own default. Requests with another
    `cache_salt` never share what is cached of their prompts.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = field(default_factory=new_request_id)
    cache_salt: str | None = None


def within(room: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The same sampling for an answer that has room for so many tokens: servers refuse to be asked for more."""
    return {**sampling, "max_tokens": min(room, sampling.get("max_tokens", room))}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token that was sampled, and those of the likeliest tokens in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What an engine produced since the last delta.

    `text` and `token_ids` are increments. Text that may become a stop string is held back, its ids are not, so the
    two can be apart by a few tokens. `finish_reason` is set on the last delta only. The first delta carries
    `prompt_token_ids` as the engine saw them. `num_cached_tokens`, the tokens of the prompt that came from its prefix
    cache, is on the first delta, too; on the last one where a server tells it; nowhere where it does not. With `n`
    answers to one prompt, `index` tells them apart, and each has a last delta.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    num_cached_tokens: int | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of a tool call: its first part names it, all parts' `arguments` joined are JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """What a delta says, taken apart. Only `content` reaches the nodes downstream."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()


Reader = Callable[[Delta], Said]
"""Takes the deltas of one call apart, in order; it may hold text back until it knows what it is."""


def all_content(delta: Delta) -> Said:
    """The reader of a call without tools and reasoning: everything is content."""
    return Said(delta.text)


class Appends(Protocol):
    """A prompt that grows on an engine, piece by piece: a piece costs the same at any length.

    What was computed stays referenced in the KV cache until this is closed, and cached after that. The engine closes
    it by itself when it was idle for long, or when answers need the room.
    """

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt are computed."""

    @property
    def is_open(self) -> bool:
        """Whether what was computed is still held."""

    async def append(self, ids: Sequence[int]) -> int | None:
        """Compute more of the prompt: whole cache blocks, one piece at a time.

        Returns how many tokens before or in the piece were there already, or None if the piece was not computed
        because the engine had closed this. Cancelling closes it.

        Raises:
            CallRefused: the prompt leaves no room for an answer.
            EngineDead: the engine's process ended, or the engine is not running.
        """

    def let_go(self) -> None:
        """Close it soon, from a place that cannot wait. Safe to call twice."""

    async def close(self) -> None:
        """Let go of the KV cache, and wait until that went out. Safe to call twice."""


Likeliest = Mapping[int, float]
"""The likeliest next tokens after a prompt, with their log-probabilities: what its KV says."""


class KvLost(Exception):
    """The KV of a prompt could not be kept for another engine, or not be had from it. Whoever wants it computes it."""


class KvPort(Protocol):
    """Where KV leaves an engine for another one, and comes in. Prompts are whole cache blocks."""

    @property
    def engine_id(self) -> str:
        """What tells this engine from all others, and from itself before it was started anew."""

    @property
    def lease_s(self) -> float:
        """How long KV is kept for a reader at least, in seconds from when it was asked for."""

    async def export(self, request: Request) -> KvExport:
        """Keep a prompt's KV for one reader; what is not cached is computed. Cancelling gives it up.

        Raises:
            KvLost: the engine could not.
            EngineDead: the engine's process ended, or the engine is not running.
        """

    async def pull(self, request: Request, export: KvExport) -> Likeliest:
        """Read KV that another engine keeps into the prefix cache, as that of this prompt: nothing here checks that.

        Cancelling gives it up; nothing is cached then.

        Raises:
            KvLost: it could not be read.
            EngineDead: the engine's process ended, or the engine is not running.
        """

    def distrust(self) -> None:
        """Serve nothing of what is cached now to any later request."""

    def listen(self, book: BlockBook) -> bool:
        """From now on note in `book` which blocks are cached, by the engine's own word; False where it gives none."""


@dataclass(frozen=True, slots=True)
class KvExport:
    """KV that an engine keeps for a reader.

    `engine_id` tells which engine, `request_id` for which request it computed it. `cached` is how many tokens of the
    prompt it had, `likeliest` what comes after the prompt. `how` is for the engine that reads.
    """

    engine_id: str
    request_id: str
    cached: int
    likeliest: Likeliest
    how: Mapping[str, Any] = field(repr=False)


class BlockBook(Protocol):
    """Which cache blocks an engine holds, by the keys that placement.py gives them."""

    def add(self, keys: Sequence[int]) -> None:
        """They are cached, in this order within a prompt."""

    def discard(self, keys: Sequence[int]) -> None:
        """They were evicted."""

    def clear(self) -> None:
        """None is any more, or nothing is known of them: they were not evicted."""


class Engine(Protocol):
    """Serves one copy of the model on one device.

    All methods are called on the event loop of the pool that owns the engine.
    """

    @property
    def device(self) -> str:
        """Where the engine runs, for example 'cuda:0'."""

    @property
    def block_size(self) -> int:
        """Tokens per KV cache block: the grain in which a prefix is reused. Valid from the first start on."""

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens. Valid from the first start on."""

    @property
    def cache_tokens(self) -> int | None:
        """How many tokens the prefix cache can hold, None where that is unknown. Valid from the first start on."""

    @property
    def budget(self) -> KvBudget:
        """Who holds how much of the KV cache; the same object in all lives of the engine. It is told of each start."""

    @property
    def piece_tokens(self) -> int:
        """How many tokens of a prefill a decode step can carry along, not much slowed; may be 0. Valid once started."""

    @property
    def num_unfinished(self) -> int:
        """Requests that were sent and are neither finished nor aborted; appends count while a piece is computed."""

    @property
    def kv(self) -> KvPort | None:
        """Where KV leaves for other engines and comes from them; None where it cannot."""

    async def start(self) -> None:
        """Bring the engine up; returns when it can serve.

        Raises:
            ConfigError: the settings cannot work on this machine, or with this server.
            EngineStartFailed: the engine did not come up.
            ServerFailed: the server cannot be used.
        """

    async def restart(self) -> None:
        """Bring an engine that failed back up; returns when it can serve. What it had cached may be lost.

        Requests that are open on an engine in this process fail. A server is asked again what it serves.

        Raises:
            The same as `start`. The engine stays down, and may be restarted again.
        """

    async def stop(self) -> None:
        """Shut the engine down; open requests fail. Safe to call twice."""

    def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """Stream the answer to a prompt; closing the iterator early aborts the request.

        What ends without an error is complete: an engine that gives a request up raises.

        Raises:
            CallRefused: the engine cannot do what the request asks for.
            EngineDead: the engine's process ended or gave the request up, or the engine is not running.
            EngineError: the request met an error within the engine, which goes on.
            ServerFailed: the server failed, gave the request up, or cannot be reached any more.
        """

    async def prefill(self, request: Request) -> int | None:
        """Compute the KV cache of a prompt so that later prompts find it; returns the tokens found cached, if known.

        It comes after the answers where the engine schedules by priority. Cancelling aborts the request; whole blocks
        that were computed stay in the prefix cache.
        """

    def open_appends(self, cache_salt: str | None = None, *, keep: bool = False) -> Appends | None:
        """Begin a prompt that grows; None where that is not sound or too many are open: `prefill` does as well.

        One to `keep` is not closed by the engine, however long it is idle and whoever needs the room. Who keeps it sees
        to it that the longest prompt and answer have room beside all of them.

        Raises:
            EngineDead: the engine is not running.
        """

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, for a cold start."""
