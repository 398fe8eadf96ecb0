"""Running a node's function ahead of time, up to its first model call, behind guards.

A rehearsed node sees made-up state. Calls of the model are answered from a script; the first one beyond it is recorded
and ends the rehearsal. Other models, tools and retrievers are stopped before they do anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import set_config_context
from langsmith import tracing_context

from langgraph_pingpong.edges.tool_results import hear_nothing


class _Ended(BaseException):
    """Ends a rehearsal; not an Exception, so that a node's own handlers, retries and fallbacks let it pass."""


@dataclass
class Rehearsal:
    """The script of a rehearsal, and what came out of it."""

    answers: Sequence[str] = ()
    """What the model answers, call by call."""
    given: int = 0
    recorded: tuple[Any, Sequence[BaseMessage], Mapping[str, Any]] | None = None
    """The first call beyond the script: its model, messages and keyword arguments."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_call(self, model: Any, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]) -> AIMessage:
        """Answer a call from the script, or record it and end the rehearsal."""
        with self._lock:
            if self.given < len(self.answers):
                self.given += 1
                return AIMessage(self.answers[self.given - 1], id=f"rehearsed-{self.given}")
            self.recorded = self.recorded or (model, tuple(messages), dict(kwargs))
        raise _Ended


REHEARSAL: ContextVar[Rehearsal | None] = ContextVar("langgraph_pingpong_rehearsal", default=None)
"""The rehearsal this context is part of; the chat model asks it instead of its engines."""


class _Guard(BaseCallbackHandler):
    """Stops everything that announces itself through callbacks, before it starts."""

    raise_error = True
    run_inline = True

    def _stop(self, *_: Any, **__: Any) -> Any:
        raise _Ended

    on_chat_model_start = _stop
    on_llm_start = _stop
    on_tool_start = _stop
    on_retriever_start = _stop


class ReadOnlyStore:
    """A store that can be read and silently keeps nothing."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        """Reading methods are the store's own; any other is refused."""
        if name in ("get", "search", "list_namespaces", "aget", "asearch", "alist_namespaces"):
            return getattr(self._store, name)
        raise RuntimeError(f"a rehearsal cannot call {name}() of the store")


_NOTHING = object()


def rehearse(
    node: Runnable[Any, Any], input: Any, config: RunnableConfig, answers: Sequence[str] = ()
) -> tuple[Any, Rehearsal]:
    """Run a node on made-up input; returns what it returned, if it got that far, and the rehearsal.

    Call it in a context of its own. Whatever the node raises comes through.
    """
    rehearsal = Rehearsal(answers)
    REHEARSAL.set(rehearsal)
    hear_nothing()  # what is rehearsed is no tool that somebody waits for
    guarded: RunnableConfig = {**config, "callbacks": [_Guard()]}
    result = _NOTHING
    with tracing_context(enabled=False), set_config_context(guarded) as context, contextlib.suppress(_Ended):
        result = context.run(_run, node, input, guarded)
    return result, rehearsal


def _run(node: Runnable[Any, Any], input: Any, config: RunnableConfig) -> Any:
    return asyncio.run(node.ainvoke(input, config)) if _is_async(node) else node.invoke(input, config)


def returned(result: Any) -> bool:
    """Whether a rehearsed node got to its end."""
    return result is not _NOTHING


def _is_async(node: Runnable[Any, Any]) -> bool:
    return getattr(node, "func", _NOTHING) is None
