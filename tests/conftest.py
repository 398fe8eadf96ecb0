"""Shared fixtures: graphs on modelled engines, a recorder of events, and a watch for what is left over."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: no test asks a model hub

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine, agent_node
from langgraph_pingpong.engines.fake_engine import fake_tokenizer, pseudo_words
from langgraph_pingpong.streaming_edge import StreamingEdge
from langgraph_pingpong.trace import Event

pytest_plugins = ("tests.engines_fixture",)

QUIET_WITHIN_S = 3.0
ASSISTANT = "<|im_start|>assistant\n"
RULES = "Answer in short sentences and leave nothing out. " * 2


class Recorder:
    """Keeps the events of a model, in order."""

    def __init__(self, model: ChatPingPong) -> None:
        self.events: list[Event] = []
        model.trace.subscribe(self.events.append)

    def named(self, name: str, node: str | None = None) -> list[Event]:
        return [event for event in list(self.events) if event.name == name and node in (None, event.node)]

    def first(self, name: str, node: str | None = None) -> int:
        """Where in the order the first such event stands."""
        return self.events.index(self.named(name, node)[0])

    def wait_for(self, name: str, node: str | None = None, within_s: float = 5.0) -> Event:
        wait_until(lambda: bool(self.named(name, node)), within_s, f"an event {name} of {node}")
        return self.named(name, node)[0]

    def certificate(self, node: str) -> dict[str, Any]:
        """That of the node's last answer."""
        return dict(self.named("finish", node)[-1].data["certificate"])


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {within_s} s")
        time.sleep(0.005)


@functools.cache
def byte_tokenizer() -> Any:
    return fake_tokenizer()


@dataclass
class Lab:
    """Builds models on modelled engines, and chains of declared nodes that use them."""

    engines: list[FakeEngine] = field(default_factory=list)
    """Those of the model made last."""

    def model(
        self,
        engines: int | Sequence[FakeEngine] = 2,
        replies: Mapping[str, str] | None = None,
        speed: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> ChatPingPong:
        """A model; `replies` maps a node to what it answers, `speed` holds settings of the engines."""
        if isinstance(engines, int):
            engines = [self.engine(f"fake:{index}", replies, **(speed or {})) for index in range(engines)]
        self.engines = list(engines)
        return ChatPingPong(pool=EnginePool(self.engines), **settings)

    def engine(
        self,
        device: str = "fake:0",
        replies: Mapping[str, str] | None = None,
        kind: type[FakeEngine] = FakeEngine,
        **settings: Any,
    ) -> FakeEngine:
        """An engine slow enough that a plan is ready long before an answer ends."""
        settings = {"time_scale": 1.0, "decode_speed": 1000.0, "prefill_speed": 500_000.0, **settings}
        settings.setdefault("tokenizer", byte_tokenizer())
        settings.setdefault("reply", reply_by_node(replies or {}))
        return kind(device, **settings)

    def prompt(self, node: str, reads: str) -> ChatPromptTemplate:
        return ChatPromptTemplate.from_messages(
            [("system", f"You are the {node}. {RULES}"), ("human", f"Text:\n{{{reads}}}\n\nGo on as the {node}.")]
        )

    def chain(
        self,
        model: Any,
        nodes: Sequence[str] = ("writer", "critic"),
        prompts: Mapping[str, Any] | None = None,
        writes: Mapping[str, Any] | None = None,
        node_type: Mapping[str, type] | None = None,
        add: Mapping[str, Mapping[str, Any]] | None = None,
        **compile_settings: Any,
    ) -> CompiledStateGraph[Any]:
        """Each node reads the answer before it (the first: `task`) and writes its own under its name.

        `prompts`, `writes` and `node_type` replace a node's own; `add` holds arguments of `add_node`.
        """
        builder = StateGraph(TypedDict("State", dict.fromkeys(("task", *nodes), str), total=False))
        for reads, node in zip(("task", *nodes), nodes, strict=False):
            prompt = (prompts or {}).get(node) or self.prompt(node, reads)
            declared = agent_node(model, prompt=prompt, writes=(writes or {}).get(node) or node)
            declared.__class__ = (node_type or {}).get(node, type(declared))
            builder.add_node(node, declared, **(add or {}).get(node, {}))
        for source, target in zip((START, *nodes), (*nodes, END), strict=True):
            builder.add_edge(source, target)
        return builder.compile(**compile_settings)

    def record(self, model: ChatPingPong) -> Recorder:
        return Recorder(model)

    def prefills(self) -> int:
        """How many prefills the engines were asked for."""
        return sum(len(engine.prefills) for engine in self.engines)

    def prompts(self, node: str) -> list[tuple[int, ...]]:
        """Token ids of the prompts that a node's answers were generated from."""
        asked = [request.prompt_token_ids for engine in self.engines for request in engine.requests]
        return [ids for ids in asked if f"You are the {node}." in self.engines[0].tokenizer.decode(list(ids))]


def reply_by_node(replies: Mapping[str, str]) -> Callable[[str], str]:
    """The answer given for the node whose prompt it is, or words that depend on the whole prompt."""

    def reply(prompt: str) -> str:
        for node, text in replies.items():
            if f"You are the {node}." in prompt:
                return text
        return pseudo_words(prompt)[:56]

    return reply


def going_on(text_of: Callable[[str], str] = lambda prompt: pseudo_words(prompt)[:56]) -> Callable[[str], str]:
    """A model that goes on where an answer that has begun stands at the end of its prompt."""

    def reply(prompt: str) -> str:
        asked, _, said = prompt.rpartition(ASSISTANT)
        whole = text_of(asked)
        assert whole.startswith(said)
        return whole[len(said) :]

    return reply


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test no engine holds a request, and no task is left on the loop of a pool."""
    engines, pools = _remember(monkeypatch, FakeEngine), _remember(monkeypatch, EnginePool)
    yield
    for pool in _alive(pools):
        if not pool.closed and all(isinstance(engine, FakeEngine) for engine in pool.engines):
            wait_until(lambda pool=pool: not tasks_on(pool), QUIET_WITHIN_S, f"quiet on {pool}")
            assert leases_on(pool) == 0, f"leases are held: {pool}"
            pool.close()
    assert [engine for engine in _alive(engines) if engine.num_unfinished] == []


def _alive(made: Sequence[weakref.ref[Any]]) -> list[Any]:
    return [each for reference in made if (each := reference()) is not None]


def _remember(monkeypatch: pytest.MonkeyPatch, kind: type) -> list[weakref.ref[Any]]:
    made: list[weakref.ref[Any]] = []
    original = kind.__init__

    def remembering(self: Any, *args: Any, **settings: Any) -> None:
        original(self, *args, **settings)
        made.append(weakref.ref(self))

    monkeypatch.setattr(kind, "__init__", remembering)
    return made


def leases_on(pool: EnginePool) -> int:
    """How many places are reserved, on all engines together."""
    return sum(pool._placement.leases)


def edges_on(pool: EnginePool) -> list[StreamingEdge]:
    """The edges of all runs that wait for their downstream call."""
    return [edge for run in pool.runs.values() for edge in run._edges.values()]


def tasks_on(pool: EnginePool) -> list[Any]:
    """What still runs on the pool's loop."""

    async def others() -> list[Any]:
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return pool.loop.run(others())
