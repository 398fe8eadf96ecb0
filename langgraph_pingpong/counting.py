"""What a chat model says of tokens: how many a text, or a prompt, has."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage

from langgraph_pingpong.errors import TemplateRefused
from langgraph_pingpong.prompts import estimate_tokens
from langgraph_pingpong.serving import Serving
from langgraph_pingpong.tools import ToolLike, openai_tools
from langgraph_pingpong.variants import Variants


class Counting(Variants):
    """A chat model that counts by its own template and tokenizer."""

    @abstractmethod
    def _serving(self) -> Serving:
        """The engines and the template."""

    @abstractmethod
    def _render(self, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]) -> str:
        """The prompt of a call, as text."""

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer."""
        return self._serving().template.encode(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[ToolLike] | None = None
    ) -> int:
        """Tokens of the prompt that these messages make, by the model's own template and tokenizer.

        What the template refuses is estimated: `trim_messages` asks for parts of conversations, for a system message
        alone, and for messages in the reverse order, which strict templates do not take.
        """
        shown = openai_tools(tools) if tools else []
        try:
            return len(self.get_token_ids(self._render(messages, {"tools": shown} if shown else {})))
        except TemplateRefused:
            return estimate_tokens(self._serving().template, messages, shown)
