"""Keeps the config of a call at hand: LangChain gives it to the public methods of a model only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from langgraph_pingpong.edges import REHEARSAL, Rehearsal
from langgraph_pingpong.run_metadata import traceable

_CONFIG: ContextVar[RunnableConfig | None] = ContextVar("langgraph_pingpong_config", default=None)


def current_config() -> RunnableConfig:
    """The config of the public call under way; where LangChain came another way, the caller's."""
    return _CONFIG.get() or ensure_config()


@contextmanager
def _calling(config: RunnableConfig) -> Iterator[None]:
    token = _CONFIG.set(config)
    try:
        yield
    finally:
        _CONFIG.reset(token)


class ConfigAwareChatModel(BaseChatModel):
    """A chat model whose private methods can ask for the config of the call they serve."""

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer a prompt."""
        if rehearsal := REHEARSAL.get():
            return self._rehearse(rehearsal, input, kwargs)
        with _calling(config := traceable(config)):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer a prompt."""
        if rehearsal := REHEARSAL.get():
            return self._rehearse(rehearsal, input, kwargs)
        with _calling(config := traceable(config)):
            return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answer a prompt piece by piece."""
        if rehearsal := REHEARSAL.get():
            yield AIMessageChunk(content=self._rehearse(rehearsal, input, kwargs).text)
            return
        config = traceable(config)
        chunks = super().stream(input, config, stop=stop, **kwargs)
        # Only while the first chunk is made: a generator shares its caller's context, so that what it sets there
        # would be seen by the caller between chunks.
        with _calling(config):
            first = next(chunks)
        yield first
        yield from chunks

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Answer a prompt piece by piece."""
        if rehearsal := REHEARSAL.get():
            yield AIMessageChunk(content=self._rehearse(rehearsal, input, kwargs).text)
            return
        config = traceable(config)
        async with aclosing(super().astream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            with _calling(config):
                first = await anext(chunks)
            yield first
            async for chunk in chunks:
                yield chunk

    def _rehearse(self, rehearsal: Rehearsal, input: LanguageModelInput, kwargs: Mapping[str, Any]) -> AIMessage:
        return rehearsal.on_call(self, self._convert_input(input).to_messages(), kwargs)
