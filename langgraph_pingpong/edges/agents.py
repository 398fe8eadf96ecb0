"""The model node that `langchain.agents.create_agent` puts into its graph: LangChain's code, not the user's.

It is a function within `create_agent` and has no public name. It is known here by its place in LangChain's source and
by what its closure holds. Where LangChain has moved it, it is an ordinary node, about which nothing is declared.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel

FACTORY = "langchain.agents.factory"
NODES = {
    "func": ("create_agent.<locals>.model_node", "wrap_model_call_handler"),
    "afunc": ("create_agent.<locals>.amodel_node", "awrap_model_call_handler"),
}
"""Of its sync and its async function: the name in LangChain's source, and the name of what middleware wraps it in."""

_ABSENT = object()


def model_of_agent(node: Any) -> BaseChatModel | None:
    """The chat model of an agent's own model node; None for any other node, and where middleware wraps the call."""
    models = [_model(getattr(node, kind, None), *names) for kind, names in NODES.items()]
    return models[0] if models[0] is models[1] else None


def _model(function: Any, qualname: str, handler: str) -> BaseChatModel | None:
    if (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) != (FACTORY, qualname):
        return None
    held: Mapping[str, Any] = inspect.getclosurevars(function).nonlocals
    model = held.get("model")
    return model if held.get(handler, _ABSENT) is None and isinstance(model, BaseChatModel) else None
