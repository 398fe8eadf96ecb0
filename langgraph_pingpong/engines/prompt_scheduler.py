"""A scheduler of vLLM's that reuses nothing of answers. vLLM imports it by name, in the engine's process."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class PromptScheduler(Scheduler):
    """vLLM's own, but only blocks that prompts fill go into the prefix cache.

    The rest of a prompt's last block, and those behind it, are computed token by token while an answer is decoded. As
    a part of another prompt they would be computed at once, which rounds differently.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        keep = coordinator.cache_blocks

        def keep_prompt(request: Request, num_computed_tokens: int) -> None:
            keep(request, min(num_computed_tokens, request.num_prompt_tokens))

        coordinator.cache_blocks = keep_prompt  # type: ignore[method-assign]
