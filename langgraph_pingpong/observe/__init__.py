"""Sends what the trace tells to where programs are watched: spans to OpenTelemetry, metrics to Prometheus.

    from langgraph_pingpong.observe import export_metrics, export_spans

    export_spans(model)  # to the tracer provider that the program has set
    export_metrics(model)  # to the registry that the program serves

Neither ever holds text of prompts or answers, keys, tenants, or what an error says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from langgraph_pingpong.errors import ExporterNotInstalled

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from langgraph_pingpong.chat_model import ChatPingPong

__all__ = ["export_metrics", "export_spans"]


def export_spans(*models: ChatPingPong, tracer_provider: TracerProvider | None = None) -> None:
    """Make OpenTelemetry spans of everything these models do from now on.

    Args:
        models: all models that nodes of a graph use, each once; copies of a model are heard with it.
        tracer_provider: where spans go; None is the program's own, as `opentelemetry.trace` knows it.

    Raises:
        ExporterNotInstalled: opentelemetry is not installed.
    """
    try:
        from langgraph_pingpong.observe.spans import Spans
    except ModuleNotFoundError as error:
        raise ExporterNotInstalled(f"Spans need opentelemetry: {error}.") from error
    spans = Spans(tracer_provider)
    for model in models:
        spans.watch(model)


def export_metrics(*models: ChatPingPong, registry: CollectorRegistry | None = None) -> None:
    """Count in Prometheus metrics what these models do from now on.

    Args:
        models: all models whose metrics the registry shall have, each once; copies of a model are heard with it.
        registry: where the metrics are; None is prometheus_client's own.

    Raises:
        ExporterNotInstalled: prometheus_client is not installed.
        ValueError: the registry has these metrics already; give all models at once.
    """
    try:
        from langgraph_pingpong.observe.metrics import Metrics
    except ModuleNotFoundError as error:
        raise ExporterNotInstalled(f"Metrics need prometheus_client: {error}.") from error
    metrics = Metrics(registry)
    for model in models:
        metrics.watch(model)
