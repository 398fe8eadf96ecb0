"""A sink of the trace that makes OpenTelemetry spans, by the semantic conventions for generative AI.

chat MODEL              a call, below the span in which the program made it
├── finalize            from the call to its first token, where an edge had prefilled its prompt;
│                       where none had, this one is called prefill
├── decode              from the first token to the last
└── prefill             what an edge prefilled of the next call's prompt; that call's span links to it
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.trace import Event

MAX_KEPT = 4096
"""How many calls and edges are remembered at most: some never end, if their program does not let them."""

_COUNTS = ("static", "streamed", "wasted")
_FIGURES = (*_COUNTS, "upstream", "source", "appends", "ready", "ttft_ms", "total_ms", "ids_equal")
"""What a certificate tells that a span tells, too. Why a fallback happened is not: it may quote anything."""

_CLOSED_BY_CALLER = ("GeneratorExit", "CancelledError")


class _Recent(OrderedDict[Hashable, Any]):
    """Forgets the oldest of too many."""

    def __setitem__(self, key: Hashable, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_KEPT:
            self.popitem(last=False)


@dataclass
class _Call:
    """The spans of one call that are open: its own, and that of what it does now."""

    span: Span
    phase: Span

    def end(self, at: int) -> None:
        """The call is over (ns)."""
        self.phase.end(at)
        self.span.end(at)


@dataclass(frozen=True, slots=True)
class _Moment:
    """An event of a model at a time (ns, of the wall clock), and how to start a span then."""

    event: Event
    at: int
    tracer: Tracer
    model: str
    kind: SpanKind

    @property
    def request(self) -> str:
        """The call that it concerns."""
        return str(self.event.data["request"])

    @property
    def edge(self) -> tuple[str, str]:
        """The edge that it concerns."""
        return self.event.run, self.event.data["edge"]

    def start(self, name: str, parent: Context, links: Sequence[Link] = ()) -> Span:
        """Start a span of one operation."""
        attributes = {
            "gen_ai.operation.name": name,
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": self.model,
            "pingpong.device": self.event.device,
        }
        if self.event.node:
            attributes["gen_ai.agent.name"] = self.event.node
        shown = f"{name} {self.model}" if name == "chat" else name
        return self.tracer.start_span(shown, parent, self.kind, attributes, links, start_time=self.at)


class Spans:
    """Makes the spans of models' calls. An edge may lead from a call of one model to a call of another."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("langgraph_pingpong", version("langgraph-pingpong"), tracer_provider)
        self._clock = time.time_ns() - time.monotonic_ns()  # the trace's times are monotonic
        self._lock = threading.Lock()
        self._callers = _Recent()  # by request: the context in which the program made the call
        self._claimed = _Recent()  # by request: the span of the edge that it claimed
        self._calls = _Recent()  # by request: those that are open
        self._parents = _Recent()  # by request: a context below its span, also when that has ended
        self._edges = _Recent()  # by run and edge: spans that are open

    def watch(self, model: ChatPingPong) -> None:
        """Make spans of what a model does from now on."""
        name, kind = model.model_name, SpanKind.CLIENT if model.base_urls else SpanKind.INTERNAL
        model.trace.on_call(self._called)
        model.trace.subscribe(lambda event: self._take(event, name, kind))

    def _take(self, event: Event, model: str, kind: SpanKind) -> None:
        """Make of an event what it means for spans; some mean nothing."""
        if handle := _HANDLERS.get(event.name):
            with self._lock:
                handle(self, _Moment(event, self._clock + int(event.t * 1e9), self._tracer, model, kind))

    def _below(self, request: str) -> Context:
        return self._parents.get(request) or Context()

    # -- calls ---------------------------------------------------------------------------------------------

    def _called(self, request: str) -> None:
        """What the program is doing where it makes a call is known only here."""
        with self._lock:
            self._callers[request] = context.get_current()

    def _generate(self, moment: _Moment) -> None:
        edge = self._claimed.pop(moment.request, None)
        links = [Link(edge)] if edge else []
        span = moment.start("chat", self._callers.pop(moment.request, Context()), links)
        self._parents[moment.request] = below = trace.set_span_in_context(span, Context())
        self._calls[moment.request] = _Call(span, moment.start("finalize" if edge else "prefill", below))

    def _first_token(self, moment: _Moment) -> None:
        if call := self._calls.get(moment.request):
            call.phase.end(moment.at)
            call.phase = moment.start("decode", self._below(moment.request))

    def _failover(self, moment: _Moment) -> None:
        if call := self._calls.get(moment.request):
            call.span.add_event("failover", {"pingpong.device": moment.event.device}, moment.at)

    def _finish(self, moment: _Moment) -> None:
        if call := self._calls.pop(moment.request, None):
            call.span.set_attributes(_attributes(moment.event.data["certificate"]))
            call.end(moment.at)

    def _failed(self, moment: _Moment) -> None:
        if call := self._calls.pop(moment.request, None):
            error = moment.event.data["error"]
            call.span.set_attribute("error.type", error)
            if error not in _CLOSED_BY_CALLER:
                call.span.set_status(Status(StatusCode.ERROR))
            call.end(moment.at)

    # -- edges ---------------------------------------------------------------------------------------------

    def _append(self, moment: _Moment) -> None:
        """The first append starts a span. The others are in the trace: a long answer has hundreds."""
        if moment.edge not in self._edges:
            self._edges[moment.edge] = moment.start("prefill", self._below(moment.event.data["opened_by"]))

    def _append_failed(self, moment: _Moment) -> None:
        if span := self._edges.get(moment.edge):
            span.add_event("append.failed", {"pingpong.tokens": moment.event.data["tokens"]}, moment.at)

    def _claim(self, moment: _Moment) -> None:
        if span := self._edges.pop(moment.edge, None):
            data = moment.event.data
            span.set_attributes({f"pingpong.{name}": data[name] for name in _COUNTS})
            span.end(moment.at)
            self._claimed[moment.request] = span.get_span_context()

    def _dropped(self, moment: _Moment) -> None:
        if span := self._edges.pop(moment.edge, None):
            data = moment.event.data
            span.set_attributes({"pingpong.dropped": data["reason"], "pingpong.wasted": data["wasted"]})
            span.end(moment.at)


def _attributes(certificate: Mapping[str, Any]) -> dict[str, Any]:
    told = {
        "gen_ai.usage.input_tokens": certificate["prompt_tokens"],
        "gen_ai.usage.output_tokens": certificate["output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": certificate["cached"],
        "pingpong.device": certificate["device"],
        "pingpong.fallback": certificate["fallback"] is not None,
        **{f"pingpong.{name}": certificate[name] for name in _FIGURES},
    }
    return {name: value for name, value in told.items() if value is not None}


_HANDLERS: dict[str, Callable[[Spans, _Moment], None]] = {
    "generate.started": Spans._generate,
    "first_token": Spans._first_token,
    "failover": Spans._failover,
    "finish": Spans._finish,
    "generate.failed": Spans._failed,
    "append.started": Spans._append,
    "append.failed": Spans._append_failed,
    "finalize": Spans._claim,
    "edge.dropped": Spans._dropped,
}
