"""KV goes from engine to engine where that pays, and never into a wrong answer; on modelled engines."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.engines.base import KvLost, Request
from langgraph_pingpong.engines.fake_engine import WRONG, FakeEngine
from langgraph_pingpong.errors import EngineDead, NixlNotInstalled, NotExact
from langgraph_pingpong.kv_handles import HandleRefused
from langgraph_pingpong.kv_transfer import AT_ONCE, KvTransfer
from tests.conftest import RULES, Lab, Recorder, wait_until
from tests.kv_costs import fixed_costs

TALK = "The tide comes in twice a day and goes out again. " * 40
IDS = tuple(range(1, 1025))


@pytest.fixture
def pair(lab: Lab) -> list[FakeEngine]:
    """Two engines that compute 10,000 tokens a second and read 100,000."""
    return [lab.engine(f"fake:{index}", prefill_speed=10_000.0, kv_transfer=True) for index in range(2)]


@pytest.fixture
def measured(lab: Lab, pair: list[FakeEngine]) -> ChatPingPong:
    """On these engines, which were tried at the start."""
    model = lab.model(pair)
    model.pool.start()  # type: ignore[union-attr]
    return model


@pytest.fixture
def model(measured: ChatPingPong) -> ChatPingPong:
    """The same, and no busy machine makes a pull look dear."""
    kv_of(measured).planner.costs = fixed_costs(1e-4, 1e-5)
    return measured


def kv_of(model: ChatPingPong) -> KvTransfer:
    assert model.pool is not None
    return model.pool.kv


def on(model: ChatPingPong, what: Any) -> Any:
    assert model.pool is not None
    return model.pool.loop.run(what)


async def answer(
    model: ChatPingPong, index: int, ids: tuple[int, ...] = IDS, salt: str | None = None
) -> tuple[Any, ...]:
    """The text of an answer on one engine, how much of the prompt was cached there, and how much was pulled."""
    assert model.pool is not None
    lease = model.pool._reserve(index)
    text, cached = "", None
    try:
        async for delta in lease.generate(Request(ids, cache_salt=salt)):
            text += delta.text
            cached = delta.num_cached_tokens if cached is None else cached
    finally:
        lease.release()
    return text, cached, lease.pulled


class TestAPrompt:
    def test_is_brought_from_the_engine_that_holds_it(self, model: ChatPingPong) -> None:
        record = Recorder(model)
        model.pool.health.traces.add(model.trace)  # type: ignore[union-attr]
        first = on(model, answer(model, 0))
        assert on(model, answer(model, 1)) == (first[0], 1008, 1008)
        (event,) = record.named("kv.pulled")
        assert (event.device, event.data["source"], event.data["tokens"]) == ("fake:1", "fake:0", 1008)
        assert kv_of(model).counts == {"pulled": 1}

    def test_is_brought_back(self, model: ChatPingPong) -> None:
        """Main to branch, and branch to main."""
        on(model, answer(model, 0))
        longer = (*IDS, *range(2000, 2500))
        assert on(model, answer(model, 1, longer))[1:] == (1024, 1024)
        assert on(model, answer(model, 0, longer))[1:] == (1520, 496)

    def test_is_computed_where_nobody_has_it(self, model: ChatPingPong) -> None:
        assert on(model, answer(model, 0))[1:] == (0, 0)
        assert on(model, answer(model, 1, IDS[::-1]))[1:] == (0, 0)

    def test_of_another_tenant_is_computed(self, model: ChatPingPong) -> None:
        on(model, answer(model, 0, salt="a"))
        assert on(model, answer(model, 1, salt="b"))[1:] == (0, 0)
        assert on(model, answer(model, 1, salt="a"))[1:] == (1008, 1008)

    def test_that_two_calls_need_is_read_once(self, model: ChatPingPong, pair: list[FakeEngine]) -> None:
        async def both() -> list[Any]:
            await answer(model, 0)
            return await asyncio.gather(*(answer(model, 1, (*IDS, branch)) for branch in range(8)))

        assert all(cached == 1024 for _, cached, _ in on(model, both()))
        assert len(pair[0].kv.exports) == 1 + 3  # type: ignore[union-attr]

    def test_goes_nowhere_with_transfer_off(self, lab: Lab) -> None:
        engines = [lab.engine(f"fake:{index}", prefill_speed=10_000.0) for index in range(2)]
        model = lab.model(engines)
        model.pool.start()  # type: ignore[union-attr]
        on(model, answer(model, 0))
        assert on(model, answer(model, 1))[1:] == (0, 0)

    @pytest.mark.parametrize("tells", [True, False])
    def test_is_looked_for_where_it_is_known_to_be(self, lab: Lab, pair: list[FakeEngine], tells: bool) -> None:
        """An engine that tells nothing is believed to hold what it computed."""
        for engine in pair:
            engine.kv.tells = tells  # type: ignore[union-attr]
        model = lab.model(pair)
        model.pool.start()  # type: ignore[union-attr]
        on(model, answer(model, 0))
        assert (kv_of(model).planner.seen[0] is not None) is tells
        pair[0].forget()
        text, cached, pulled = on(model, answer(model, 1))
        assert (cached, pulled) == ((0, 0) if tells else (1008, 1008))
        assert text == on(model, answer(model, 0))[0]


class TestTheStart:
    def test_measures_and_leaves_nothing_cached(self, measured: ChatPingPong, pair: list[FakeEngine]) -> None:
        costs = kv_of(measured).planner.costs
        prefill, pull = costs.prefill.seconds(1000), costs.pull.seconds(1000)
        assert prefill is not None and pull is not None
        assert 0.1 <= prefill + 0.01 < 1.0  # an engine never computes faster than it is modelled
        assert pull < prefill
        assert [engine._cache for engine in pair] == [set(), set()]

    def test_leaves_out_a_pair_that_does_not_work(self, lab: Lab, pair: list[FakeEngine], caplog: Any) -> None:
        pair[1].kv.fail_pull = KvLost("no way there")  # type: ignore[union-attr]
        model = lab.model(pair)
        model.pool.start()  # type: ignore[union-attr]
        assert "No KV goes from fake:0 to fake:1: lost (no way there)" in caplog.text
        for index in (0, 1, 0):
            on(model, answer(model, index, IDS if index else IDS[::-1]))
        assert kv_of(model)._sources == {0: [1], 1: []}
        assert on(model, answer(model, 0))[2] == 1008
        assert on(model, answer(model, 1, IDS[::-1]))[2] == 0

    def test_needs_more_than_one_engine(self, lab: Lab, pair: list[FakeEngine]) -> None:
        model = lab.model(pair[:1])
        model.pool.start()  # type: ignore[union-attr]
        assert pair[0].prefills == []


class TestWhatGoesWrong:
    """The answer is that of an engine that computed the prompt itself, and no later prompt finds what was wrong."""

    @pytest.fixture
    def right(self, model: ChatPingPong) -> str:
        """The answer, with the prompt held on the first engine."""
        return str(on(model, answer(model, 0))[0])

    def used_and_refused(self, model: ChatPingPong, handle: Any, ids: tuple[int, ...], why: str) -> None:
        with pytest.raises(HandleRefused, match=why):
            on(model, kv_of(model).read(1, Request(ids), handle))

    def test_used_twice(self, model: ChatPingPong, pair: list[FakeEngine], right: str) -> None:
        prefix = Request(IDS[:1008])
        handle = on(model, kv_of(model).lend(0, prefix))
        on(model, kv_of(model).read(1, prefix, handle))
        on(model, pair[1].reset_prefix_cache())
        self.used_and_refused(model, handle, IDS[:1008], "used twice")
        assert on(model, answer(model, 1))[0] == right

    def test_wrong_prompt(self, model: ChatPingPong, right: str) -> None:
        handle = on(model, kv_of(model).lend(0, Request(IDS[:1008])))
        other = (7, *IDS[1:])
        self.used_and_refused(model, handle, other[:1008], "wrong prompt")
        assert on(model, answer(model, 1, other)) == (on(model, answer(model, 0, other))[0], 0, 0)

    def test_wrong_source(self, model: ChatPingPong, right: str) -> None:
        handle = on(model, kv_of(model).lend(0, Request(IDS[:1008])))
        handle.source = 1
        self.used_and_refused(model, handle, IDS[:1008], "wrong source")
        assert on(model, answer(model, 1))[0] == right

    def test_expired(self, model: ChatPingPong, pair: list[FakeEngine], right: str) -> None:
        pair[0].kv.lease_s = 0.5  # type: ignore[union-attr]
        handle = on(model, kv_of(model).lend(0, Request(IDS[:1008])))
        self.used_and_refused(model, handle, IDS[:1008], "expired")
        assert on(model, answer(model, 1))[0] == right
        assert kv_of(model).counts == {"expired": 1}

    def test_of_an_earlier_life(self, model: ChatPingPong, right: str) -> None:
        handle = on(model, kv_of(model).lend(0, Request(IDS[:1008])))
        model.reset_prefix_cache()
        self.used_and_refused(model, handle, IDS[:1008], "source restarted")

    def test_blocks_that_were_used_again_are_noticed(
        self, model: ChatPingPong, pair: list[FakeEngine], right: str
    ) -> None:
        """Were the source to free them too early, what was read would be another prompt's."""
        source = pair[0].kv
        assert source is not None
        export = source.export

        async def forgotten(request: Request) -> Any:
            exported = await export(request)
            source._kept.clear()
            return exported

        source.export = forgotten  # type: ignore[method-assign]
        text, cached, pulled = on(model, answer(model, 1))
        assert (text, cached, pulled) == (right, 0, 0)
        assert kv_of(model).counts == {"other KV": 1}
        assert on(model, answer(model, 1))[0] == right != WRONG

    @pytest.mark.parametrize("error", [KvLost("lost"), EngineDead("died"), TimeoutError()])
    @pytest.mark.parametrize("side", ["fail_export", "fail_pull"])
    def test_a_transfer_that_fails(
        self, model: ChatPingPong, pair: list[FakeEngine], right: str, side: str, error: Exception
    ) -> None:
        engine = pair[0] if side == "fail_export" else pair[1]
        setattr(engine.kv, side, error)
        if side == "fail_pull" and isinstance(error, EngineDead):
            engine.die()  # then the answer comes from the other one
            wait_until(lambda: engine.dead, 1.0, "end")
            with pytest.raises(EngineDead):
                on(model, answer(model, 1))
        else:
            assert on(model, answer(model, 1))[0] == right
        assert sum(kv_of(model).counts.values()) == 1

    def test_a_transfer_that_hangs_is_given_up(self, model: ChatPingPong, pair: list[FakeEngine], right: str) -> None:
        pair[1].kv.gate = asyncio.Event()  # type: ignore[union-attr]
        text, cached, pulled = on(model, answer(model, 1))
        assert (text, cached, pulled) == (right, 0, 0)
        assert kv_of(model).counts == {"too slow": 1}
        assert [engine.budget.pulled for engine in pair] == [1008, 1008]

    def test_what_a_failed_one_held_is_free_when_the_source_lets_go(
        self, model: ChatPingPong, pair: list[FakeEngine], right: str
    ) -> None:
        pair[0].kv.lease_s = 0.05  # type: ignore[union-attr]
        assert on(model, answer(model, 1)) == (right, 0, 0)
        wait_until(lambda: [engine.budget.pulled for engine in pair] == [0, 0], 2.0, "room")

    def test_a_source_that_is_killed_in_mid_transfer(
        self, model: ChatPingPong, pair: list[FakeEngine], right: str
    ) -> None:
        pair[1].kv.gate = asyncio.Event()  # type: ignore[union-attr]

        asked = asyncio.run_coroutine_threadsafe(answer(model, 1), model.pool.loop._loop)
        wait_until(lambda: len(pair[1].kv.pulls) > 3, 2.0, "pull")  # type: ignore[union-attr]
        pair[0].die()
        assert asked.result(5) == (right, 0, 0)
        assert kv_of(model).counts == {"lost": 1}

    def test_an_abort_that_goes_out_too_late_leaves_nothing_to_be_found(
        self, model: ChatPingPong, pair: list[FakeEngine], right: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This process stood still: the source may have freed the blocks before the reader was told to stop."""
        handle = on(model, kv_of(model).lend(0, Request(IDS[:1008])))
        other = pair[1].kv
        assert other is not None
        pull = other.pull

        async def late(request: Request, export: Any) -> Any:
            other.engine.store(request)
            handle.expires = 0.0
            raise TimeoutError

        monkeypatch.setattr(other, "pull", late)
        with pytest.raises(TimeoutError):
            on(model, kv_of(model).read(1, Request(IDS[:1008]), handle))
        monkeypatch.setattr(other, "pull", pull)
        assert pair[1].cached_tokens(IDS) == 0
        assert on(model, answer(model, 1))[0] == right

    def test_many_at_once_take_turns(self, model: ChatPingPong, pair: list[FakeEngine]) -> None:
        """Else what is kept for the last of them would be gone before they come to it."""
        prompts = [(branch, *IDS) for branch in range(2000, 2000 + 3 * AT_ONCE)]
        most = 0
        export = pair[0].kv.export  # type: ignore[union-attr]

        async def counted(request: Request) -> Any:
            nonlocal most
            exported = await export(request)
            most = max(most, pair[0].kv.kept)  # type: ignore[union-attr]
            return exported

        async def all_of(index: int) -> list[Any]:
            return await asyncio.gather(*(answer(model, index, ids) for ids in prompts))

        first = on(model, all_of(0))
        pair[0].kv.export = counted  # type: ignore[union-attr, method-assign]
        second = on(model, all_of(1))
        assert [text for text, *_ in second] == [text for text, *_ in first]
        assert kv_of(model).counts["pulled"] == 3 * AT_ONCE
        assert 1 < most <= AT_ONCE

    def test_the_budget_bounds_what_is_pinned(self, model: ChatPingPong, pair: list[FakeEngine], right: str) -> None:
        pair[1].budget.capacity = 4000
        assert on(model, answer(model, 1)) == (right, 0, 0)
        pair[1].forget()
        pair[1].budget.capacity = 4096
        assert on(model, answer(model, 1))[1:] == (1008, 1008)
        assert [engine.budget.pulled for engine in pair] == [0, 0]

    def test_nothing_is_read_into_what_others_hold(
        self, model: ChatPingPong, pair: list[FakeEngine], right: str
    ) -> None:
        pair[1].budget.capacity, pair[1].budget.anchored = 10_000, 7_600
        assert on(model, answer(model, 1)) == (right, 0, 0)


class TestAGraph:
    def test_branches_get_what_they_share_and_main_what_they_said(self, lab: Lab, pair: list[FakeEngine]) -> None:
        """A fan-out over a long conversation: equal with and without, and nothing is computed twice."""

        class State(TypedDict, total=False):
            talk: str
            branch: int
            said: Annotated[list[str], operator.add]

        def run(engines: list[FakeEngine]) -> tuple[Any, Recorder]:
            model = lab.model(engines, overlap="off")
            record = lab.record(model)
            builder = StateGraph(State)

            def ask(state: State) -> dict[str, Any]:
                asked = f"{state['talk']} Branch {state.get('branch', 'none')}: canary-{state.get('branch', 0)}."
                return {"said": [f"{state.get('branch')}: {model.invoke(asked).text}"]}

            builder.add_node("main", ask)
            builder.add_node("branch", ask)
            builder.add_edge(START, "main")
            builder.add_conditional_edges(
                "main",
                lambda state: [Send("branch", {"talk": state["talk"], "branch": n}) for n in range(6)],
                ["branch"],
            )
            builder.add_edge("branch", END)
            return builder.compile().invoke({"talk": TALK}), record

        plain = [lab.engine(f"fake:{index}", prefill_speed=10_000.0) for index in range(2)]
        (off, alone), (on_, together) = run(plain), run(pair)
        assert on_ == off
        branches = [event.data["certificate"] for event in together.named("finish", "branch")]
        assert {each["device"] for each in branches} == {"fake:0", "fake:1"}
        assert sum(each["pulled"] for each in branches) > 1900
        assert all(each["cached"] > 1900 for each in branches)
        assert sum(each.data["certificate"]["pulled"] for each in alone.named("finish")) == 0

    def test_edges_are_brought_what_their_prompt_begins_with(self, lab: Lab, pair: list[FakeEngine]) -> None:
        for engine in pair:
            engine.reply = lambda prompt: "foam and moss " * 50
        model = lab.model(pair)
        record = lab.record(model)
        shared = (
            [("system", TALK[:800]), ("human", "{task}")],
            [("system", TALK[:800] + RULES * 12), ("human", "{writer}")],
        )
        prompts = map(ChatPromptTemplate.from_messages, shared)
        lab.chain(model, prompts=dict(zip(("writer", "critic"), prompts, strict=True))).invoke({"task": "Write."})
        assert record.named("kv.pulled")[0].device == "fake:1"
        certificate = record.certificate("critic")
        assert certificate["pulled"] == 800 and certificate["ids_equal"]
        assert certificate["static"] > 1900


class TestSettings:
    def test_contradict_bits(self) -> None:
        with pytest.raises(NotExact, match="kv_transfer=True contradicts exact='bits'"):
            EngineConfig("m", parse_devices(["cuda:0", "cuda:1"]), exact="bits", kv_transfer=True)

    def test_reach_modelled_engines(self) -> None:
        with ChatPingPong(devices=["fake:0", "fake:1"], kv_transfer=True) as model:
            assert [engine.kv is not None for engine in model._serving().pool.engines] == [True, True]
        with ChatPingPong(devices=["fake:0", "fake:1"]) as model:
            assert [engine.kv for engine in model._serving().pool.engines] == [None, None]

    def test_need_nixl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from langgraph_pingpong.engines import vllm_setup

        monkeypatch.setattr(vllm_setup.importlib.util, "find_spec", lambda name: None if name == "nixl" else object())
        with pytest.raises(NixlNotInstalled, match="pip install --no-deps nixl"):
            vllm_setup.check_machine(EngineConfig("m", parse_devices(["cpu:0"]), kv_transfer=True))
