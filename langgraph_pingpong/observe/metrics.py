"""A sink of the trace that counts in Prometheus metrics. Labels are names of nodes and devices, which are few."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.trace import Event

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds: fine where a prefill was hidden, coarse where it was not."""


class Metrics:
    """The metrics in one registry, and the sink that feeds them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        into = registry or REGISTRY
        self._answers = Counter("pingpong_answers", "Answers that ended.", ["node", "device"], registry=into)
        self._prefilled = Counter(
            "pingpong_prefill_tokens",
            "Tokens of prompts: prefilled by an edge before (static) or while (streamed) its upstream spoke, found in "
            "the prefix cache beyond that (cached), computed when the call came (computed).",
            ["kind", "node"],
            registry=into,
        )
        self._wasted = Counter(
            "pingpong_wasted_tokens",
            "Tokens prefilled for prompts that did not come.",
            ["node"],
            registry=into,
        )
        self._fallbacks = Counter(
            "pingpong_fallbacks", "Answers whose edge or engine failed on the way.", ["node"], registry=into
        )
        self._ttft = Histogram(
            "pingpong_ttft_seconds",
            "From the end of the upstream's answer (of a first node: from its own start) to the first token.",
            ["node"],
            buckets=TTFT_BUCKETS,
            registry=into,
        )
        self._open = Gauge("pingpong_open_sessions", "Runs of graphs that may still call the model.", registry=into)
        self._models: list[weakref.ref[ChatPingPong]] = []
        self._open.set_function(self._open_sessions)

    def watch(self, model: ChatPingPong) -> None:
        """Count what a model does from now on."""
        self._models.append(weakref.ref(model))
        model.trace.subscribe(self)

    def __call__(self, event: Event) -> None:
        """Count an event of the trace."""
        if event.name == "finish":
            self._count(event.node, event.device, event.data["certificate"])
        elif event.name == "edge.dropped":
            self._wasted.labels(event.node).inc(event.data["wasted"])

    def _count(self, node: str, device: str, certificate: Mapping[str, Any]) -> None:
        self._answers.labels(node, device).inc()
        for kind, tokens in kinds(certificate).items():
            self._prefilled.labels(kind, node).inc(tokens)
        self._wasted.labels(node).inc(certificate["wasted"])
        self._fallbacks.labels(node).inc(certificate["fallback"] is not None)
        self._ttft.labels(node).observe(certificate["ttft_ms"] / 1000)

    def _open_sessions(self) -> float:
        """Counted when asked for: sessions end without a word where a pool forgets them."""
        models = (model() for model in self._models)
        pools = {id(pool): pool for model in models if model is not None and (pool := model._pool_in_use)}
        return sum(pool.open_runs for pool in pools.values())


def kinds(certificate: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of a prompt by what became of them; together they are all of it."""
    static, streamed, all_of_it = (certificate[name] for name in ("static", "streamed", "prompt_tokens"))
    cached = max((certificate["cached"] or 0) - static - streamed, 0)
    return {
        "static": static,
        "streamed": streamed,
        "cached": cached,
        "computed": all_of_it - static - streamed - cached,
    }
