"""What `stream_mode="custom"` of a graph tells of its calls, for the front ends of applications.

The items are a part of the trace, under names of their own, which stay. docs/events.md describes them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from langgraph_pingpong.edges import RunningTask, custom_stream
from langgraph_pingpong.trace import Event, Trace

logger = logging.getLogger(__name__)

ITEMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "generate.started": ("pingpong.call", ("prompt_tokens",)),
    "first_token": ("pingpong.first_token", ("ttft_ms", "cached")),
    "finish": ("pingpong.finish", ("certificate",)),
    "append.complete": ("pingpong.append", ("upstream", "tokens", "cached", "ms")),
    "append.failed": ("pingpong.append_failed", ("upstream", "tokens", "error")),
    "finalize": ("pingpong.finalize", ("upstream", "static", "streamed", "wasted", "ready")),
    "edge.dropped": ("pingpong.edge_dropped", ("upstream", "reason", "wasted")),
    "failover": ("pingpong.failover", ("left", "said")),
}
"""The type of an item for an event of the trace, and its fields, beside those that all items have."""


def streamed(trace: Trace, task: RunningTask) -> Trace:
    """A trace for a call of a task, and for the edges it opens: whoever streams the run hears of them, too."""
    try:
        write = custom_stream(task)
    except Exception:
        logger.warning("The events of a call cannot be streamed: LangGraph is not understood.", exc_info=True)
        return trace

    def tell(event: Event) -> None:
        if (item := to_item(event)) is not None:
            with contextlib.suppress(RuntimeError):  # the run is over, and its event loop closed
                write(item)

    return trace.also_to(tell)


def to_item(event: Event) -> dict[str, Any] | None:
    """An event as an item of the custom stream; None if it is of no use there."""
    if event.name not in ITEMS:
        return None
    type, fields = ITEMS[event.name]
    common = {"type": type, "run": event.run, "node": event.node, "device": event.device, "t": event.t}
    return {**common, **{name: event.data[name] for name in fields}}
