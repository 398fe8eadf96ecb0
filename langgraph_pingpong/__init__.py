"""Streaming edges for LangGraph on vLLM: the next node's prompt is prefilled while the current one speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langgraph_pingpong.chat_model import ChatPingPong
    from langgraph_pingpong.edges import agent_node, streaming_edges, streaming_tool
    from langgraph_pingpong.engines.fake_engine import FakeEngine
    from langgraph_pingpong.pool import EnginePool
    from langgraph_pingpong.serving import engine_pool
    from langgraph_pingpong.trace import JsonLines
    from langgraph_pingpong.viz.graph import draw_streaming

__all__ = [
    "ChatPingPong",
    "EnginePool",
    "FakeEngine",
    "JsonLines",
    "agent_node",
    "draw_streaming",
    "engine_pool",
    "streaming_edges",
    "streaming_tool",
]

_HOMES = {
    "ChatPingPong": "chat_model",
    "EnginePool": "pool",
    "FakeEngine": "engines.fake_engine",
    "JsonLines": "trace",
    "agent_node": "edges",
    "draw_streaming": "viz.graph",
    "engine_pool": "serving",
    "streaming_edges": "edges",
    "streaming_tool": "edges",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package does nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
