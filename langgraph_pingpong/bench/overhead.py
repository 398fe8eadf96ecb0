"""What streaming edges cost of the program's own time: engines that compute nothing, edges off and on, alternating.

    python -m langgraph_pingpong.bench.overhead --runs 20 --output docs/results/overhead
    python -m langgraph_pingpong.bench.overhead --tracing --runs 15 --output docs/results/overhead-tracing
    python -m langgraph_pingpong.bench.overhead --tracing --token-ms 8.6 --only 2 --output docs/results/overhead-paced

writes OUTPUT.jsonl, a line a run, and OUTPUT.md, a summary made from it. The engines compute nothing; they pause before
their first token, with edges off and on, so that plans are ready by then as they are behind a real prefill. What is
left is the program's own time: of a call (without the pause), of a streamed token, and of the processor. The graphs
have learned before the first run that counts. One token is one byte. With `--tracing`, edges are on, and the trace is
heard by nobody, or written to a file, made into spans and counted in metrics, all at once. With `--token-ms` answers
take their time, so that shares of the end to end time are those of an engine as fast as that.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import platform
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from typing_extensions import TypedDict

from langgraph_pingpong.bench.common import MODES, Output, machine, table, versions, write_lines
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.engines.fake_engine import FakeEngine, fake_tokenizer, pseudo_words
from langgraph_pingpong.observe import export_metrics, export_spans
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.trace import JsonLines

PAUSE_S = 0.1, 5e-6
"""Before the first token of an answer, in seconds: at least, and for each token of the prompt."""

MODULE = "langgraph_pingpong.bench.overhead"

LEARNING_RUNS = 3
MESSAGE_TOKENS = 60
CONTEXT = 1_000_000

ANSWERS = (16, 256, 1_024)

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A chain of nodes: tokens of each prompt besides the answer before it, tokens of each answer.

    With `messages` the state is a list that begins with that many, and every prompt holds all of it. Each token of an
    answer takes `token_ms` milliseconds.
    """

    nodes: int
    prompt: int
    answer: int
    messages: int = 0
    token_ms: float = 0.0

    @property
    def pause_s(self) -> float:
        """How long an engine pauses before it answers."""
        return PAUSE_S[0] + PAUSE_S[1] * (self.prompt + self.messages * MESSAGE_TOKENS)


CASES = [
    *(Case(nodes, prompt, answer) for nodes in (2, 5) for prompt in (100, 2_000, 16_000) for answer in ANSWERS),
    *(Case(2, 100, 256, messages) for messages in (10, 100, 1_000)),
]


TRACED_CASES = [Case(nodes, 2_000, answer) for nodes in (2, 5) for answer in ANSWERS]

TRACING = ("on", "traced")


class Texts(TypedDict, total=False):
    """The state of a chain: a task, and what each node said."""

    task: str
    node0: str
    node1: str
    node2: str
    node3: str
    node4: str


@dataclass
class IdleEngine(FakeEngine):
    """Gives prepared answers in turn, each after a pause, and computes nothing."""

    pause_s: float = 0.0
    token_s: float = 0.0
    answers: Iterator[list[Delta]] = field(default_factory=lambda: itertools.repeat([]))

    async def _compute(self, request: Request) -> int:
        return 0

    async def spend(self, seconds: float) -> None:
        """Take the time of a token."""
        await asyncio.sleep(self.token_s)

    def _deltas(self, request: Request) -> list[Delta]:
        return next(self.answers)

    async def prefill(self, request: Request) -> int:
        """Count it."""
        self.prefills.append(request)
        await asyncio.sleep(0)
        return 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """Pause, then stream the answer."""
        await asyncio.sleep(self.pause_s)
        async for delta in super().generate(request):
            yield delta


def text_of(tokens: int, seed: str) -> str:
    """Words that depend on `seed`, one token a byte."""
    words = " ".join(pseudo_words(f"{seed} {number}") for number in range(tokens // 150 + 1))
    return words[:tokens]


def idle_engine(device: str, tokenizer: Any, case: Case) -> IdleEngine:
    """An engine for a case; none of its answers is given twice in one run."""
    texts = [text_of(case.answer, f"{device} {number}") for number in range(4)]
    answers = [
        [Delta(letter, (ord(letter),), "stop" if at == case.answer - 1 else None) for at, letter in enumerate(text)]
        for text in texts
    ]
    rest = itertools.cycle(answers)
    return IdleEngine(
        device, tokenizer, max_model_len=CONTEXT, pause_s=case.pause_s, token_s=case.token_ms / 1000, answers=rest
    )


def build(model: Any, case: Case) -> Any:
    """The graph of a case, of ordinary functions, so that its edges are learned ones."""
    from langgraph.graph import START, MessagesState, StateGraph

    def speak(state: Any, node: str, reads: str) -> Any:
        rules = f"{node}: {text_of(case.prompt, node)}"
        if case.messages:
            return {"messages": [model.invoke([("system", rules), *state["messages"]])]}
        return {node: model.invoke([("system", rules), ("user", state[reads])]).text}

    names = [f"node{number}" for number in range(case.nodes)]
    builder: Any = StateGraph(MessagesState if case.messages else Texts)
    for before, reads, node in zip((START, *names), ("task", *names), names, strict=False):
        builder.add_node(node, lambda state, node=node, reads=reads: speak(state, node, reads))
        builder.add_edge(before, node)
    return builder.compile()


def given(case: Case) -> Any:
    """The input of a run."""
    turns = [(("user", "ai")[turn % 2], text_of(MESSAGE_TOKENS, f"turn {turn}")) for turn in range(case.messages)]
    return {"messages": [*turns, ("user", "Go on.")]} if case.messages else {"task": "Describe a tide pool."}


def measure(model: ChatPingPong, graph: Any, case: Case) -> Line:
    """One run: milliseconds a call without its pause, microseconds a token, milliseconds of processor a call."""
    finished: list[dict[str, Any]] = []
    given_to_graph = given(case)
    gc.collect()
    with model.trace.subscribed(lambda e: finished.append(e.data["certificate"]) if e.name == "finish" else None):
        wall, cpu = time.perf_counter(), time.process_time()
        graph.invoke(given_to_graph)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    speaking_ms = sum(each["total_ms"] - each["ttft_ms"] for each in finished)
    return {
        "e2e_ms": wall * 1000,
        "call_ms": (wall / case.nodes - case.pause_s) * 1000,
        "token_us": speaking_ms * 1000 / (case.nodes * (case.answer - 1)),
        "cpu_ms": cpu / case.nodes * 1000,
        "streamed": [each["streamed"] for each in finished[1:]],
        "wasted": [each["wasted"] for each in finished[1:]],
        "load": os.getloadavg()[0],
    }


@contextmanager
def traced(model: ChatPingPong) -> Iterator[None]:
    """All there is to listen to a model: lines in a file, spans that are exported in batches, metrics."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    from prometheus_client import CollectorRegistry

    with TemporaryDirectory() as folder, open(os.devnull, "w", encoding="utf-8") as nowhere:
        lines, provider = JsonLines(Path(folder) / "trace.jsonl"), TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=nowhere)))
        model.trace.subscribe(lines)
        export_spans(model, tracer_provider=provider)
        export_metrics(model, registry=CollectorRegistry())
        yield
        provider.shutdown()
        lines.close()


def runs_of(case: Case, runs: int, modes: Sequence[str] = MODES) -> Iterator[Line]:
    """Alternating runs of a case."""
    tokenizer = fake_tokenizer()
    engines = [idle_engine(device, tokenizer, case) for device in ("fake:0", "fake:1")]
    with EnginePool(engines) as pool, ExitStack() as stack:
        models = {mode: ChatPingPong(pool=pool, overlap="off" if mode == "off" else "on") for mode in modes}
        if "traced" in modes:
            stack.enter_context(traced(models["traced"]))
        graphs = {mode: build(models[mode], case) for mode in modes}
        for number in range(-LEARNING_RUNS, runs):
            for mode in modes if number % 2 == 0 else modes[::-1]:  # so that a drift of the machine favours neither
                line = {**asdict(case), "run": number, "mode": mode, **measure(models[mode], graphs[mode], case)}
                for engine in engines:
                    engine.requests.clear()
                    engine.prefills.clear()
                if number >= 0:
                    yield line


FIGURES = {"call_ms": "ms a call", "token_us": "us a token", "cpu_ms": "ms of processor a call"}

ALL_FIGURES = {"e2e_ms": "ms end to end, pauses included", **FIGURES}

Run = Mapping[str, Any]


def mode_of(run: Run) -> str:
    """The mode of a run; in older files it is called overlap."""
    return str(run.get("mode") or run["overlap"])


def summary(lines: Sequence[Line]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, runs = lines[0]["setup"], lines[1:]
    return tracing_summary(setup, runs) if setup.get("tracing") else edges_summary(setup, runs)


_IN_NO_TIME = (
    ": the more the longer the answers, since engines that compute nothing say them in no time. What a traced token "
    "costs more is below; on a real engine, hold it against the time that a token takes there"
)


def tracing_summary(setup: Run, runs: Sequence[Line]) -> str:
    """What tracing costs, against the same with nobody listening."""
    both = compared(runs, "e2e_ms", TRACING).values()
    shares = [median(traced) / median(plain) - 1 for plain, traced in both]
    parts = [
        *_head("Overhead of tracing", setup, runs),
        "Edges on, in both columns. `on`: nobody listens to the trace. `traced`: every event goes to a file, as a line "
        "of JSON, and into OpenTelemetry spans, which the SDK's batch processor writes as JSON to nowhere, and into "
        f"Prometheus metrics. {_how(setup)}, alternating; the overhead is the difference of the medians.",
        f"Of the end to end time, which holds the pauses, tracing takes {min(shares):+.1%} to {max(shares):+.1%}"
        f"{'' if setup.get('token_ms') else _IN_NO_TIME}. Where the load is above 1, other programs used the cores "
        "too.",
    ]
    for figure, title in ALL_FIGURES.items():
        parts += [f"## {title.capitalize()}", _figure_table(runs, figure, TRACING)]
    return "\n\n".join(parts) + "\n"


def edges_summary(setup: Run, runs: Sequence[Line]) -> str:
    """What edges cost, against the same without."""
    parts = [
        *_head("Overhead of streaming edges", setup, runs),
        "Engines that compute nothing, so that all of it is the program's own time: in real use most of it passes "
        f"while the engines work. {_how(setup)} with edges off and as many with edges on, alternating; the overhead is "
        "the difference of the medians. In a chain all calls but the last lead to an edge, and all are counted: of two "
        "calls one bears the whole overhead. One token is one byte. Where the load is above 1, other programs used the "
        "cores too.",
    ]
    for figure, title in FIGURES.items():
        parts += [f"## {title.capitalize()}", _figure_table(runs, figure, MODES)]
    streamed = sum(sum(run["streamed"]) for run in runs if mode_of(run) == "on")
    wasted = sum(sum(run["wasted"]) for run in runs)
    parts.append(f"With edges on {streamed:,} tokens of answers were streamed into prompts, and {wasted:,} wasted.")
    return "\n\n".join(parts) + "\n"


def _head(title: str, setup: Run, runs: Sequence[Line]) -> list[str]:
    loads = [run["load"] for run in runs]
    listed = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    return [
        f"# {title}",
        f"`{setup['command']}`",
        f"{setup['date']}; {setup['machine']}; load while measuring {min(loads):.1f} to {max(loads):.1f}, median "
        f"{median(loads):.1f}; Python {setup['python']}; {listed}.",
    ]


def _how(setup: Run) -> str:
    paced = f"Each token of an answer takes {setup['token_ms']} ms. " if setup.get("token_ms") else ""
    return (
        f"{paced}Each engine pauses before its first token, {PAUSE_S[0]} s and {PAUSE_S[1] * 1e6:.0f} "
        "us for each token of the prompt, which is not counted. Median and 95th "
        f"percentile of {setup['runs']} runs"
    )


CaseKey = tuple[int, int, int, int]


def compared(runs: Sequence[Run], figure: str, modes: Sequence[str]) -> dict[CaseKey, list[list[float]]]:
    """The values of each mode for each case: its nodes, prompt, messages and answer."""
    values: dict[CaseKey, list[list[float]]] = {}
    for run in runs:
        case = (run["nodes"], run["prompt"], run["messages"], run["answer"])
        values.setdefault(case, [[] for _ in modes])[modes.index(mode_of(run))].append(run[figure])
    return values


def _figure_table(runs: Sequence[Run], figure: str, modes: Sequence[str]) -> str:
    base, other = modes
    head = ["nodes", "prompt", "messages", "answer", base, f"{base} p95", other, f"{other} p95", "overhead"]
    rows = []
    for case, (plain, more) in compared(runs, figure, modes).items():
        figures = (median(plain), _p95(plain), median(more), _p95(more), median(more) - median(plain))
        ratio = f"{median(more) / median(plain):.{3 if figure == 'e2e_ms' else 2}f}"
        rows.append([*(f"{n:,}" for n in case), *(f"{value:.2f}" for value in figures), ratio])
    return table([*head, f"{other} / {base}"], rows)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]


def main(
    output: Output,
    runs: Annotated[int, typer.Option(min=1, help="compared runs of each case: one with edges off, one on")] = 20,
    only: Annotated[int | None, typer.Option(min=1, help="how many of the cases, from the first")] = None,
    tracing: Annotated[bool, typer.Option("--tracing", help="measure what tracing costs, with edges on")] = False,
    token_ms: Annotated[float, typer.Option(min=0, help="how long the engines take for a token of an answer")] = 0.0,
) -> None:
    """Measure what streaming edges cost, or tracing them, and write down every run."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = (
        "--tracing " * tracing + (f"--token-ms {token_ms} " if token_ms else "") + (f"--only {only} " if only else "")
    )
    setup = {
        "command": f"python -m {MODULE} {options}--runs {runs} --output {output}",
        "tracing": tracing,
        "token_ms": token_ms,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "runs": runs,
    }
    lines: list[Line] = [{"setup": setup}]
    cases, modes = (TRACED_CASES, TRACING) if tracing else (CASES, MODES)
    for case in track(cases[:only], description="cases"):
        lines += runs_of(replace(case, token_ms=token_ms), runs, modes)
        write_lines(output.with_suffix(".jsonl"), lines)
    text = summary(lines)
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    Console().print(text)


if __name__ == "__main__":
    typer.run(main)
