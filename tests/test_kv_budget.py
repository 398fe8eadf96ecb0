"""What is held in a KV cache: each kind within its cap, and the sum of them all within `kv_pool_ratio`."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from langgraph_pingpong.kv_budget import BRANCH_SHARE, PULL_SHARE, KvBudget

percent = st.integers(1, 60)
"""Of the capacity."""


class Life(RuleBasedStateMachine):
    """All who hold something obey the budget of one engine, in any order."""

    @initialize(capacity=st.integers(200, 2000), longest=percent, ratio=st.floats(0.2, 1.0))
    def begin(self, capacity: int, longest: int, ratio: float) -> None:
        self.budget = KvBudget(capacity, capacity * longest // 100, ratio)
        self.waiting: list[int] = []
        """Anchors that wait for pulls."""
        self.anchors: list[int] = []
        self.open: list[int] = []
        """Prompts, used least recently first."""
        self.pulls: list[int] = []
        self.guesses: list[int] = []

    def tokens(self, percent: int) -> int:
        assert self.budget.capacity is not None
        return max(1, self.budget.capacity * percent // 100)

    def settle(self) -> None:
        """What the holders do after each change."""
        if self.budget.anchors_fit:
            self.anchors += self.waiting
            self.waiting.clear()
        while sum(self.open) > self.budget.room:
            self.open.pop(0)
        self.budget.prompts = sum(self.open)

    @rule(percent=percent)
    def anchor(self, percent: int) -> None:
        if self.budget.anchored + self.tokens(percent) <= self.budget.anchor_cap:
            self.budget.anchored += self.tokens(percent)
            self.waiting.append(self.tokens(percent))
        self.settle()

    @rule(percent=percent)
    def open_prompt(self, percent: int) -> None:
        self.open.append(self.tokens(percent))
        self.settle()

    @rule(percent=percent, begins=st.booleans())
    def answer(self, percent: int, begins: bool) -> None:
        self.budget.answering = self.tokens(percent) if begins else 0
        self.settle()

    @rule(percent=percent)
    def pull(self, percent: int) -> None:
        if self.budget.may_pull(self.tokens(percent)):
            self.budget.pulled += self.tokens(percent)
            self.pulls.append(self.tokens(percent))
            assert self.budget.held <= self.budget.share

    @rule(percent=percent)
    def guess(self, percent: int) -> None:
        if self.budget.may_branch(self.tokens(percent)):
            self.budget.branches += self.tokens(percent)
            self.guesses.append(self.tokens(percent))
            assert self.budget.held <= self.budget.share

    @rule(kind=st.sampled_from(["anchors", "open", "pulls", "guesses"]))
    def end(self, kind: str) -> None:
        """The oldest of a kind lets go."""
        if not (held := getattr(self, kind)):
            return
        gone, counted = held.pop(0), {"anchors": "anchored", "open": "prompts", "pulls": "pulled"}.get(kind, "branches")
        setattr(self.budget, counted, getattr(self.budget, counted) - gone)
        self.settle()

    @invariant()
    def the_sum_stays_within_the_share(self) -> None:
        assert sum(self.anchors) + sum(self.open) + sum(self.pulls) <= self.budget.share

    @invariant()
    def each_kind_stays_within_its_cap(self) -> None:
        capacity = self.budget.capacity or 0
        assert sum(self.anchors) <= self.budget.anchor_cap
        assert sum(self.pulls) <= capacity * PULL_SHARE
        assert sum(self.guesses) <= capacity * BRANCH_SHARE
        assert not self.anchors or sum(self.anchors) + self.budget.longest <= capacity

    @invariant()
    def the_budget_knows_what_is_held(self) -> None:
        budget = self.budget
        assert budget.anchored == sum(self.anchors) + sum(self.waiting)
        assert (budget.prompts, budget.pulled, budget.branches) == (*map(sum, (self.open, self.pulls, self.guesses)),)


TestLife = Life.TestCase


def test_candidates_that_are_open_prompts_count_once() -> None:
    budget = KvBudget(1000, ratio=0.5, prompts=200, branches=150)
    assert budget.held == 200
    budget.branches = 240
    assert budget.held == 240


@pytest.mark.parametrize("held", ["anchored", "prompts", "pulled"])
def test_pulls_and_candidates_take_only_what_nobody_holds(held: str) -> None:
    budget = KvBudget(1000, ratio=0.5)
    assert budget.may_pull(200) and budget.may_branch(200)
    setattr(budget, held, 400)
    assert not budget.may_pull(200)
    assert not budget.may_branch(200)


def test_of_a_cache_of_unknown_size_nothing_is_refused() -> None:
    budget = KvBudget(answering=10**9, pulled=10**9)
    assert budget.may_pull(10**9) and budget.may_branch(10**9) and budget.anchors_fit
    assert budget.room > 10**9


def test_a_start_tells_how_much_there_is() -> None:
    budget = KvBudget()
    budget.began(1000, 590, 16)
    assert (budget.share, budget.longest, budget.anchor_cap) == (850, 592, 408)
