"""Who may have how much of an engine's KV cache: one policy for all that is held there, and for answers.

Anchors, open prompts and pulls (what is kept for a reader or being read) hold blocks that vLLM cannot take from them.
Together they hold at most `kv_pool_ratio` of the cache, and of each kind no more than its own cap:

- Anchors come first: they are few, and their cap leaves room for the longest prompt and answer, so that no answer can
  wait for them in vain. A new one waits for pulls that are under way.
- Pulls get PULL_SHARE, and only what nobody holds: a prompt that is not read is computed.
- Prompts of branch candidates, which may never be asked for, get BRANCH_SHARE, and only what nobody holds. Where
  prompts can grow they become open prompts; so of the two the larger counts.
- Open prompts get what is left, less what running answers may still need. Those used least recently are closed for
  anchors and for answers.

All else is the engine's own: answers, and what is cached of earlier ones, least recently used first to go.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

KV_POOL_RATIO = 0.85
"""The share of the KV cache that may be held, by default."""

PULL_SHARE = 0.25
"""The share of the KV cache that pulls may hold."""

BRANCH_SHARE = 0.25
"""The share of the KV cache for prompts of which it is not known whether they will be asked for."""


@dataclass(slots=True)
class KvBudget:
    """The budget of one engine, in tokens. `capacity` is what its KV cache holds beside weights and activations.

    `longest` is the longest prompt plus answer. Where the capacity is unknown (None), nothing is refused.
    """

    capacity: int | None = None
    longest: int = 0
    ratio: float = KV_POOL_RATIO
    answering: int = 0
    """What answers under way may need."""
    anchored: int = 0
    """What anchors hold."""
    prompts: int = 0
    """What open prompts hold, those of branch candidates among them."""
    pulled: int = 0
    """What pulls hold."""
    branches: int = 0
    """What the prompts of branch candidates come to."""

    def began(self, cache_tokens: int | None, max_model_len: int, block_size: int) -> None:
        """The engine was started, with a cache of so many tokens. What is held on it is told by those who hold it."""
        self.capacity = cache_tokens
        self.longest = -(-max_model_len // block_size) * block_size

    @property
    def _size(self) -> int:
        return sys.maxsize if self.capacity is None else self.capacity

    @property
    def share(self) -> int:
        """What may be held in all."""
        return int(self._size * self.ratio)

    @property
    def held(self) -> int:
        """What is held in all, or will be."""
        return self.anchored + self.pulled + max(self.prompts, self.branches)

    @property
    def anchor_cap(self) -> int:
        """What anchors may hold."""
        return max(0, min(self.share, self._size - self.longest))

    @property
    def anchors_fit(self) -> bool:
        """Whether anchors may take what they have asked for: open prompts are closed for them, pulls are not."""
        return self.anchored + self.pulled <= self.share

    @property
    def room(self) -> int:
        """What open prompts may hold at this moment."""
        return max(0, min(self.share, self._size - self.answering) - self.anchored - self.pulled)

    def may_pull(self, tokens: int) -> bool:
        """Whether so many more may be kept for a reader, or read."""
        return self.pulled + tokens <= self._size * PULL_SHARE and self.held + tokens <= self.share

    def may_branch(self, tokens: int) -> bool:
        """Whether the prompt of one more branch candidate may be prefilled."""
        return self.branches + tokens <= self._size * BRANCH_SHARE and self.held + tokens <= self.share
