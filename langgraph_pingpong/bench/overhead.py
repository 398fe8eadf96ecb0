"""What streaming edges cost of the program's own time: engines that compute nothing, edges off and on, alternating.

    python -m langgraph_pingpong.bench.overhead --runs 20 --output docs/results/overhead

writes OUTPUT.jsonl, a line a run, and OUTPUT.md, a summary made from it. The engines compute nothing; they pause before
their first token, with edges off and on, so that plans are ready by then as they are behind a real prefill. What is
left is the program's own time: of a call (without the pause), of a streamed token, and of the processor. The graphs
have learned before the first run that counts. One token is one byte.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import platform
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from typing_extensions import TypedDict

from langgraph_pingpong.bench.common import MODES, alternate, machine, table, versions, write_lines
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.engines.fake_engine import FakeEngine, fake_tokenizer, pseudo_words
from langgraph_pingpong.pool import EnginePool

PAUSE_S = 0.1, 5e-6
"""Before the first token of an answer, in seconds: at least, and for each token of the prompt."""

LEARNING_RUNS = 3
MESSAGE_TOKENS = 60
CONTEXT = 1_000_000

ANSWERS = (16, 256, 1_024)

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A chain of nodes: tokens of each prompt besides the answer before it, tokens of each answer.

    With `messages` the state is a list that begins with that many, and every prompt holds all of it.
    """

    nodes: int
    prompt: int
    answer: int
    messages: int = 0

    @property
    def pause_s(self) -> float:
        """How long an engine pauses before it answers."""
        return PAUSE_S[0] + PAUSE_S[1] * (self.prompt + self.messages * MESSAGE_TOKENS)


CASES = [
    *(Case(nodes, prompt, answer) for nodes in (2, 5) for prompt in (100, 2_000, 16_000) for answer in ANSWERS),
    *(Case(2, 100, 256, messages) for messages in (10, 100, 1_000)),
]


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
    answers: Iterator[list[Delta]] = field(default_factory=lambda: itertools.repeat([]))

    async def _compute(self, request: Request) -> int:
        return 0

    async def spend(self, seconds: float) -> None:
        """Take no time."""
        await asyncio.sleep(0)

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
    return IdleEngine(device, tokenizer, max_model_len=CONTEXT, pause_s=case.pause_s, answers=rest)


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
        "call_ms": (wall / case.nodes - case.pause_s) * 1000,
        "token_us": speaking_ms * 1000 / (case.nodes * (case.answer - 1)),
        "cpu_ms": cpu / case.nodes * 1000,
        "streamed": [each["streamed"] for each in finished[1:]],
        "wasted": [each["wasted"] for each in finished[1:]],
        "load": os.getloadavg()[0],
    }


def runs_of(case: Case, runs: int) -> Iterator[Line]:
    """Alternating runs of a case."""
    tokenizer = fake_tokenizer()
    engines = [idle_engine(device, tokenizer, case) for device in ("fake:0", "fake:1")]
    with EnginePool(engines) as pool:
        models = {mode: ChatPingPong(pool=pool).model_copy(update={"overlap": mode}) for mode in MODES}
        graphs = {mode: build(models[mode], case) for mode in MODES}
        for number in range(-LEARNING_RUNS, runs):
            for mode in alternate(number):
                line = {**asdict(case), "run": number, "overlap": mode, **measure(models[mode], graphs[mode], case)}
                for engine in engines:
                    engine.requests.clear()
                    engine.prefills.clear()
                if number >= 0:
                    yield line


FIGURES = {"call_ms": "ms a call", "token_us": "us a token", "cpu_ms": "ms of processor a call"}


def summary(lines: Sequence[Line]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, runs = lines[0]["setup"], lines[1:]
    loads = [run["load"] for run in runs]
    listed = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    parts = [
        "# Overhead of streaming edges",
        f"`{setup['command']}`",
        f"{setup['date']}; {setup['machine']}; load while measuring {min(loads):.1f} to {max(loads):.1f}, median "
        f"{median(loads):.1f}; Python {setup['python']}; {listed}.",
        "Engines that compute nothing, so that all of it is the program's own time: in real use most of it passes "
        f"while the engines work. Each engine pauses before its first token, {PAUSE_S[0]} s and {PAUSE_S[1] * 1e6:.0f} "
        "us for each token of the prompt, which is not counted. Median and 95th "
        f"percentile of {setup['runs']} runs with edges off and as many with edges on, alternating; the overhead is "
        "the difference of the medians. In a chain all calls but the last lead to an edge, and all are counted: of two "
        "calls one bears the whole overhead. One token is one byte. Where the load is above 1, other programs used the "
        "cores too.",
    ]
    for figure, title in FIGURES.items():
        parts += [f"## {title.capitalize()}", _figure_table(runs, figure)]
    streamed = sum(sum(run["streamed"]) for run in runs if run["overlap"] == "on")
    wasted = sum(sum(run["wasted"]) for run in runs)
    parts.append(f"With edges on {streamed:,} tokens of answers were streamed into prompts, and {wasted:,} wasted.")
    return "\n\n".join(parts) + "\n"


def _figure_table(runs: Sequence[Line], figure: str) -> str:
    head = ["nodes", "prompt", "messages", "answer", "off", "off p95", "on", "on p95", "overhead", "on / off"]
    cases = dict.fromkeys((run["nodes"], run["prompt"], run["messages"], run["answer"]) for run in runs)
    rows = []
    for case in cases:
        of_case = [run for run in runs if (run["nodes"], run["prompt"], run["messages"], run["answer"]) == case]
        off, on = ([run[figure] for run in of_case if run["overlap"] == mode] for mode in MODES)
        figures = (median(off), _p95(off), median(on), _p95(on), median(on) - median(off))
        ratio = f"{median(on) / median(off):.2f}"
        rows.append([*(f"{n:,}" for n in case), *(f"{value:.2f}" for value in figures), ratio])
    return table(head, rows)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]


def main(
    output: Annotated[Path, typer.Option(help="where to write, without an ending")],
    runs: Annotated[int, typer.Option(min=1, help="compared runs of each case: one with edges off, one on")] = 20,
    only: Annotated[int | None, typer.Option(min=1, help="how many of the cases, from the first")] = None,
) -> None:
    """Measure what streaming edges cost, and write down every run."""
    output.parent.mkdir(parents=True, exist_ok=True)
    setup = {
        "command": f"python -m langgraph_pingpong.bench.overhead --runs {runs} --output {output}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "runs": runs,
    }
    lines: list[Line] = [{"setup": setup}]
    for case in track(CASES[:only], description="cases"):
        lines += runs_of(case, runs)
        write_lines(output.with_suffix(".jsonl"), lines)
    text = summary(lines)
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    Console().print(text)


if __name__ == "__main__":
    typer.run(main)
