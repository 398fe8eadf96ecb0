"""What a chat model offers of memory: anchors, and what its engines' caches hold and lost."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from langgraph_pingpong.anchors import LEASE_S, Anchor
from langgraph_pingpong.counting import Counting
from langgraph_pingpong.growing_prompt import common_prefix
from langgraph_pingpong.planning import cache_salt
from langgraph_pingpong.serving import Serving
from langgraph_pingpong.tools import ToolLike, openai_tools

_FOLLOWED_BY = ("0", "an end")
"""Two texts that may follow an anchor: what is equal in both prompts does not depend on it."""


class Anchoring(Counting):
    """A chat model that can keep beginnings of prompts cached."""

    def anchor(
        self,
        messages: str | Sequence[BaseMessage],
        *,
        tools: Sequence[ToolLike] = (),
        lease_s: float = LEASE_S,
        tenant: Hashable = None,
    ) -> Anchor:
        """Keep the beginning that these messages and tools give to prompts in the KV cache of every device.

        Returns when the devices have computed it; starts the engines. Only whole cache blocks stay. Equal anchors are
        kept once, for as long as one of them is held.

        Args:
            messages: a system prompt, or the messages that prompts begin with.
            tools: those that are bound to the model in these prompts.
            lease_s: after so many seconds (s) it is given back, unless `renew` or `release` came before.
            tenant: whose prompts, as in `config["configurable"]["tenant"]`.

        Raises:
            AnchorTooLarge: anchors would hold more of the KV cache than they may.
            CallRefused: the beginning is shorter than a cache block, or the lease is none.
        """
        serving = self._serving()
        ids = self._beginning(serving, [SystemMessage(messages)] if isinstance(messages, str) else messages, tools)
        salt = cache_salt({"configurable": {"tenant": tenant}})
        pool = serving.pool
        pool.start()
        return pool.loop.run(pool.anchors.add(ids, salt, lease_s, pool.loop))

    async def aanchor(self, messages: str | Sequence[BaseMessage], **settings: Any) -> Anchor:
        """`anchor`, without blocking the caller's event loop."""
        return await asyncio.to_thread(self.anchor, messages, **settings)

    def memory(self) -> list[dict[str, Any]]:
        """For each device what is known of its KV cache, in tokens. Starts the engines.

        `cache_tokens` is what it holds (None where a server does not tell), `anchored` and `anchor_cap` what anchors
        hold and may hold; `evicted` is what it lost since it was empty, counted where the engine tells it
        (`kv_transfer=True`) and else an estimate, and `needed_again` what was computed anew for later prompts.
        """
        pool = self._serving().pool
        pool.start()
        return pool.memory()

    def _beginning(
        self, serving: Serving, messages: Sequence[BaseMessage], tools: Sequence[ToolLike]
    ) -> tuple[int, ...]:
        """The ids that all prompts have in common that begin so."""
        follows = AIMessage if messages and messages[-1].type in ("human", "tool") else HumanMessage
        kwargs = {"tools": openai_tools(tools)} if tools else {}
        one, other = (
            serving.template.encode(self._render([*messages, follows(text)], kwargs)) for text in _FOLLOWED_BY
        )
        return tuple(one[: common_prefix(one, other)])
