"""Where programs are watched: LangSmith's runs, OpenTelemetry's spans, Prometheus' metrics."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_core.tracers.langchain import LangChainTracer
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.errors import EngineDead, ExporterNotInstalled
from langgraph_pingpong.observe import export_metrics, export_spans
from langgraph_pingpong.observe.spans import MAX_KEPT, Spans
from tests.conftest import Lab, wait_until

TASK = {"task": "Describe a tide pool."}
NODES = ("writer", "critic")
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "invoke": lambda graph, given, config: graph.invoke(given, config),
    "ainvoke": lambda graph, given, config: asyncio.run(graph.ainvoke(given, config)),
    "stream messages": lambda graph, given, config: list(graph.stream(given, config, stream_mode="messages")),
}


class Heard(BaseCallbackHandler):
    """Keeps what callbacks are told at the end of a model's run."""

    def __init__(self) -> None:
        self.results: list[LLMResult] = []

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.results.append(response)


class TestRuns:
    @pytest.mark.parametrize("way", CALLS)
    @pytest.mark.parametrize("overlap", ["on", "off"])
    def test_a_run_has_its_certificate(self, lab: Lab, way: str, overlap: Any) -> None:
        model = lab.model(overlap=overlap)
        record, collector, heard = lab.record(model), RunCollectorCallbackHandler(), Heard()
        CALLS[way](lab.chain(model), TASK, {"callbacks": [collector, heard]})
        runs = chat_runs(collector)
        assert [run.extra["metadata"]["pingpong"] for run in runs] == [record.certificate(node) for node in NODES]
        told = [result.generations[0][0].message.response_metadata["pingpong"] for result in heard.results]  # type: ignore[union-attr]
        assert told == [record.certificate(node) for node in NODES]

    def test_a_call_outside_a_graph_too(self, lab: Lab) -> None:
        own = RunCollectorCallbackHandler()
        model = lab.model(callbacks=[own])
        given = RunCollectorCallbackHandler()
        list(model.stream("Hello", {"callbacks": [given]}))
        model.invoke("Hello")
        asyncio.run(model.ainvoke("Hello"))
        assert [run.extra["metadata"]["pingpong"]["ids_equal"] for run in own.traced_runs] == [True] * 3
        assert [run.extra["metadata"]["pingpong"]["ids_equal"] for run in given.traced_runs] == [True]

    def test_the_run_that_is_sent_to_langsmith(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[dict[str, Any]] = []
        tracer = LangChainTracer(client=Client(sent))  # type: ignore[arg-type]
        model = lab.model()
        monkeypatch.setattr("langchain_core.tracers.context._tracing_v2_is_enabled", lambda: False)
        lab.chain(model).invoke(TASK, {"callbacks": [tracer]})
        certificates = [run["extra"]["metadata"].get("pingpong") for run in sent if "generations" in run["outputs"]]
        assert [each["node"] for each in certificates] == list(NODES)

    def test_nothing_of_it_is_in_checkpoints_and_streams(self, lab: Lab) -> None:
        model = lab.model()
        graph = lab.chain(model, checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}, "callbacks": [RunCollectorCallbackHandler()]}
        messages = list(graph.stream(TASK, config, stream_mode="messages"))
        assert all("pingpong" not in metadata for _, metadata in messages)
        history = list(graph.get_state_history(config))
        assert len(history) > 2
        assert all("pingpong" not in json.dumps([s.metadata, s.config], default=str) for s in history)

    def test_the_id_a_caller_gives_a_run_stays(self, lab: Lab) -> None:
        id = "0198a3f0-0000-7000-8000-000000000001"
        collector = RunCollectorCallbackHandler()
        lab.model().invoke("Hello", {"run_id": id, "callbacks": [collector]})  # type: ignore[typeddict-item]
        assert [str(run.id) for run in collector.traced_runs] == [id]
        assert "pingpong" in collector.traced_runs[0].extra["metadata"]


class Client:
    """In the place of LangSmith's: keeps what is sent at the end of each run."""

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self._sent = sent
        self.tracing_queue = None

    def create_run(self, **_: Any) -> None:
        pass

    def update_run(self, **run: Any) -> None:
        if run.get("outputs"):
            self._sent.append(run)


def chat_runs(collector: RunCollectorCallbackHandler) -> list[Any]:
    runs = [child for run in collector.traced_runs for child in descendants(run)]
    return sorted((run for run in runs if run.run_type in ("llm", "chat_model")), key=lambda run: run.start_time)


def descendants(run: Any) -> list[Any]:
    return [run, *(below for child in run.child_runs for below in descendants(child))]


# -- spans -----------------------------------------------------------------------------------------------------


class Watch:
    """A tracer provider of its own, and the spans that ended."""

    def __init__(self, *models: ChatPingPong) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        export_spans(*models, tracer_provider=self.provider)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, operation: str, node: str | None = None) -> list[ReadableSpan]:
        return [span for span in self.spans if is_of(span, gen_ai.GEN_AI_OPERATION_NAME, operation)
                and (node is None or is_of(span, gen_ai.GEN_AI_AGENT_NAME, node))]  # fmt: skip

    def one(self, operation: str, node: str, below: ReadableSpan | None = None) -> ReadableSpan:
        found = [span for span in self.named(operation, node) if below is None or parent_of(span) == id_of(below)]
        assert len(found) == 1, [span.name for span in self.spans]
        return found[0]


def is_of(span: ReadableSpan, name: str, value: Any) -> bool:
    return (span.attributes or {}).get(name) == value


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


class TestSpans:
    @pytest.mark.parametrize("way", CALLS)
    def test_a_chain_below_the_span_of_its_program(self, lab: Lab, way: str) -> None:
        model = lab.model()
        record, watch = lab.record(model), Watch(model)
        tracer = trace.get_tracer("a program", tracer_provider=watch.provider)
        with tracer.start_as_current_span("request"):
            CALLS[way](lab.chain(model), TASK, {})
        (request,) = (span for span in watch.spans if span.name == "request")
        writer, critic = (watch.one("chat", node, below=request) for node in NODES)
        ahead = watch.one("prefill", "critic", below=writer)
        for span, phases in ((writer, ("prefill", "decode")), (critic, ("finalize", "decode"))):
            node = (span.attributes or {})[gen_ai.GEN_AI_AGENT_NAME]
            first, second = (watch.one(phase, str(node), below=span) for phase in phases)
            assert span.start_time == first.start_time < first.end_time == second.start_time  # type: ignore[operator]
            assert second.start_time < second.end_time == span.end_time  # type: ignore[operator]
        assert [id_of_link(link) for link in critic.links] == [id_of(ahead)]
        assert writer.start_time < ahead.start_time < writer.end_time <= ahead.end_time <= critic.start_time  # type: ignore[operator]
        assert record.certificate("critic")["appends"] > 1
        assert not ahead.events
        assert {span.context.trace_id for span in watch.spans if span.context} == {request.context.trace_id}  # type: ignore[union-attr]

    def test_they_say_what_the_conventions_ask_for(self, lab: Lab) -> None:
        model = lab.model()
        record, watch = lab.record(model), Watch(model)
        lab.chain(model).invoke(TASK)
        span, certificate = watch.one("chat", "critic"), record.certificate("critic")
        assert span.name == "chat default"
        assert span.kind == SpanKind.INTERNAL
        wanted = {
            gen_ai.GEN_AI_OPERATION_NAME: gen_ai.GenAiOperationNameValues.CHAT.value,
            gen_ai.GEN_AI_PROVIDER_NAME: "vllm",
            gen_ai.GEN_AI_REQUEST_MODEL: "default",
            gen_ai.GEN_AI_AGENT_NAME: "critic",
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: certificate["prompt_tokens"],
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: certificate["output_tokens"],
            gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: certificate["cached"],
            "pingpong.fallback": False,
        }
        own = {f"pingpong.{name}": value for name, value in certificate.items() if name in OWN}
        assert dict(span.attributes or {}) == {**wanted, **own}
        assert certificate["static"] + certificate["streamed"] > 100

    def test_an_edge_between_models(self, lab: Lab) -> None:
        model = lab.model()
        other = ChatPingPong(pool=model.pool, model="other")
        graph = lab.chain(model)
        graph.nodes["critic"].bound.model = other
        watch = Watch(model, other)
        graph.invoke(TASK)
        critic = watch.one("chat", "critic")
        assert critic.name == "chat other"
        assert [id_of_link(link) for link in critic.links] == [id_of(watch.one("prefill", "critic"))]

    def test_parallel_calls_of_one_node_are_told_apart(self, lab: Lab) -> None:
        model = lab.model()
        watch = Watch(model)
        model.batch(["One", "Two", "Three"])
        spans = watch.named("chat")
        assert len(spans) == 3
        for span in spans:
            below = [each for each in watch.spans if parent_of(each) == id_of(span)]
            assert sorted(each.name for each in below) == ["decode", "prefill"]

    def test_an_answer_that_failed_and_one_that_was_left(self, lab: Lab) -> None:
        dead = lab.engine(fail_generate=ValueError("the text of a prompt"))
        model = lab.model([dead])
        watch = Watch(model)
        with pytest.raises(ValueError, match="text of a prompt"):
            model.invoke("Hello")
        (failed,) = watch.named("chat")
        assert failed.status.status_code == StatusCode.ERROR
        assert is_of(failed, "error.type", "ValueError")
        dead.fail_generate = None
        stream = model.stream("Hello")
        next(stream)
        stream.close()
        wait_until(lambda: len(watch.named("chat")) == 2, 5.0, "second span")
        assert watch.named("chat")[1].status.status_code == StatusCode.UNSET
        assert "the text of a prompt" not in "".join(span.to_json() for span in watch.spans)

    def test_an_edge_that_failed(self, lab: Lab) -> None:
        model = lab.model([lab.engine("fake:0"), lab.engine("fake:1", fail_prefill=ValueError("s3cret"))])
        watch = Watch(model)
        lab.chain(model).invoke(TASK)
        (failed,) = watch.one("prefill", "critic", below=watch.one("chat", "writer")).events
        assert failed.name == "append.failed"
        assert is_of(watch.one("chat", "critic"), "pingpong.fallback", True)

    def test_a_dropped_edge_says_why(self, lab: Lab) -> None:
        model = lab.model(replies={"writer": "Once upon a time. " * 8})
        graph = lab.chain(model)
        watch, record = Watch(model), lab.record(model)
        stream = graph.stream(TASK, stream_mode="messages")
        while not record.named("append.complete", "critic"):
            next(stream)
        stream.close()
        wait_until(lambda: bool(watch.named("prefill", "critic")), 5.0, "span of the dropped edge")
        span, (dropped,) = watch.one("prefill", "critic"), record.named("edge.dropped", "critic")
        assert is_of(span, "pingpong.dropped", dropped.data["reason"])
        assert is_of(span, "pingpong.wasted", dropped.data["wasted"])

    def test_what_never_ends_is_forgotten(self, lab: Lab) -> None:
        spans = Spans(TracerProvider())
        model = lab.model()
        spans.watch(model)
        for number in range(MAX_KEPT + 10):
            model.trace.called(str(number))
            model.trace.emit("append.started", run=str(number), node="", device="", edge="", opened_by="")
        assert (len(spans._callers), len(spans._edges)) == (MAX_KEPT, MAX_KEPT)

    def test_after_a_run_nothing_is_kept_open(self, lab: Lab) -> None:
        spans = Spans(TracerProvider())
        model = lab.model()
        spans.watch(model)
        lab.chain(model).invoke(TASK)
        assert not (spans._callers or spans._calls or spans._edges or spans._claimed)


OWN = ("upstream", "source", "static", "streamed", "wasted", "appends", "ready", "ttft_ms", "total_ms", "ids_equal",
       "device")  # fmt: skip


def id_of_link(link: Any) -> int:
    return int(link.context.span_id)


# -- metrics ---------------------------------------------------------------------------------------------------


class TestMetrics:
    def test_they_are_the_sums_of_the_certificates(self, lab: Lab) -> None:
        model, registry = lab.model(), CollectorRegistry()
        record = lab.record(model)
        export_metrics(model, registry=registry)
        graph = lab.chain(model)
        for _ in range(2):
            graph.invoke(TASK)
        certificates = [event.data["certificate"] for event in record.named("finish", "critic")]
        tokens = {
            kind: registry.get_sample_value("pingpong_prefill_tokens_total", {"kind": kind, "node": "critic"})
            for kind in ("static", "streamed", "cached", "computed")
        }
        for kind in ("static", "streamed"):
            assert tokens[kind] == sum(each[kind] for each in certificates) > 0
        assert sum(value or 0 for value in tokens.values()) == sum(each["prompt_tokens"] for each in certificates)
        assert tokens["cached"] == sum(
            max(each["cached"] - each["static"] - each["streamed"], 0) for each in certificates
        )
        ttft = sum(each["ttft_ms"] for each in certificates) / 1000
        assert registry.get_sample_value("pingpong_ttft_seconds_sum", {"node": "critic"}) == pytest.approx(ttft)
        assert registry.get_sample_value("pingpong_ttft_seconds_count", {"node": "critic"}) == 2
        assert sum(sample(registry, "pingpong_answers_total", node="critic")) == 2
        assert sample(registry, "pingpong_fallbacks_total", node="critic") == [0]

    def test_fallbacks_and_what_was_wasted(self, lab: Lab) -> None:
        engines = [lab.engine("fake:0"), lab.engine("fake:1", fail_prefill=ValueError("no"))]
        model, registry = lab.model(engines), CollectorRegistry()
        export_metrics(model, registry=registry)
        lab.chain(model).invoke(TASK)
        assert sample(registry, "pingpong_fallbacks_total", node="critic") == [1]
        assert sample(registry, "pingpong_fallbacks_total", node="writer") == [0]

    def test_edges_that_were_dropped_are_wasted(self, lab: Lab) -> None:
        model, registry = lab.model(replies={"writer": "Once upon a time. " * 8}), CollectorRegistry()
        record = lab.record(model)
        export_metrics(model, registry=registry)
        stream = lab.chain(model).stream(TASK, stream_mode="messages")
        while not record.named("append.complete", "critic"):
            next(stream)
        stream.close()
        dropped = record.wait_for("edge.dropped", "critic").data["wasted"]
        assert sample(registry, "pingpong_wasted_tokens_total", node="critic") == [dropped]
        assert dropped > 0

    def test_open_sessions(self, lab: Lab) -> None:
        model, registry = lab.model(), CollectorRegistry()
        export_metrics(model, ChatPingPong(pool=model.pool), registry=registry)
        assert sample(registry, "pingpong_open_sessions") == [0]
        stream = lab.chain(model).stream(TASK, stream_mode="messages")
        next(stream)
        assert sample(registry, "pingpong_open_sessions") == [1]
        list(stream)
        del stream
        gc.collect()
        wait_until(lambda: sample(registry, "pingpong_open_sessions") == [0], 5.0, "end of the session")

    def test_no_session_is_open_on_engines_that_are_closed(self, lab: Lab) -> None:
        model, registry = lab.model(), CollectorRegistry()
        export_metrics(model, registry=registry)
        stream = lab.chain(model).stream(TASK, stream_mode="messages")
        next(stream)
        assert sample(registry, "pingpong_open_sessions") == [1]
        model.pool.close()
        assert sample(registry, "pingpong_open_sessions") == [0]
        with pytest.raises(EngineDead):
            list(stream)

    def test_models_share_a_registry(self, lab: Lab) -> None:
        model, registry = lab.model(), CollectorRegistry()
        other = ChatPingPong(pool=model.pool)
        export_metrics(model, other, registry=registry)
        model.invoke("Hello")
        other.invoke("Hello")
        assert sum(sample(registry, "pingpong_answers_total", node="")) == 2
        with pytest.raises(ValueError, match="Duplicated"):
            export_metrics(model, registry=registry)


def sample(registry: CollectorRegistry, name: str, **labels: str) -> list[float]:
    """The values of the samples of that name that have these labels."""
    samples = [each for metric in registry.collect() for each in metric.samples if each.name == name]
    return [each.value for each in samples if labels.items() <= each.labels.items()]


# -- both ------------------------------------------------------------------------------------------------------


class TestBoth:
    def test_they_hold_nothing_of_prompts_answers_tenants_and_errors(self, lab: Lab) -> None:
        engines = [lab.engine("fake:0", {"writer": "s3cret answer " * 4})]
        engines.append(lab.engine("fake:1", fail_prefill=ValueError("s3cret error")))
        model, registry = lab.model(engines, api_key="s3cret-key"), CollectorRegistry()
        watch = Watch(model)
        export_metrics(model, registry=registry)
        config: Any = {"configurable": {"tenant": "s3cret tenant", "thread_id": "s3cret thread"}}
        lab.chain(model).invoke({"task": "A s3cret task."}, config)
        dead = lab.model([lab.engine(fail_generate=EngineDead("s3cret"))])
        export_spans(dead, tracer_provider=watch.provider)
        with pytest.raises(EngineDead):
            dead.invoke("s3cret")
        exported = "".join(span.to_json() for span in watch.spans)
        assert len(watch.named("chat")) == 3
        assert "s3cret" not in exported
        assert "s3cret" not in generate_latest(registry).decode()

    def test_labels_are_few(self, lab: Lab) -> None:
        model, registry = lab.model(), CollectorRegistry()
        export_metrics(model, registry=registry)
        graph = lab.chain(model)

        def series() -> set[str]:
            lines = generate_latest(registry).decode().splitlines()
            return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

        for tenant in ("a", "b"):  # both devices were used, both nodes spoke
            graph.invoke(TASK, {"configurable": {"tenant": tenant}})
        before = series()
        for tenant in range(4):
            graph.invoke({"task": f"Task {tenant}"}, {"configurable": {"tenant": str(tenant)}})
        assert series() == before

    @pytest.mark.parametrize(
        ("export", "package", "module", "extra"),
        [
            (export_spans, "opentelemetry", "spans", r"\[otel\]"),
            (export_metrics, "prometheus_client", "metrics", r"\[prometheus\]"),
        ],
    )
    def test_a_missing_package_is_named(
        self, monkeypatch: pytest.MonkeyPatch, export: Any, package: str, module: str, extra: str
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"langgraph_pingpong.observe.{module}", raising=False)
        with pytest.raises(ExporterNotInstalled, match=f"(?s){package}.*{extra}"):
            export()
