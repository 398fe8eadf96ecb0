"""Who answers: the name of the served model, and what else tells its answers from those of other engines.

LangChain's cache of answers goes by it, and tracers show it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from langgraph_pingpong.pool import EnginePool

ENGINES = ("dtype", "max_model_len", "exact", "engine_args")
"""The settings of engines that their answers depend on."""

_POOLS: WeakKeyDictionary[EnginePool, str] = WeakKeyDictionary()
"""Names of pools whose engines do not tell what they serve; ids of objects would come again."""


def served_model(model: str | None, pool: EnginePool | None) -> str:
    """The name of the model that is served: that of a pool's engines, if they tell it, goes first."""
    return (_model_of(pool) if pool is not None else None) or model or "default"


def engines_identity(settings: Mapping[str, Any], pool: EnginePool | None) -> dict[str, Any]:
    """What a model's answers depend on of its engines: those of the pool, or those that `settings` make."""
    if pool is None:
        return _shown({name: settings[name] for name in ENGINES})
    config = getattr(pool.engines[0], "_config", None)
    identity = _shown({name: getattr(config, name, None) for name in ENGINES})
    if _model_of(pool) is None:
        identity["pool"] = _POOLS.setdefault(pool, uuid4().hex)
    return identity


def _model_of(pool: EnginePool) -> str | None:
    return getattr(pool.engines[0], "model", None)


def _shown(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as traces may hold them: among vLLM's arguments there may be a key."""
    if given := settings["engine_args"]:
        settings["engine_args"] = hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:16]
    return settings
