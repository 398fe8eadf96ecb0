"""A handle on KV that one engine keeps for another: used once, for one prompt, checked before and after.

An engine that keeps KV for a reader frees it when it was read, or after a while. Its blocks are then used for other
prompts, and whoever reads them late, or a second time, gets another prompt's KV with no error (vLLM 0.32 does no more
than log it). So nothing is read without a handle, and what was read counts only if the handle says so.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from langgraph_pingpong.engines.base import KvExport, Likeliest

MARGIN_S = 1.0
"""KV is read this long before its source may free it, in seconds: clocks and queues are not exact."""

TOLERANCE = 0.5
"""How far apart (in nats) a token's log-probability may be on both sides: the last token of the prompt is computed
beside others on one, and alone on the other, which rounds differently in 16 bits."""


Generation = tuple[int, int]
"""How often an engine was started, and its cache emptied since the pool began: what it held before is gone."""


class HandleRefused(Exception):
    """A handle must not be used, or what was read with it must not be trusted; the text says why."""


def prompt_digest(ids: Sequence[int], salt: str | None) -> str:
    """Equal for equal prompts under equal salts."""
    return hashlib.sha256(repr(salt).encode() + array("I", ids).tobytes()).hexdigest()


@dataclass(slots=True)
class KvHandle:
    """What stands for exported KV. `expires` is in seconds of one monotonic clock."""

    source: int
    """The position of the engine that keeps it."""
    generation: Generation
    """That of its source when the KV was asked for."""
    export: KvExport
    prompt: str
    """The digest of the prompt whose KV it is."""
    expires: float
    used: bool = False

    def take(self, engine_id: str, generation: Generation, prompt: str, now: float) -> KvExport:
        """Use the handle for this prompt, its source being as told. It can be done once, also if it is refused.

        Raises:
            HandleRefused: it was used before, is another source's or another prompt's, or is too old.
        """
        was_used, self.used = self.used, True
        if was_used:
            raise HandleRefused("used twice")
        if prompt != self.prompt:
            raise HandleRefused("wrong prompt")
        self._check_age(generation, now)
        if engine_id != self.export.engine_id:
            raise HandleRefused("wrong source")
        return self.export

    def check(self, generation: Generation, likeliest: Likeliest, now: float) -> None:
        """Check what was read: in time, from the same life of its source, and with the same next token.

        Raises:
            HandleRefused: what was read may be another prompt's.
        """
        if not self.used:
            raise HandleRefused("not taken")
        self._check_age(generation, now)
        if not agree(self.export.likeliest, likeliest):
            raise HandleRefused("other KV")

    def _check_age(self, generation: Generation, now: float) -> None:
        if generation != self.generation:
            raise HandleRefused("source restarted")
        if now >= self.expires - MARGIN_S:
            raise HandleRefused("expired")


def agree(one: Likeliest, other: Likeliest) -> bool:
    """Whether two engines expect the same after a prompt: each one's likeliest tokens, as likely on the other."""
    return bool(one and other) and _as_likely(one, other) and _as_likely(other, one)


def _as_likely(tokens: Likeliest, there: Likeliest) -> bool:
    """A token that is not listed there is less likely than all that are."""
    least = min(there.values())
    return all(
        abs(logprob - there[token]) <= TOLERANCE if token in there else logprob <= least + TOLERANCE
        for token, logprob in tokens.items()
    )
