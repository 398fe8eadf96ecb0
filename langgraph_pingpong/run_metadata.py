"""What happened to a call's prompt, in the metadata that tracers keep of its run: LangSmith shows it there.

It goes to the runs of tracers only. The metadata that a config carries would reach checkpoints and streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager, CallbackManager, Callbacks
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers.base import BaseTracer
from langchain_core.utils.uuid import uuid7

KEY = "pingpong"
"""Where the certificate is, in a run's metadata as in a message's `response_metadata`."""


def traceable(config: RunnableConfig | None) -> RunnableConfig:
    """The config of a call, in which the run's id and the callbacks are settled, so that its run can be found."""
    settled = ensure_config(config)
    settled.setdefault("run_id", uuid7())
    if not isinstance(settled.get("callbacks"), BaseCallbackManager):  # outside a run: LangSmith's tracer is added here
        settled["callbacks"] = CallbackManager.configure(settled.get("callbacks"))
    return settled


def add_to_run(config: RunnableConfig, callbacks: Callbacks, certificate: Mapping[str, Any]) -> None:
    """Add a certificate to the run of a call, in every tracer among its callbacks and the model's own."""
    for handler in (*_handlers(config.get("callbacks")), *_handlers(callbacks)):
        run = handler.run_map.get(str(config.get("run_id"))) if isinstance(handler, BaseTracer) else None
        if run is not None:  # a new dict: what is there belongs to all who listen, streams included
            run.extra["metadata"] = {**run.extra.get("metadata", {}), KEY: dict(certificate)}


def _handlers(callbacks: Callbacks) -> Iterator[BaseCallbackHandler]:
    yield from callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or ()
