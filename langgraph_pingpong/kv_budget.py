"""Who may have how much of an engine's KV cache: one policy for anchors, open prompts and answers.

Anchors and open prompts hold blocks that vLLM cannot take from them. Together they hold at most `kv_pool_ratio` of the
cache. Anchors come first: they are few, and their cap leaves room for the longest prompt and answer, so that no answer
can wait for them in vain. Open prompts get what is left of the share, less what running answers may still need. All
else is the engine's own: answers, and what is cached of earlier ones, least recently used first to go.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_POOL_RATIO = 0.85
"""The share of the KV cache that anchors and open prompts may hold together, by default."""


@dataclass(slots=True)
class KvBudget:
    """The budget of one engine, in tokens. `capacity` is what its KV cache holds beside weights and activations.

    `longest` is the longest prompt plus answer.
    """

    capacity: int
    longest: int
    ratio: float = KV_POOL_RATIO
    answering: int = 0
    """What answers under way may need."""
    anchored: int = 0
    """What anchors hold."""

    @property
    def share(self) -> int:
        """What anchors and open prompts may hold together."""
        return int(self.capacity * self.ratio)

    @property
    def anchor_cap(self) -> int:
        """What anchors may hold."""
        return max(0, min(self.share, self.capacity - self.longest))

    @property
    def room(self) -> int:
        """What open prompts may hold at this moment."""
        return max(0, min(self.share, self.capacity - self.answering) - self.anchored)


def in_blocks(tokens: int, block_size: int) -> int:
    """The tokens that so many take up: whole blocks."""
    return -(-tokens // block_size) * block_size
