"""What every answer says of its prompt: what was prefilled, found and wasted, where, and how fast it began."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Certificate:
    """What happened to one prompt.

    All counts are tokens of it: `static` and `streamed` were prefilled by the edge before and while the upstream
    spoke, and are part of the real prompt; `wasted` were prefilled and are not. `cached` is what the engine found
    in its prefix cache when the call came, None where a server does not tell; `pulled` of them came there from another
    engine, for this call or its edge; `lost` were computed there before and not found any more. `ready` counts tokens
    of the answer that were there when the call came. `ttft_ms` counts from the moment the upstream finished (for a
    first node from its own start) to the first token, `total_ms` from there to the last.
    `ids_equal` compares the ids the engine answered with the fully rendered prompt. `source` tells who foresaw it.
    `fallback` tells what went wrong with the edge, and which engines failed on the way to `device`.
    """

    node: str
    device: str
    upstream: str | None
    source: str | None
    prompt_tokens: int
    output_tokens: int
    ids_equal: bool
    cached: int | None
    lost: int
    pulled: int
    static: int
    streamed: int
    wasted: int
    appends: int
    ready: int
    ttft_ms: float
    total_ms: float
    fallback: str | None

    def to_dict(self) -> dict[str, Any]:
        """The certificate as plain data."""
        return asdict(self)
