"""Routing functions of conditional edges: they are read, never run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from langgraph.types import Send


def may_send(path: Any) -> bool:
    """Whether what routes a conditional edge may return a `Send`: it names it, or its code cannot be read."""
    function: Any = getattr(path, "func", None) or getattr(path, "afunc", None)
    function = inspect.unwrap(function) if callable(function) else None
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if "Send" in str(getattr(function, "__annotations__", {}).get("return", "")):
        return True
    return any(name == "Send" or function.__globals__.get(name) is Send for name in _names(code))


def _names(code: CodeType) -> Iterator[str]:
    """Every name that a piece of code looks up elsewhere, with those of the functions within it."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
