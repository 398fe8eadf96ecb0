"""Beginnings of prompts that stay cached: who holds them, for how long, how many may be, and what is evicted beside."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage, SystemMessage

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine, anchors, engine_pool
from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.errors import AnchorTooLarge, BadKvCache, CallRefused, EngineBusy, EngineDead
from langgraph_pingpong.evictions import Evictions
from langgraph_pingpong.health import Health
from langgraph_pingpong.placement import Placement
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Lab

RULES = "Answer in short sentences and say where you know it from. " * 4
QUESTION = [SystemMessage(RULES), HumanMessage("How many legs has a crab?")]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors are looked after all the time."""
    monkeypatch.setattr(anchors, "TOUCH_S", 0.02)


def cached(model: ChatPingPong) -> int:
    """What a prompt with the rules finds, in tokens."""
    found = model.invoke(QUESTION).response_metadata["pingpong"]["cached"]
    assert isinstance(found, int)
    return found


def held(engine: FakeEngine) -> list[bool]:
    return [each.keep for each in engine.appends]


class TestAnchors:
    def test_stay_on_every_device_through_a_flood(self, lab: Lab) -> None:
        model = lab.model()
        with model.anchor(RULES) as anchor:
            assert anchor.devices == ["fake:0", "fake:1"]
            assert len(RULES) - 16 < anchor.tokens < len(RULES) + 40
            for engine in lab.engines:
                engine.evict()
                assert engine.cached_tokens(model.get_token_ids(model._render(QUESTION, {}))) >= anchor.tokens
            assert cached(model) >= anchor.tokens
        wait_until(lambda: not any(map(held, lab.engines)), 2, "end of the anchor")
        for engine in lab.engines:
            engine.evict()
        assert cached(model) == 0

    def test_are_given_back_when_the_lease_ends(self, lab: Lab) -> None:
        model = lab.model()
        anchor = model.anchor(RULES, lease_s=0.2)
        assert (anchor.is_held, held(lab.engines[0])) == (True, [True])
        wait_until(lambda: not anchor.is_held, 2, "end of the lease")
        wait_until(lambda: not any(map(held, lab.engines)), 2, "end of the anchor")
        anchor.renew()
        anchor.release()
        assert not anchor.is_held

    def test_a_lease_can_be_renewed(self, lab: Lab) -> None:
        anchor = lab.model().anchor(RULES, lease_s=0.15)
        anchor.renew(60)
        with pytest.raises(AssertionError):
            wait_until(lambda: not anchor.is_held, 0.4, "end of the lease")
        anchor.release()

    def test_equal_ones_are_kept_once_for_all_who_hold_them(self, lab: Lab) -> None:
        model = lab.model()
        one, other = model.anchor(RULES), model.anchor([SystemMessage(RULES)])
        assert held(lab.engines[0]) == [True]
        assert model.memory()[0]["anchored"] - 16 == one.tokens == other.tokens
        one.release()
        assert cached(model) >= other.tokens
        assert held(lab.engines[0]) == [True]
        other.release()
        wait_until(lambda: not held(lab.engines[0]), 2, "end of the anchor")

    def test_tools_are_part_of_them(self, lab: Lab) -> None:
        def tide_time(port: str) -> str:
            """When the tide is in."""
            return port

        model = lab.model()
        with model.anchor(RULES) as plain, model.anchor(RULES, tools=[tide_time]) as anchor:
            assert anchor.tokens > plain.tokens + 100
            for engine in lab.engines:
                engine.evict()
            answer = model.bind_tools([tide_time]).invoke(QUESTION)
            assert answer.response_metadata["pingpong"]["cached"] >= anchor.tokens

    def test_are_a_tenants_own(self, lab: Lab) -> None:
        model = lab.model()
        with model.anchor(RULES, tenant="a"):
            assert cached(model) == 0

    async def test_from_a_running_loop(self, lab: Lab) -> None:
        model = lab.model()
        async with await model.aanchor(RULES) as anchor:
            assert anchor.is_held
        await asyncio.to_thread(wait_until, lambda: not anchor.is_held, 2, "end of the anchor")

    @pytest.mark.usefixtures("often")
    def test_are_brought_back_where_no_prompt_can_be_kept_open(self, lab: Lab) -> None:
        model = lab.model(speed={"takes_appends": False})
        record = lab.record(model)
        with model.anchor(RULES) as anchor:
            model.invoke("Hello")  # from now on the model hears of the pool's engines
            lab.engines[0].evict()
            event = record.wait_for("anchor.rewarmed")
            assert (event.device, event.data["tokens"] > 200) == ("fake:0", True)
            assert cached(model) >= anchor.tokens - 16

    @pytest.mark.usefixtures("often")
    def test_outlast_an_engine_that_takes_no_more_for_a_while(self, lab: Lab) -> None:
        model = lab.model(1, speed={"takes_appends": False})
        record, (engine,) = lab.record(model), lab.engines
        with model.anchor(RULES) as anchor:
            model.invoke("Hello")  # from now on the model hears of the pool's engines
            engine.fail_prefill, asked = EngineBusy("queue full"), len(engine.prefills)
            wait_until(lambda: len(engine.prefills) > asked + 1, 5, "refusals")
            engine.fail_prefill = None
            engine.evict()
            record.wait_for("anchor.rewarmed")
            assert anchor.devices == ["fake:0"]

    @pytest.mark.usefixtures("often")
    def test_are_brought_back_on_emptied_caches_and_new_engines(self, lab: Lab) -> None:
        model = lab.model()
        with model.anchor(RULES) as anchor:
            model.reset_prefix_cache()
            wait_until(lambda: held(lab.engines[0]) == [True], 2, "anchor after the reset")
            lab.engines[0].die()
            for _ in range(2):  # one of them meets the engine that is dead
                model.invoke("Hello")
            wait_until(lambda: lab.engines[0].restarts == 1, 5, "restart")
            wait_until(lambda: anchor.devices == ["fake:0", "fake:1"], 5, "anchor on both")
            assert held(lab.engines[0]) == [True]

    def test_over_the_cap_there_is_one_clear_error(self, lab: Lab) -> None:
        model = lab.model(speed={"cache_tokens": 1000, "max_model_len": 590})
        with model.anchor(RULES) as anchor:
            assert model.memory()[0]["anchor_cap"] == 1000 - 592
            with pytest.raises(
                AnchorTooLarge, match=r"beside \d+ that are held is more than the 408(.|\n)*kv_pool_ratio"
            ):
                model.anchor(f"Be brief. {RULES}")
            assert (anchor.is_held, held(lab.engines[0])) == (True, [True])
        with pytest.raises(AnchorTooLarge, match="context of 590"):
            model.anchor(RULES * 3)

    @pytest.mark.parametrize(
        ("text", "settings", "why"),
        [
            ("x", {}, "whole cache block"),
            *((RULES, {"lease_s": lease}, "lease_s") for lease in (0, None, float("nan"))),
        ],
    )
    def test_refuse_what_cannot_be(self, text: str, settings: dict[str, Any], why: str) -> None:
        with ChatPingPong(pool=EnginePool([FakeEngine(block_size=64)])) as model, pytest.raises(CallRefused, match=why):
            model.anchor(text, **settings)

    def test_an_engine_that_fails_is_no_reason_to_wait(self, lab: Lab) -> None:
        model = lab.model()
        model.start()
        lab.engines[1].fail_prefill = EngineDead("killed")
        lab.engines[1].fail_restart = EngineDead("killed")
        with model.anchor(RULES) as anchor:
            assert anchor.devices == ["fake:0"]


class TestCap:
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(16, 600)), max_size=25), st.floats(0.1, 1))
    def test_is_never_exceeded_and_all_that_fits_is_taken(
        self, doing: list[tuple[bool, int, int]], ratio: float
    ) -> None:
        asyncio.run(self.kept_within(doing, ratio))

    async def kept_within(self, doing: list[tuple[bool, int, int]], ratio: float) -> None:
        engine = FakeEngine(tokenizer=None, cache_tokens=1200, max_model_len=400)
        placement = Placement(1)
        engine.budget.ratio = ratio
        await engine.start()
        book = anchors.Anchors([engine], Health([engine], placement), placement.computed)
        made = list[anchors.Anchor]()
        assert book.cap == min(int(1200 * ratio), 800)
        for begins, which, size in doing:
            if begins:
                await self.begin(book, made, range(which, which + size))
            elif made:
                await self.end(book, made, which % len(made))
            held = {tuple(each._ids) for each in engine.appends}
            assert held == {each._kept.ids for each in made}
            assert engine.budget.anchored == book.tokens == sum(len(ids) + 16 for ids in held) <= book.cap
        while made:
            await self.end(book, made, 0)
        assert (book.tokens, engine.appends) == (0, [])

    async def end(self, book: anchors.Anchors, made: list[anchors.Anchor], which: int) -> None:
        anchor = made.pop(which)
        book.release(anchor)
        if not anchor._kept.holders:
            await asyncio.wait(anchor._kept.tasks)

    async def begin(self, book: anchors.Anchors, made: list[anchors.Anchor], ids: range) -> None:
        whole = tuple(ids[: len(ids) // 16 * 16])
        is_new = whole not in {each._kept.ids for each in made}
        assert book.cap is not None
        fits = book.tokens + is_new * (len(whole) + 16) <= book.cap and len(whole) < 400
        try:
            made.append(await book.add(ids, None, 60, cast(Any, None)))
        except AnchorTooLarge:
            assert not fits
        else:
            assert fits


class TestBudget:
    def test_an_anchor_waits_for_reads(self, lab: Lab) -> None:
        model = lab.model(1, speed={"cache_tokens": 2000, "max_model_len": 590})
        model.start()
        budget = lab.engines[0].budget
        budget.pulled = 1500  # more than there may be at once, so that a short anchor has to wait
        with ThreadPoolExecutor(1) as aside:
            making = aside.submit(model.anchor, RULES)
            wait_until(lambda: budget.anchored > 0, 2, "anchor")
            assert not budget.may_pull(1)
            assert (making.done(), lab.engines[0].prefills) == (False, [])
            budget.pulled = 0
            with making.result(5) as anchor:
                assert anchor.devices == ["fake:0"]
        wait_until(lambda: budget.anchored == 0, 2, "end of the anchor")

    def test_open_prompts_make_way_for_anchors(self, lab: Lab) -> None:
        model = lab.model(1, speed={"cache_tokens": 1000, "max_model_len": 500})
        model.start()
        engine, pool = lab.engines[0], model._serving().pool
        engine.budget.ratio = 0.6
        appends = engine.open_appends()
        assert appends is not None
        assert pool.loop.run(appends.append(range(400))) == 0
        with model.anchor(RULES):
            assert pool.loop.run(appends.append(range(16))) is None
            assert (engine.budget.prompts, held(engine)) == (0, [True])


class TestSettings:
    @pytest.mark.parametrize("ratio", [0.0, 1.5])
    def test_a_share_is_a_share(self, ratio: float) -> None:
        with pytest.raises(ValueError, match="kv_pool_ratio"):
            ChatPingPong(devices=["fake:0"], kv_pool_ratio=ratio)
        with pytest.raises(BadKvCache, match="kv_pool_ratio"):
            engine_pool(devices=["cpu:0"], kv_pool_ratio=ratio)

    def test_a_cpu_has_no_second_tier(self) -> None:
        with pytest.raises(BadKvCache, match="for GPUs"):
            engine_pool(devices=["cpu:0"], kv_offloading_size=2.0)

    def test_the_second_tier_is_vllms_own(self) -> None:
        config = EngineConfig("org/model", parse_devices(["cuda:0"]), kv_offloading_size=8.0)
        assert config.vllm_args["kv_offloading_size"] == 8.0
        assert "kv_pool_ratio" not in config.vllm_args

    def test_the_share_reaches_the_cap(self) -> None:
        with ChatPingPong(devices=["fake:0"], kv_pool_ratio=0.5, max_model_len=1000) as model:
            model._serving().pool.engines[0].budget.began(10_000, 1000, block_size=16)
            assert model.memory()[0]["anchor_cap"] == 5000


class TestEvictions:
    @staticmethod
    def watch(blocks: int) -> Evictions:
        watch = Evictions()
        watch.began(4, blocks * 4)
        return watch

    def test_tell_what_was_lost_and_needed_again(self) -> None:
        watch = self.watch(10)
        watch.computed(range(20), None)
        assert watch.computed_before([*range(20), 99], None) == 20
        assert watch.computed_before(range(20), None) == 16  # the last token is computed in any case
        assert (watch.computed_before(range(20), "salt"), watch.computed_before(range(1, 20), None)) == (0, 0)
        assert watch.found(20, 20) == 0
        assert watch.lost.to_dict() == {"evicted": 0, "needed_again": 0}
        assert watch.found(20, 8) == 12
        assert watch.lost.to_dict() == {"evicted": 12, "needed_again": 12}

    def test_count_what_did_not_fit(self) -> None:
        watch = self.watch(10)
        for start in range(0, 1000, 100):
            watch.computed(range(start, start + 8), None)
        assert watch.lost.evicted == (20 - 10) * 4
        watch.was_emptied()
        assert watch.lost.evicted == 0

    def test_show_in_certificates_and_by_device(self, lab: Lab) -> None:
        model = lab.model(1)
        assert model.invoke(QUESTION).response_metadata["pingpong"]["lost"] == 0
        assert model.invoke(QUESTION).response_metadata["pingpong"]["lost"] == 0
        lab.engines[0].evict()
        lost = model.invoke(QUESTION).response_metadata["pingpong"]["lost"]
        assert lost > len(RULES) - 16
        assert model.memory()[0]["needed_again"] == lost

    def test_a_new_engine_has_lost_nothing(self, lab: Lab) -> None:
        model = lab.model(2)
        model.invoke(QUESTION)
        lab.engines[0].die()
        for _ in range(2):
            assert model.invoke(QUESTION).response_metadata["pingpong"]["lost"] == 0
        wait_until(lambda: lab.engines[0].restarts == 1, 5, "restart")
        for _ in range(2):
            assert model.invoke(QUESTION).response_metadata["pingpong"]["lost"] == 0


def test_an_anchor_survives_a_flood_on_a_real_engine(spare_model: ChatPingPong) -> None:
    model, rules = spare_model, "Say where you know it from. " * 146
    pool, asked = model._serving().pool, [SystemMessage(rules), HumanMessage("How many legs has a crab?")]

    def found(word: str, tokens: int) -> int | None:
        """What the cache has of so many tokens of a word."""
        ids = tuple(model.get_token_ids(f"{word} " * tokens)[:tokens])
        return pool.loop.run(pool.engines[0].prefill(Request(ids)))

    with model.anchor(rules) as anchor:
        assert 1000 <= anchor.tokens <= model.memory()[0]["anchor_cap"]
        found("tide", 300)
        assert found("tide", 300) == 288  # whole blocks
        assert [found(word, 700) for word in ("crab", "gull")] == [0, 0]  # more than there is beside the anchor
        assert found("tide", 300) == 0
        first = model.invoke(asked).response_metadata["pingpong"]
        assert (first["cached"] >= anchor.tokens, first["lost"]) == (True, 0)
        with pytest.raises(AnchorTooLarge, match="beside"):
            model.anchor(f"Be brief. {rules}")
    wait_until(lambda: not len(pool.engines[0]._appends), 5, "end of the anchor")  # type: ignore[attr-defined]
    assert [found(word, 700) for word in ("sand", "rock", "moss")] == [0, 0, 0]
    after = model.invoke(asked).response_metadata["pingpong"]
    assert after["cached"] < anchor.tokens - 32
    assert after["cached"] + after["lost"] >= anchor.tokens
    assert model.memory()[0]["needed_again"] == after["lost"]
