"""Runs the plan of a benchmark: round by round, every mode in turn, each run from a known cache."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from langgraph_pingpong.bench.checks import check_run
from langgraph_pingpong.bench.engine_sets import EngineSet, EngineSets
from langgraph_pingpong.bench.lines import Line, ResultsFile, RunKey
from langgraph_pingpong.bench.machine import state
from langgraph_pingpong.bench.modes import Mode, Order, in_order
from langgraph_pingpong.bench.profiles import Bench, Chain, Params, Profile, Work
from langgraph_pingpong.bench.recording import EngineAnswer, is_idle, ms_between
from langgraph_pingpong.bench.texts import Library
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.errors import RunFailed
from langgraph_pingpong.trace import Event

IDLE_WITHIN_S = 10.0
"""How long the engines may take to end what nobody waits for, after a run, in seconds."""

SETTLE_S = 0.05
"""An abort may still be on its way to an engine's process, where it keeps blocks from being forgotten: so they are
forgotten twice, with this pause between, in seconds."""


@dataclass(frozen=True, slots=True)
class Step:
    """One run to do."""

    mode: Mode
    case: Params
    chains: int
    run: int
    warmup: bool

    @property
    def key(self) -> RunKey:
        """What its line will be found by."""
        return RunKey(self.mode.name, tuple(self.case.items()), self.chains, self.run)


@dataclass(frozen=True)
class Plan:
    """What is to be measured. `chains` are the numbers of chains at once, for the modes that take several."""

    profile: Profile
    cases: Sequence[Params]
    modes: Sequence[Mode]
    chains: Sequence[int] = (1,)
    runs: int = 10
    warmup_runs: int = 1
    order: Order = "alternate"
    seed: int = 42
    force_tokens: bool = True
    strict_tokens: bool = True
    defer: bool = True
    lazy: bool = True
    """Whether static prefixes wait for their upstream; else all are prefilled from the run's start on."""

    def steps(self, done: set[RunKey]) -> Iterator[Step]:
        """The runs that are left, in order; warm-ups come before the first run of their kind."""
        for case in self.cases:
            left = [step for step in self._rounds(case) if step.key not in done]
            kinds = {(step.mode.name, step.chains) for step in left}
            for number in range(self.warmup_runs):
                for mode, chains in in_order(self._kinds(), number, self.order):
                    if (mode.name, chains) in kinds:
                        yield Step(mode, case, chains, number, warmup=True)
            yield from left

    def _rounds(self, case: Params) -> Iterator[Step]:
        for run in range(self.runs):
            for mode, chains in in_order(self._kinds(), run, self.order):
                yield Step(mode, case, chains, run, warmup=False)

    def _kinds(self) -> list[tuple[Mode, int]]:
        return [(mode, chains) for mode in self.modes for chains in (self.chains if mode.many else (1,))]


@dataclass
class Runner:
    """Runs steps on engines that are up, and writes their lines."""

    plan: Plan
    sets: EngineSets
    file: ResultsFile
    devices: Sequence[str]
    _case: Params | None = None
    _works: dict[tuple[str, int], Work] = field(default_factory=dict)
    _planners: dict[str, Any] = field(default_factory=dict)
    _library: Library | None = None

    def run(self, step: Step, session: int) -> Line:
        """Do one run and write it down.

        Raises:
            RunFailed: it is not complete, or its counts contradict each other. Nothing is written then.
        """
        engines, work = self.sets.of(step.mode), self._work(step)
        self._prepare(engines, step.mode, work)
        line = self._measure(engines, step, work)
        line |= {"session": session, "machine": state(self.devices)}
        strict = self.plan.strict_tokens and self.plan.force_tokens
        check_run(line, work, strict_tokens=strict, cold=step.mode.cache == "reset" and self.plan.lazy)
        self.file.add(line)
        return line

    def _work(self, step: Step) -> Work:
        if step.case != self._case:  # graphs of a case that is over are not needed any more
            self._case = step.case
            self._works.clear()
        kind = step.mode.name, step.chains
        if kind not in self._works:
            self._works[kind] = self.plan.profile.make(self._bench(step))
        return self._works[kind]

    def _bench(self, step: Step) -> Bench:
        plan, model = self.plan, self.sets.of(step.mode).model
        if self._library is None:
            self._library = Library(lambda text: len(model.get_token_ids(text)), plan.seed)
        switched = model.model_copy(update={**step.mode.settings, "defer_downstream": plan.defer})
        return Bench(switched, step.case, self._library, plan.seed, step.chains, plan.force_tokens)

    # -- before a run --------------------------------------------------------------------------------------

    def _prepare(self, engines: EngineSet, mode: Mode, work: Work) -> None:
        _wait_until_idle(engines)
        engines.use(mode.place)
        engines.pool.planner = self._planners.get(mode.name)  # modes do not learn from each other
        engines.recorder.uncached = mode.cache == "never"
        engines.pool.reset_prefix_cache()
        time.sleep(SETTLE_S)
        engines.pool.reset_prefix_cache()
        if mode.cache == "prewarmed":
            first_token = engines.model.model_copy(update={"overlap": "off"}).bind(max_tokens=1)
            for prefix in work.prefixes:
                first_token.invoke(list(prefix))
        engines.recorder.take()
        gc.collect()

    def _prefill_all(self, engines: EngineSet, work: Work) -> None:
        """Begin with every static prefix at once, on the device that its agent will have."""
        pool, model = engines.pool, engines.model
        for number, prefix in enumerate(work.prefixes):
            ids = tuple(model.get_token_ids(model._render(list(prefix), {})))
            engine = pool.engines[number % len(pool.engines)]
            pool.loop.submit(engine.prefill(Request(ids)))

    # -- the run -------------------------------------------------------------------------------------------

    def _measure(self, engines: EngineSet, step: Step, work: Work) -> Line:
        events: list[Event] = []
        at = datetime.now(UTC).isoformat(timespec="seconds")
        with engines.model.trace.subscribed(events.append):
            start = time.monotonic()
            if step.mode.overlaps and not self.plan.lazy:
                self._prefill_all(engines, work)
            said = asyncio.run(_run_chains(work.chains, start))
            e2e_ms = ms_between(start, time.monotonic())
            _wait_until_idle(engines)
        self._planners[step.mode.name] = engines.pool.planner
        return {
            "mode": step.mode.name,
            "run": step.run,
            "warmup": step.warmup,
            "case": dict(step.case),
            "chains": step.chains,
            "at": at,
            "e2e_ms": e2e_ms,
            "chain_ms": [ms for _, ms in said],
            "texts": [texts for texts, _ in said],
            **_told(events, engines.recorder.take(), start),
            **({"turns": work.turns.take(start)} if work.turns else {}),
            "memory": engines.memory(),
        }


async def _run_chains(chains: Sequence[Chain], start: float) -> list[tuple[Mapping[str, str], float]]:
    """Run chains at once; the texts of each, and when it ended, in ms from the start."""

    async def one(chain: Chain) -> tuple[Mapping[str, str], float]:
        texts = await chain()
        return texts, ms_between(start, time.monotonic())

    return await asyncio.gather(*map(one, chains))


def _told(events: Sequence[Event], answers: Sequence[EngineAnswer], start: float) -> Line:
    """What the trace and the engines told, as plain data with times from the start on."""
    runs = list(dict.fromkeys(event.run for event in events))
    prompts: dict[tuple[str, str], str] = {}
    agents: list[Line] = []
    told = []
    for event in events:
        data = dict(event.data)
        if event.name == "generate.started":
            prompts[event.run, event.node] = data["prompt_sha256"]
        if event.name == "finish":
            sha256 = prompts[event.run, event.node]
            agents.append({**data.pop("certificate"), "graph_run": runs.index(event.run), "prompt_sha256": sha256})
            data["agent"] = len(agents) - 1
        told.append(
            {
                "t": ms_between(start, event.t),
                "name": event.name,
                "graph_run": runs.index(event.run),
                "node": event.node,
                "device": event.device,
                "data": data,
            }
        )
    return {"agents": agents, "events": told, "answers": [answer.line(start) for answer in answers]}


def _wait_until_idle(engines: EngineSet) -> None:
    """What was aborted at the end of a run takes a moment to end; a cache in use cannot be emptied."""
    until = time.monotonic() + IDLE_WITHIN_S
    while not all(is_idle(engine) for engine in engines.pool.engines):
        if time.monotonic() > until:
            raise RunFailed(f"The engines were not idle {IDLE_WITHIN_S:.0f} s after a run.")
        time.sleep(0.01)
