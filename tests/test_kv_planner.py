"""What the planner picks, and the life of a handle, whatever happened before."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_pingpong.engines.base import KvExport
from langgraph_pingpong.kv_budget import PULL_SHARE, KvBudget
from langgraph_pingpong.kv_handles import MARGIN_S, HandleRefused, KvHandle, agree, prompt_digest
from langgraph_pingpong.kv_planner import MIN_TOKENS, OBSERVATIONS, Costs, KvPlanner, Line, Pull, SeenBlocks
from langgraph_pingpong.placement import Placement, block_keys

BLOCK = 16
PROMPT = tuple(range(1000))
PULL_S, PREFILL_S = 1e-5, 1e-3
"""What a token takes, read and computed."""


def planner(size: int = 3, limit: int = 10_000, pull_s: float = PULL_S, prefill_s: float = PREFILL_S) -> KvPlanner:
    made = KvPlanner(Placement(size), [KvBudget(int(limit / PULL_SHARE)) for _ in range(size)])
    for tokens in (100, 1000):
        made.costs.pull.observe(tokens, tokens * pull_s)
        made.costs.prefill.observe(tokens, tokens * prefill_s)
    return made


def hold(made: KvPlanner, index: int, tokens: int, ids: tuple[int, ...] = PROMPT, salt: str | None = None) -> None:
    made._placement.computed(index, ids[:tokens], salt)


class TestThePlanner:
    def test_reads_what_another_engine_holds(self) -> None:
        made = planner()
        hold(made, 1, 640)
        assert made.plan(0, (1, 2), PROMPT, None) == Pull(1, 640, 640)

    def test_uses_what_is_here_and_reads_the_rest(self) -> None:
        made = planner()
        hold(made, 0, 160)
        hold(made, 2, 640)
        assert made.plan(0, (1, 2), PROMPT, None) == Pull(2, 640, 480)

    def test_takes_the_source_that_saves_most(self) -> None:
        made = planner()
        hold(made, 1, 320)
        hold(made, 2, 640)
        assert made.plan(0, (1, 2), PROMPT, None) == Pull(2, 640, 640)

    def test_takes_the_less_busy_of_equals(self) -> None:
        made = planner()
        hold(made, 1, 640)
        hold(made, 2, 640)
        made._placement.leases = [0, 2, 1]
        assert made.plan(0, (1, 2), PROMPT, None) == Pull(2, 640, 640)

    def test_leaves_the_last_token_to_be_computed(self) -> None:
        made = planner()
        hold(made, 1, 640)
        assert made.plan(0, (1,), PROMPT[:640], None) == Pull(1, 624, 624)

    @pytest.mark.parametrize("held_here", [640, 640 - MIN_TOKENS + BLOCK])
    def test_reads_nothing_where_little_is_missing(self, held_here: int) -> None:
        made = planner()
        hold(made, 1, 640)
        hold(made, 0, held_here)
        assert made.plan(0, (1,), PROMPT, None) is None

    def test_computes_where_that_is_faster(self) -> None:
        made = planner(pull_s=2e-3)
        hold(made, 1, 640)
        assert made.plan(0, (1,), PROMPT, None) is None

    def test_reads_nothing_before_it_was_measured(self) -> None:
        made = planner()
        made.costs = Costs()
        hold(made, 1, 640)
        assert made.plan(0, (1,), PROMPT, None) is None

    def test_does_not_mix_salts(self) -> None:
        made = planner()
        hold(made, 1, 640, salt="a")
        assert made.plan(0, (1,), PROMPT, "b") is None

    def test_reads_from_no_engine_that_is_down(self) -> None:
        made = planner()
        hold(made, 1, 640)
        made._placement.places[1].up = False
        assert made.plan(0, (1,), PROMPT, None) is None

    def test_believes_an_engine_that_tells_more_than_its_own_book(self) -> None:
        made = planner()
        hold(made, 1, 640)
        made.seen[1] = seen = SeenBlocks(made._placement.places[1].held)
        assert made.plan(0, (1,), PROMPT, None) is None
        keys = block_keys(PROMPT[:640], BLOCK, None)
        seen.add(keys)
        assert made.plan(0, (1,), PROMPT, None) == Pull(1, 640, 640)
        seen.discard(keys[10:])
        assert made.plan(0, (1,), PROMPT, None) == Pull(1, 160, 160)
        assert made._placement.held_tokens(PROMPT, None)[1] == 160

    @given(
        holds=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1000), st.sampled_from([None, "a"])), max_size=8),
        evicted=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 62)), max_size=20),
        tells=st.lists(st.booleans(), min_size=3, max_size=3),
        length=st.integers(1, 1000),
        costs=st.tuples(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2)),
        pinned=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 800)), max_size=4),
    )
    @settings(max_examples=100, deadline=None)
    def test_never_takes_a_source_that_lacks_the_prefix_nor_more_than_the_budget(
        self,
        holds: list[tuple[int, int, str | None]],
        evicted: list[tuple[int, int]],
        tells: list[bool],
        length: int,
        costs: tuple[float, float],
        pinned: list[tuple[int, int]],
    ) -> None:
        made = planner(limit=1000, pull_s=costs[0], prefill_s=costs[1])
        made.seen = [
            SeenBlocks(place.held) if told else None for place, told in zip(made._placement.places, tells, strict=True)
        ]
        truth = [_held(made, index, holds, evicted) for index in range(3)]
        for index, tokens in pinned:
            made._budgets[index].pulled += tokens
        if (pull := made.plan(0, (0, 1, 2), PROMPT[:length], None)) is None:
            return
        keys = block_keys(PROMPT[: pull.tokens], BLOCK, None)
        assert pull.source != 0 and len(keys) * BLOCK == pull.tokens < length
        assert set(keys) <= truth[pull.source]
        assert MIN_TOKENS <= pull.new <= pull.tokens
        assert costs[0] < costs[1]
        for index in (0, pull.source):
            assert made._budgets[index].pulled + pull.tokens <= 1000


def _held(
    made: KvPlanner, index: int, holds: list[tuple[int, int, str | None]], evicted: list[tuple[int, int]]
) -> set[int]:
    """Let an engine compute prompts and evict blocks; returns the keys of what it holds in the end."""
    truth, seen = set(), made.seen[index]
    for tokens, salt in [(tokens, salt) for at, tokens, salt in holds if at == index]:
        hold(made, index, tokens, salt=salt)
        truth.update(keys := block_keys(PROMPT[:tokens], BLOCK, salt))
        if seen is not None:
            seen.add(keys)
    if seen is not None:  # of others nobody learns what they evict
        all_keys = block_keys(PROMPT, BLOCK, None)
        gone = {all_keys[number - 1] for at, number in evicted if at == index}
        seen.discard(gone)
        truth -= gone
    return truth


class TestALine:
    def test_goes_through_what_was_measured(self) -> None:
        line = Line()
        for tokens in (100, 300, 500):
            line.observe(tokens, 0.2 + tokens / 1000)
        assert line.seconds(1000) == pytest.approx(1.2)

    def test_goes_through_zero_where_one_length_was(self) -> None:
        line = Line()
        assert line.seconds(100) is None
        line.observe(100, 1.0)
        line.observe(100, 3.0)
        assert line.seconds(200) == pytest.approx(4.0)

    def test_never_falls(self) -> None:
        line = Line()
        line.observe(100, 3.0)
        line.observe(1000, 1.0)
        assert line.seconds(10) == pytest.approx(10 * 4 / 1100)

    def test_forgets_what_is_long_ago(self) -> None:
        line = Line()
        line.observe(100, 1000.0)
        for _ in range(OBSERVATIONS):
            line.observe(100, 1.0)
        assert line.seconds(100) == pytest.approx(1.0)

    @given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e3)), min_size=1, max_size=40))
    def test_always_gives_a_time(self, seen: list[tuple[int, float]]) -> None:
        line = Line()
        for tokens, seconds in seen:
            line.observe(tokens, seconds)
        for tokens in (1, 10**6):
            seconds = line.seconds(tokens)
            assert seconds is not None and math.isfinite(seconds) and seconds > 0


def handle(prompt: str = "p", expires: float = 10.0) -> KvHandle:
    return KvHandle(0, (1, 0), KvExport("engine a", "request", 0, {5: -0.1, 6: -2.0}, {}), prompt, expires)


class TestAHandle:
    def test_is_taken_once(self) -> None:
        one = handle()
        assert one.take("engine a", (1, 0), "p", 0.0) is one.export
        with pytest.raises(HandleRefused, match="used twice"):
            one.take("engine a", (1, 0), "p", 0.0)

    @pytest.mark.parametrize(
        ("engine", "generation", "prompt", "now", "why"),
        [
            ("engine b", (1, 0), "p", 0.0, "wrong source"),
            ("engine a", (2, 0), "p", 0.0, "source restarted"),
            ("engine a", (1, 1), "p", 0.0, "source restarted"),
            ("engine a", (1, 0), "q", 0.0, "wrong prompt"),
            ("engine a", (1, 0), "p", 10.0 - MARGIN_S, "expired"),
        ],
    )
    def test_is_for_one_prompt_of_one_source_for_a_while(
        self, engine: str, generation: tuple[int, int], prompt: str, now: float, why: str
    ) -> None:
        one = handle()
        with pytest.raises(HandleRefused, match=why):
            one.take(engine, generation, prompt, now)
        with pytest.raises(HandleRefused, match="used twice"):
            one.take("engine a", (1, 0), "p", 0.0)

    @pytest.mark.parametrize(
        ("generation", "likeliest", "now", "why"),
        [
            ((2, 0), {5: -0.1}, 0.0, "source restarted"),
            ((1, 0), {5: -0.1}, 9.5, "expired"),
            ((1, 0), {7: -0.1}, 0.0, "other KV"),
            ((1, 0), {5: -1.5}, 0.0, "other KV"),
            ((1, 0), {}, 0.0, "other KV"),
        ],
    )
    def test_vouches_for_what_was_read(
        self, generation: tuple[int, int], likeliest: dict[int, float], now: float, why: str
    ) -> None:
        one = handle()
        one.take("engine a", (1, 0), "p", 0.0)
        one.check((1, 0), {5: -0.3, 6: -1.8}, 0.0)
        with pytest.raises(HandleRefused, match=why):
            one.check(generation, likeliest, now)

    def test_vouches_for_nothing_it_was_not_taken_for(self) -> None:
        with pytest.raises(HandleRefused, match="not taken"):
            handle().check((1, 0), {5: -0.1}, 0.0)

    def test_a_near_tie_that_fell_the_other_way_is_the_same(self) -> None:
        assert agree({5: -0.70, 6: -0.72}, {5: -0.73, 6: -0.69})
        assert not agree({5: -0.1, 6: -2.5}, {6: -0.1, 5: -2.5})

    def test_of_tokens_about_as_likely_others_may_be_listed(self) -> None:
        assert agree({5: -9.0, 6: -9.1}, {7: -9.0, 6: -9.1})
        assert not agree({5: -9.0, 6: -9.1}, {7: -3.0, 6: -9.1})
        assert not agree({7: -3.0, 6: -9.1}, {5: -9.0, 6: -9.1})

    def test_prompts_under_other_salts_are_others(self) -> None:
        assert len({prompt_digest((1, 2), salt) for salt in (None, "None", "", "a")} | {prompt_digest((1,), None)}) == 5

    @given(
        tries=st.lists(
            st.tuples(
                st.sampled_from(["engine a", "engine b"]),
                st.sampled_from([(1, 0), (1, 1), (2, 0)]),
                st.sampled_from(["p", "q"]),
                st.floats(0.0, 20.0),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_gives_its_kv_at_most_once_and_only_where_all_fits(
        self, tries: list[tuple[str, tuple[int, int], str, float]]
    ) -> None:
        one, given_out = handle(), []
        for number, (engine, generation, prompt, now) in enumerate(tries):
            try:
                one.take(engine, generation, prompt, now)
            except HandleRefused:
                continue
            given_out.append(number)
            assert (engine, generation, prompt) == ("engine a", (1, 0), "p") and now < 10.0 - MARGIN_S
        assert given_out in ([], [0])
