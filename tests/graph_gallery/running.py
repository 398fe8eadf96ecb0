"""Runs a scenario round after round on one model, and keeps everything that a user or an observer could see."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import merge_configs
from langgraph.pregel import Pregel

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.session import _digest
from langgraph_pingpong.trace import Event
from tests.graph_gallery.plain import Plain, differences
from tests.graph_gallery.scene import Scenario, Scene

Overlap = Literal["on", "off"]
Prepare = Callable[[Pregel[Any, Any, Any, Any], Scenario], object]
"""Sets options on a scene's graph before its first round."""

MODES = ("values", "updates", "messages", "custom")
"""With 'debug' in sync streams; with its parts, 'tasks' and 'checkpoints', in async ones."""
DECODE_SPEED = 2_000.0
PREFILL_SPEED = 2_000_000.0
BLOCK_SIZE = 8
SLEEP_S = 0.004


@dataclass
class RoundRecord:
    """One round. `seen` is what the story ran or noted; the rest was counted beside it."""

    way: str
    seen: list[tuple[str, Any]] = field(default_factory=list)
    effects: Counter[str] = field(default_factory=Counter)
    callbacks: Counter[str] = field(default_factory=Counter)
    prompts: list[str] = field(default_factory=list)
    certificates: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Prompts that were prefilled for calls that never came: node, reason, wasted tokens."""
    failures: list[str] = field(default_factory=list)
    """What went wrong in planning and prefilling, unseen by the graph."""

    def compared(self, repeated: Collection[str]) -> dict[str, Any]:
        """What must not depend on edges."""
        effects = {name: count for name, count in self.effects.items() if name not in repeated}
        return {"seen": self.seen, "prompts": self.prompts, "effects": effects, "callbacks": dict(self.callbacks)}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of all calls."""
        return sum(each["prompt_tokens"] for each in self.certificates)

    @property
    def prefilled(self) -> int:
        """Tokens of real prompts that were prefilled before their turn."""
        return sum(each["static"] + each["streamed"] for each in self.certificates)

    @property
    def wasted(self) -> int:
        """Tokens that were prefilled and not part of a real prompt."""
        return sum(each["wasted"] for each in (*self.certificates, *self.dropped))


@dataclass
class RunRecord:
    """All rounds of a scenario on one model, and the drawing of its graph after them."""

    scenario: Scenario
    overlap: Overlap
    rounds: list[RoundRecord]
    drawing: str

    @property
    def certificates(self) -> list[dict[str, Any]]:
        """Those of every call, in the order in which the calls ended."""
        return [each for round_ in self.rounds for each in round_.certificates]

    def differences(self, other: RunRecord, repeated: Collection[str] = ()) -> list[str]:
        """Where this record and another one differ in something that must not depend on edges.

        Nodes named in `repeated` may run any number of times.
        """
        found = differences(self.drawing, other.drawing, "drawing")
        for number, (own, others) in enumerate(zip(self.rounds, other.rounds, strict=True)):
            found += differences(own.compared(repeated), others.compared(repeated), f"round {number} ({own.way})")
        return found


class Unhurried(FakeEngine):
    """Sleeps for several tokens at once, since an event loop never sleeps for less than a millisecond."""

    _owed_s = 0.0

    async def spend(self, seconds: float) -> None:
        self._owed_s += seconds
        if self._owed_s >= SLEEP_S:
            seconds, self._owed_s = self._owed_s, 0.0
            await super().spend(seconds)
        else:
            await asyncio.sleep(0)


def run(scenario: Scenario, overlap: Overlap, prepare: Prepare | None = None, **settings: Any) -> RunRecord:
    """Build a scenario on a model of its own, with edges on or off, and run it in every way, one after the other.

    Args:
        scenario: what to run.
        overlap: edges on or off.
        prepare: called with the scene's graph and the scenario before the first round.
        settings: of the model.
    """
    asked: list[str] = []
    events: list[Event] = []
    with _model(scenario, overlap, asked, settings) as model:
        model.trace.subscribe(events.append)
        scene = scenario.build(model)
        if prepare is not None:
            prepare(scene.graph, scenario)
        played = [_play(scenario, scene, number, way, asked, events) for number, way in enumerate(scene.ways)]
        scene.close()
        _end_runs(model)
        drawing = scene.graph.get_graph(xray=True).draw_mermaid()
    _hand_out(events, played)
    return RunRecord(scenario, overlap, [round_.record for round_ in played], drawing)


def model_for(scenario: Scenario, overlap: Overlap, asked: list[str], **settings: Any) -> ChatPingPong:
    """A model on two modelled engines that keeps the prompts it is asked, slow enough for edges to do their work."""

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return scenario.reply(prompt)

    speeds = {
        "decode_speed": DECODE_SPEED,
        "prefill_speed": PREFILL_SPEED,
        "block_size": BLOCK_SIZE,
        "time_scale": float(overlap == "on"),
    }
    engines = [Unhurried(f"fake:{n}", tokenizer=_tokenizer(), reply=reply, **speeds) for n in range(2)]  # type: ignore[arg-type]
    return ChatPingPong(pool=EnginePool(engines), overlap=overlap, **settings)


@contextmanager
def _model(
    scenario: Scenario, overlap: Overlap, asked: list[str], settings: Mapping[str, Any]
) -> Iterator[ChatPingPong]:
    model = model_for(scenario, overlap, asked, **settings)
    assert model.pool is not None
    with model.pool:
        yield model


@functools.cache
def _tokenizer() -> Any:
    return fake_tokenizer()


def _end_runs(model: ChatPingPong) -> None:
    """Give up what is still prefilled for calls that have not come, so that it is counted."""

    async def close_all() -> None:
        for session in pool.runs.values():
            session.close()

    pool = model.pool
    assert pool is not None
    pool.loop.run(close_all())


@dataclass
class Round:
    """A round while it is played: what a story is given."""

    scene: Scene
    way: str
    input: Any
    config: dict[str, Any]
    record: RoundRecord
    plain: Plain
    parallel: bool
    runs: set[str] = field(default_factory=set)
    """Names of the graph runs of this round, as the trace has them."""

    def run(
        self,
        input: Any,
        config: Mapping[str, Any] | None = None,
        *,
        graph: Any = None,
        raises: type[Exception] | None = None,
        **options: Any,
    ) -> Any:
        """Run a graph in the round's way; the result is kept, and returned. With `raises` it must be that error."""
        parts: list[Any] = []
        graph, config = graph or self.scene.graph, {**self.config, **(config or {})}
        try:
            result = RUN[self.way](graph, input, config, {**self.scene.options, **options}, parts)
            ended = True
        except Exception as error:
            if raises is None or not isinstance(error, raises):
                raise
            result, ended = error, False
        assert ended == (raises is None), f"the run did not end with {raises}"
        plain = [self.plain(part) for part in parts]
        if self.parallel:
            plain.sort(key=repr)
        self.record.seen += [(f"{self.way} part", part) for part in plain]
        self.note("result", result)
        if getattr(graph, "checkpointer", None) and config.get("configurable", {}).get("thread_id"):
            self.note("history", list(graph.get_state_history(config)))
        return result

    def note(self, name: str, value: Any) -> None:
        """Keep something else to compare."""
        self.record.seen.append((name, self.plain(value)))


def _play(scenario: Scenario, scene: Scene, number: int, way: str, asked: list[str], events: list[Event]) -> Round:
    del asked[:], scene.effects[:]
    counter, before = CallbackCounter(), len(events)
    own = {"configurable": {"thread_id": f"thread {number}"}, "callbacks": [counter]}
    config = merge_configs(scene.config, own)  # type: ignore[arg-type]
    plain, given = Plain(ordered=not scenario.parallel), scene.inputs[number % len(scene.inputs)]
    round_ = Round(scene, way, given, config, RoundRecord(way), plain, scenario.parallel)
    (scene.story)(round_)
    round_.record.effects.update(scene.effects)
    round_.record.callbacks.update(counter.seen)
    started = [event for event in events[before:] if event.name == "generate.started"]
    prompts = _answered(asked, started)
    round_.record.prompts = sorted(prompts) if scenario.parallel else prompts
    round_.runs = {event.run for event in started}
    return round_


def _answered(asked: Sequence[str], started: Sequence[Event]) -> list[str]:
    """The prompts of calls, in order; an engine is also asked for answers that are begun ahead, and dropped."""
    texts = {_digest(_tokenizer().encode(text, add_special_tokens=False)): text for text in asked}
    return [texts.get(event.data["prompt_sha256"], "no answer was begun") for event in started]


def _hand_out(events: list[Event], played: list[Round]) -> None:
    """Sort what the trace says of each run into the round that it belongs to."""
    for event in events:
        record = next((round_.record for round_ in played if event.run in round_.runs), None)
        if record is None:
            continue
        if event.name == "finish":
            record.certificates.append(event.data["certificate"])
        elif event.name == "edge.dropped":
            record.dropped.append({"node": event.node, **event.data})
        elif event.name in ("plan.failed", "append.failed"):
            record.failures.append(f"{event.name} {event.node}: {event.data['error']}")


class CallbackCounter(BaseCallbackHandler):
    """Counts every run that LangChain reports, by kind and name."""

    run_inline = True

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_chain_start(self, serialized: Any, inputs: Any, **more: Any) -> None:
        self.seen.append(f"chain start {more.get('name')}")

    def on_chain_end(self, outputs: Any, **more: Any) -> None:
        self.seen.append("chain end")

    def on_chain_error(self, error: BaseException, **more: Any) -> None:
        self.seen.append(f"chain error {type(error).__name__}")

    def on_chat_model_start(self, serialized: Any, messages: Any, **more: Any) -> None:
        self.seen.append(f"model start {more.get('name')}")

    def on_llm_new_token(self, token: str, **more: Any) -> None:
        self.seen.append("token")

    def on_llm_end(self, response: Any, **more: Any) -> None:
        self.seen.append("model end")

    def on_llm_error(self, error: BaseException, **more: Any) -> None:
        self.seen.append(f"model error {type(error).__name__}")

    def on_tool_start(self, serialized: Any, input_str: str, **more: Any) -> None:
        self.seen.append(f"tool start {more.get('name')}")

    def on_tool_end(self, output: Any, **more: Any) -> None:
        self.seen.append("tool end")


def _invoke(graph: Any, input: Any, config: Any, options: Any, parts: list[Any]) -> Any:
    return graph.invoke(input, config, **options)


def _ainvoke(graph: Any, input: Any, config: Any, options: Any, parts: list[Any]) -> Any:
    return asyncio.run(graph.ainvoke(input, config, **options))


def _stream(graph: Any, input: Any, config: Any, options: Any, parts: list[Any]) -> Any:
    for part in graph.stream(input, config, stream_mode=[*MODES, "debug"], subgraphs=True, **options):
        parts.append(part)
    return _last_values(parts)


def _astream(graph: Any, input: Any, config: Any, options: Any, parts: list[Any]) -> Any:
    modes = [*MODES, "tasks", *(["checkpoints"] if getattr(graph, "checkpointer", None) else [])]

    async def drain() -> None:
        async for part in graph.astream(input, config, stream_mode=modes, subgraphs=True, **options):
            parts.append(part)

    asyncio.run(drain())
    return _last_values(parts)


def _last_values(parts: list[Any]) -> Any:
    return next((value for namespace, mode, value in reversed(parts) if mode == "values" and not namespace), None)


def _events(graph: Any, input: Any, config: Any, options: Any, parts: list[Any]) -> Any:
    async def drain() -> None:
        async for event in graph.astream_events(input, config, version="v2", **options):
            node = event["metadata"].get("langgraph_node")
            parts.append((event["event"], event["name"], node, sorted(event["tags"]), event["data"]))

    asyncio.run(drain())
    parts.sort(key=lambda part: (part[1], str(part[2])))  # nodes in threads race with the graph that reports them
    ends = [data for kind, _, node, _, data in parts if kind == "on_chain_end" and node is None]
    return ends[-1].get("output") if ends else None


def _events3(graph: Any, input: Any, config: Any, options: Any, parts: list[Any]) -> Any:
    run = graph.stream_events(input, config, version="v3", **options)
    parts.extend(run)
    return run.output


def _aevents3(graph: Any, input: Any, config: Any, options: Any, parts: list[Any]) -> Any:
    async def drain() -> Any:
        run = await graph.astream_events(input, config, version="v3", **options)
        async for part in run:
            parts.append(part)
        return await run.output()

    return asyncio.run(drain())


RUN = {
    "invoke": _invoke,
    "ainvoke": _ainvoke,
    "stream": _stream,
    "astream": _astream,
    "events": _events,
    "events3": _events3,
    "aevents3": _aevents3,
}
