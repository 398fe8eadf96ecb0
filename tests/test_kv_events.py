"""What engines tell of their caches: evicted blocks are counted, and anchors that lost some come back at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from langgraph_pingpong import ChatPingPong, EnginePool, anchors
from langgraph_pingpong.engines.vllm_kv import KvEvents, VllmKv
from langgraph_pingpong.kv_planner import SeenBlocks
from langgraph_pingpong.placement import HeldBlocks, block_keys
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Lab

RULES = "Answer in short sentences and say where you know it from. " * 4
QUESTION = [SystemMessage(RULES), HumanMessage("How many legs has a crab?")]


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """No anchor is looked after without a reason."""
    monkeypatch.setattr(anchors, "TOUCH_S", 60.0)


def telling(lab: Lab, **speed: Any) -> ChatPingPong:
    """A model on two engines that tell what they hold."""
    return lab.model(speed={"kv_transfer": True, **speed})


def pool_of(model: ChatPingPong) -> EnginePool:
    return model._serving().pool


def evicted(model: ChatPingPong) -> int:
    return int(model.memory()[0]["evicted"])


class TestAnchors:
    def test_that_lost_a_block_come_back_at_once(self, lab: Lab) -> None:
        model = telling(lab, takes_appends=False)
        record = lab.record(model)
        with model.anchor(RULES) as anchor:
            model.invoke("Hello")  # from now on the model hears of the pool's engines
            for times in (1, 2):
                lab.engines[0].evict()
                wait_until(lambda times=times: len(record.named("anchor.rewarmed")) == times, 3, "anchor")  # type: ignore[misc]
            assert {event.device for event in record.named("anchor.rewarmed")} == {"fake:0"}
            assert record.named("anchor.rewarmed")[0].data["tokens"] > 200
            assert lab.engines[0].cached_tokens(anchor._kept.ids) == anchor.tokens - 16
            assert anchor.devices == ["fake:0", "fake:1"]

    def test_that_lost_none_are_left_alone(self, lab: Lab) -> None:
        model = telling(lab, takes_appends=False)
        with model.anchor(RULES):
            pool, before = pool_of(model), len(lab.engines[0].prefills)
            pool.loop.run(_tell(pool, block_keys(range(64), 16, None)))
            pool.loop.run(_tell(pool, []))
            assert len(lab.engines[0].prefills) == before

    def test_are_a_tenants_own(self, lab: Lab) -> None:
        model = telling(lab, takes_appends=False)
        with model.anchor(RULES, tenant="a") as anchor:
            pool, kept = pool_of(model), anchor._kept
            pool.loop.run(_tell(pool, block_keys(kept.ids, 16, None)))
            assert anchor.devices == ["fake:0", "fake:1"]
            pool.loop.run(_tell(pool, block_keys(kept.ids, 16, kept.salt)[-1:]))
            wait_until(lambda: len(lab.engines[0].prefills) > 1 and len(anchor.devices) == 2, 3, "anchor")

    @pytest.mark.parametrize("takes_appends", [True, False])
    def test_come_back_where_what_is_cached_is_not_trusted(self, lab: Lab, takes_appends: bool) -> None:
        model = telling(lab, takes_appends=takes_appends)
        with model.anchor(RULES) as anchor:
            engine, pool = lab.engines[0], pool_of(model)
            assert engine.kv is not None
            pool.loop.call_soon(engine.kv.distrust)
            wait_until(lambda: not engine._cache, 2, "distrust")
            wait_until(lambda: engine.cached_tokens(anchor._kept.ids) == anchor.tokens - 16, 3, "anchor")
            assert [each.keep for each in engine.appends] == [True] * takes_appends


async def _tell(pool: EnginePool, keys: list[int]) -> None:
    """The first engine says that it has evicted blocks."""
    seen = pool.kv.planner.seen[0]
    assert seen is not None
    seen.discard(keys)


class TestEvictions:
    def test_are_counted_where_they_are_told(self, lab: Lab) -> None:
        model = telling(lab, cache_tokens=10_000)
        asked = len(model.get_token_ids(model._render(QUESTION, {})))
        model.invoke(QUESTION)
        assert evicted(model) == 0
        held = len(lab.engines[0]._cache)
        lab.engines[0].evict()
        wait_until(lambda: evicted(model) == held * 16 > asked - 16, 2, "word of it")
        assert model.invoke(QUESTION).response_metadata["pingpong"]["lost"] == model.memory()[0]["needed_again"] > 0
        assert evicted(model) == held * 16

    def test_are_estimated_elsewhere(self, lab: Lab) -> None:
        model = lab.model(speed={"cache_tokens": 160})
        asked = len(model.get_token_ids(model._render(QUESTION, {})))
        model.invoke(QUESTION)
        assert evicted(model) > asked - 160

    def test_are_none_where_a_cache_was_emptied(self, lab: Lab) -> None:
        model = telling(lab)
        for empty in (model.reset_prefix_cache, lab.engines[0].forget):
            model.invoke(QUESTION)
            empty()
            model.invoke("Hello")
            assert evicted(model) == 0

    def test_of_an_engine_that_died_are_forgotten(self, lab: Lab) -> None:
        model = telling(lab)
        model.invoke(QUESTION)
        lab.engines[0].evict()
        wait_until(lambda: evicted(model) > 0, 2, "word of it")
        lab.engines[0].die()
        for _ in range(2):
            model.invoke(QUESTION)
        wait_until(lambda: pool_of(model).health.lives[0] == 2, 5, "restart")
        assert evicted(model) == 0

    def test_are_told_by_one_engine_alone(self, lab: Lab) -> None:
        model = lab.model([lab.engine(kv_transfer=True)])
        model.invoke(QUESTION)
        lab.engines[0].evict()
        wait_until(lambda: evicted(model) > 0, 2, "word of it")


@dataclass
class BlockStored:
    """As vLLM's event of this name."""

    block_hashes: list[str]
    token_ids: list[int]
    parent_block_hash: str | None = None
    block_size: int = 16
    extra_keys: list[Any] = field(default_factory=lambda: [None])


@dataclass
class BlockRemoved:
    """As vLLM's event of this name."""

    block_hashes: list[str]


@dataclass
class AllBlocksCleared:
    """As vLLM's event of this name."""


class TestEventsOfVllm:
    @pytest.fixture
    def told(self) -> list[frozenset[int] | None]:
        return []

    @pytest.fixture
    def book(self, told: list[frozenset[int] | None]) -> SeenBlocks:
        return SeenBlocks(HeldBlocks(), told.append)

    def hear(self, book: SeenBlocks, *events: Any, events_of: KvEvents | None = None) -> None:
        heard = events_of or KvEvents(lambda salt: (True, salt))
        for event in events:
            heard.note(event, book)

    def test_tell_each_block_that_was_evicted_once(self, book: SeenBlocks, told: list[Any]) -> None:
        ids = list(range(48))
        keys = block_keys(ids, 16, None)
        twice = [BlockStored(["a", "b"], ids[:32])] * 2  # two requests computed the same
        removed = [BlockRemoved(["b"]), BlockRemoved(["b"]), BlockRemoved(["unknown"]), BlockRemoved(["c", "a"])]
        self.hear(book, *twice, BlockStored(["c"], ids[32:], "b"), *removed)
        assert told == [frozenset(keys[1:2]), frozenset((keys[0], keys[2]))]

    def test_tell_no_eviction_where_all_was_cleared(self, book: SeenBlocks, told: list[Any]) -> None:
        self.hear(book, BlockStored(["a"], list(range(16))), AllBlocksCleared(), BlockRemoved(["a"]))
        assert told == [None]

    def test_tell_nothing_of_what_is_not_trusted(self, book: SeenBlocks, told: list[Any]) -> None:
        let_go = list[str]()
        port = VllmKv("cpu", lambda request, priority: pytest.fail(), lambda: let_go.append("all"))
        heard = KvEvents(port._salt_of)
        port._events, port._book = heard, book
        self.hear(book, BlockStored(["a"], list(range(16))), events_of=heard)
        port.distrust()
        salted = [[port.salted(None)]]
        self.hear(book, BlockRemoved(["a"]), BlockStored(["b"], list(range(16))), events_of=heard)
        self.hear(book, BlockStored(["c"], list(range(16)), extra_keys=salted), BlockRemoved(["c"]), events_of=heard)
        assert (let_go, told) == (["all"], [None, frozenset(block_keys(range(16), 16, None))])
