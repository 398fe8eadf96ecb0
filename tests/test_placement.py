"""Where prompts go: the rules on plain data, and what they make of graphs on modelled engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from langgraph_pingpong import agent_node, placement
from langgraph_pingpong.placement import (
    ANSWER_TOKENS,
    CROWD_TOKENS,
    ENOUGH_TOKENS,
    SLOW_FOR_S,
    HeldBlocks,
    Placement,
    block_keys,
)
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Lab

PROMPT = tuple(range(1600))
IDLE = (0, 0, 0)


def placed(leases: Sequence[int] = IDLE, held: Sequence[int] = IDLE, down: Sequence[int] = ()) -> Placement:
    """Devices with so many leases, which hold so many tokens of `PROMPT`."""
    state = Placement(len(leases))
    state.leases[:] = leases
    for index, tokens in enumerate(held):
        state.computed(index, PROMPT[:tokens], None)
    for index in down:
        state.went_down(index)
    return state


def slow(index: int, times: float, state: Placement) -> Placement:
    """The same with a device that is so many times as slow as the others, for 10 seconds."""
    state.places[index].slow_until, state.places[index].times_slower = 10.0, times
    return state


class TestStart:
    @pytest.mark.parametrize(
        ("leases", "open_runs", "start"),
        [
            ((0, 0, 0), (0, 0, 0), 0),
            ((1, 0, 0), (0, 0, 0), 1),
            ((0, 0, 0), (1, 1, 0), 2),
            ((0, 1, 1), (5, 0, 0), 0),
            ((1, 1, 1), (2, 1, 2), 1),
        ],
    )
    def test_is_where_least_is_under_way(self, leases: Any, open_runs: Any, start: int) -> None:
        assert placed(leases).start(open_runs, 0.0) == start

    def test_leaves_out_what_is_down(self) -> None:
        assert placed((0, 5, 6), down=[0]).start(IDLE, 0.0) == 1

    @pytest.mark.parametrize(("elsewhere", "start"), [(0, 1), (1, 0), (2, 0)])
    def test_counts_a_slow_device_as_if_it_had_more_leases(self, elsewhere: int, start: int) -> None:
        state = slow(0, 2.5, placed((0, elsewhere), (0, 0)))
        assert [state.start((0, 0), now) for now in (0.0, 10.0)] == [start, 0]

    def test_is_the_same_for_runs_one_after_the_other(self, lab: Lab) -> None:
        model = lab.model()
        record = lab.record(model)
        for overlap in ("on", "off", "on"):
            lab.chain(model.model_copy(update={"overlap": overlap})).invoke({"task": f"Begin {overlap}."})
        finished = [event.data["certificate"] for event in record.named("finish")]
        assert [each["device"] for each in finished if each["node"] == "writer"] == ["fake:0"] * 3

    def test_turns_while_runs_are_open_though_nothing_is_asked(self, lab: Lab) -> None:
        """They are between two calls: at a tool, or waiting for somebody."""
        model = lab.model(4, overlap="off")
        record = lab.record(model)
        tenants = [{"configurable": {"tenant": number}} for number in range(8)]  # who share no cached prefix
        streams = [lab.chain(model).stream({"task": "Begin."}, tenant) for tenant in tenants]
        for stream in streams:
            next(stream)
        assert [event.device for event in record.named("finish")] == [f"fake:{index}" for index in (0, 1, 2, 3)] * 2
        for stream in streams:
            list(stream)
        assert [event.device for event in record.named("finish", "critic")][:2] == ["fake:1", "fake:2"]
        wait_until(lambda: not any(run.is_open for run in model.pool.runs.values()), 5, "end of the runs")


class TestCalls:
    def test_take_turns(self) -> None:
        state = placed()
        assert [state.for_call(turn, PROMPT, None, 0.0) for turn in (0, 1, 2, 3)] == [0, 1, 2, 0]

    @pytest.mark.parametrize(("leases", "chosen"), [((1, 0, 0), 0), ((2, 0, 1), 1), ((2, 1, 0), 2), ((3, 2, 2), 0)])
    def test_go_elsewhere_if_another_has_clearly_fewer_leases(self, leases: Any, chosen: int) -> None:
        assert placed(leases).for_call(0, PROMPT, None, 0.0) == chosen

    @pytest.mark.parametrize(
        ("held", "chosen"),
        [
            ((0, 0, 1600), 2),
            ((0, 0, 816), 2),  # more than the 784 that are new
            ((0, 0, 800), 0),
            ((800, 0, 1600), 2),
            ((1200, 0, 1408), 2),  # 208 more, and 192 are new
            ((1200, 0, 1392), 0),
            ((1600, 1600, 1600), 0),
        ],
    )
    def test_go_to_the_longest_prefix_if_it_saves_more_than_is_new(self, held: Any, chosen: int) -> None:
        assert placed(held=held).for_call(0, PROMPT, None, 0.0) == chosen

    @pytest.mark.parametrize(("more", "chosen"), [(0, 2), (1, 2), (2, 0)])
    def test_weigh_a_prefix_against_the_crowd_there(self, more: int, chosen: int) -> None:
        assert CROWD_TOKENS < 1600 < 2 * CROWD_TOKENS
        assert placed((0, 0, more), (0, 0, 1600)).for_call(0, PROMPT, None, 0.0) == chosen

    def test_share_no_prefix_under_another_salt(self) -> None:
        assert placed(held=(0, 0, 1600)).for_call(0, PROMPT, "tenant", 0.0) == 0

    def test_leave_out_what_is_down_and_take_it_only_if_all_are(self) -> None:
        assert placed(down=[0]).for_call(0, PROMPT, None, 0.0) in (1, 2)
        assert placed(down=[0, 1, 2]).for_call(1, PROMPT, None, 0.0) == 1

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_are_never_refused_and_never_go_where_nothing_works(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, 5))
        numbers = st.lists(st.integers(0, 9), min_size=size, max_size=size)
        down = data.draw(st.sets(st.integers(0, size - 1)))
        state = placed(data.draw(numbers), [16 * n for n in data.draw(numbers)], sorted(down))
        chosen = state.for_call(data.draw(st.integers(0, 20)), PROMPT[:150], None, 0.0)
        assert 0 <= chosen < size
        assert chosen not in down or len(down) == size
        ahead = state.for_edge(chosen, chosen + 1, PROMPT[:150], None, 0.0)
        assert ahead != chosen
        assert ahead not in down


class TestEdges:
    def test_open_on_the_device_whose_turn_is_next(self) -> None:
        assert [placed().for_edge(1, 1 + ahead, PROMPT, None, 0.0) for ahead in (1, 2)] == [2, 0]

    def test_open_elsewhere_if_another_has_clearly_fewer_leases(self) -> None:
        assert placed((1, 2, 0)).for_edge(0, 1, PROMPT, None, 0.0) == 2

    @pytest.mark.parametrize(
        ("held", "chosen"),
        [
            ((1600, 0, 0), None),  # a conversation goes on: all of it is cached where its last turn is answered
            ((0, 0, 0), 1),
            ((208, 0, 0), 1),
            ((1600, 1600, 0), 1),  # it is cached here as well
            ((928, 0, 0), 1),
            ((944, 0, 0), None),
            ((0, 0, 1600), 2),
        ],
    )
    def test_stay_quiet_where_the_upstreams_device_saves_more_than_is_new(self, held: Any, chosen: int | None) -> None:
        assert 1600 - 928 + ANSWER_TOKENS >= 928
        assert 1600 - 944 + ANSWER_TOKENS < 944
        assert placed(held=held).for_edge(0, 1, PROMPT, None, 0.0) == chosen

    def test_open_all_the_same_if_there_is_a_crowd(self) -> None:
        assert placed((9, 0, 0), (1600, 0, 0)).for_edge(0, 1, PROMPT, None, 0.0) == 1

    def test_stay_quiet_without_another_device(self) -> None:
        assert placed(down=[1, 2]).for_edge(0, 1, PROMPT, None, 0.0) is None
        state = slow(1, 1.5, Placement(2))
        assert [state.for_edge(0, 1, PROMPT, None, now) for now in (0.0, 10.0)] == [None, 1]

    def test_of_a_conversation_are_quiet_and_its_calls_stay_together(self, lab: Lab) -> None:
        """Nothing changes but that no turn is computed twice."""

        def run(overlap: str) -> tuple[Any, Any]:
            model = lab.model(overlap=overlap)
            record = lab.record(model)
            builder = StateGraph(MessagesState)
            for node in ("writer", "critic", "editor"):
                prompt = lambda state, node=node: [*state["messages"], ("human", f"Go on as {node}.")]  # noqa: E731
                writes = lambda answer, node=node: {"messages": [AIMessage(answer.text, id=node)]}  # noqa: E731
                builder.add_node(node, agent_node(model, prompt=prompt, writes=writes))
            for source, target in ((START, "writer"), ("writer", "critic"), ("critic", "editor")):
                builder.add_edge(source, target)
            question = {"role": "user", "content": "Tell me of the tides. " * 40, "id": "first"}
            return builder.compile().invoke({"messages": [question]}), record

        (off, _), (on, record) = run("off"), run("on")
        assert on == off
        assert {event.node for event in record.named("edge.quiet")} == {"critic", "editor"}
        assert [event.data["certificate"]["device"] for event in record.named("finish")] == ["fake:0"] * 3
        assert record.certificate("editor")["cached"] > 800
        assert lab.prefills() == 0


class TestHeldBlocks:
    def test_count_from_the_beginning(self) -> None:
        held, keys = HeldBlocks(), block_keys(PROMPT[:64], 16, None)
        held.add(keys[:3])
        held.add(block_keys((1, *PROMPT[1:64]), 16, None))
        assert [held.count(keys), held.count(keys[1:]), held.count([])] == [3, 2, 0]
        held.clear()
        assert held.count(keys) == 0

    def test_an_unfilled_block_has_no_key(self) -> None:
        assert [len(block_keys(PROMPT[:size], 16, None)) for size in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]

    def test_stand_for_all_before_them_and_the_salt(self) -> None:
        plain, salted, other = (
            block_keys(ids, 16, salt) for ids, salt in ((PROMPT, None), (PROMPT, "a"), ((1, *PROMPT[1:]), None))
        )
        assert not {*plain} & {*salted} and not {*plain} & {*other}

    def test_the_oldest_end_goes_first(self) -> None:
        held, old, new = HeldBlocks(5), list(range(4)), [10, 11, 12]
        held.add(old)
        held.add(new)
        assert [held.count(old), held.count(new)] == [2, 3]
        held.add(old[:1])
        held.add([20, 21])
        assert [held.count(old), held.count(new)] == [1, 2]

    def test_what_an_answer_said_is_held_without_its_last_token(self, lab: Lab) -> None:
        model = lab.model(1)
        lab.engines[0].reply = lambda prompt: "x" * 64
        model.invoke("Hello.")
        (request,) = lab.engines[0].requests
        said = tuple(lab.engines[0].tokenizer.encode("x" * 64))
        whole = (*request.prompt_token_ids, *said)
        assert model.pool._placement.held_tokens(whole, None) == [(len(whole) - 1) // 16 * 16]
        model.reset_prefix_cache()
        assert model.pool._placement.held_tokens(whole, None) == [0]

    def test_an_engine_tells_how_many_there_can_be(self) -> None:
        state = Placement(1)
        for tokens, capacity in ((320, 20), (None, placement.MAX_BLOCKS)):
            state.came_up(0, 16, tokens)
            assert state.places[0].held.capacity == capacity


class TestSlowDevices:
    def decode(self, state: Placement, index: int, ms: float, tokens: int = ENOUGH_TOKENS, now: float = 0.0) -> Any:
        return [found for _ in range(tokens) if (found := state.token_took(index, ms / 1000, 100, now))]

    def test_give_way_for_a_while_where_another_is_as_free(self) -> None:
        state = placed()
        assert self.decode(state, 0, 10.0) == []
        assert [self.decode(state, 1, 20.0), self.decode(state, 1, 20.0)] == [[], [pytest.approx(2.0)]]
        assert [state.for_call(1, PROMPT, None, now) for now in (0.0, SLOW_FOR_S - 1, SLOW_FOR_S)] == [2, 2, 1]

    @pytest.mark.parametrize("times", [2.0, 5.0])
    def test_share_the_work_all_the_same(self, times: float) -> None:
        """Forty calls at once, none of which ends: all of them on one device would be too many for its cache."""
        state = slow(0, times, placed((0, 0), (0, 0)))
        for _ in range(40):
            state.leases[state.for_call(0, PROMPT, None, 0.0)] += 1
        assert state.leases == [pytest.approx(40 / 3, abs=2), pytest.approx(80 / 3, abs=2)]

    def test_keep_the_conversations_that_they_hold_as_long_as_others_have_as_much_to_do(self) -> None:
        state = slow(0, 2.0, placed((9, 20), (1600, 0)))
        assert [state.for_call(0, PROMPT, None, 0.0), state.for_call(1, PROMPT, None, 0.0)] == [0, 0]
        state.leases[1] = 10
        assert [state.for_call(0, PROMPT, None, 0.0), state.for_call(1, PROMPT, None, 0.0)] == [1, 1]

    @pytest.mark.parametrize(
        ("ms", "tokens", "leases"),
        [(14.0, 2 * ENOUGH_TOKENS, 0), (90.0, 2 * ENOUGH_TOKENS - 1, 0), (90.0, 2 * ENOUGH_TOKENS, 3)],
    )
    def test_are_clearly_slower_at_the_same_load(self, ms: float, tokens: int, leases: int) -> None:
        state = placed()
        self.decode(state, 0, 10.0)
        state.leases[1] = leases
        assert self.decode(state, 1, ms, tokens) == []

    def test_are_not_those_with_longer_prompts(self) -> None:
        state = placed()
        self.decode(state, 0, 10.0)
        assert [found for _ in range(2 * ENOUGH_TOKENS) if (found := state.token_took(1, 0.09, 5000, 0.0))] == []

    def test_are_not_those_that_stalled(self) -> None:
        state = placed()
        self.decode(state, 0, 10.0)
        for _ in range(4):
            self.decode(state, 1, 5000.0, 3)
            assert self.decode(state, 1, 10.0, ENOUGH_TOKENS - 3) == []

    def test_are_not_those_that_were_slow_once(self) -> None:
        state = placed()
        self.decode(state, 0, 10.0)
        assert [self.decode(state, 1, ms) for ms in (20.0, 10.0, 20.0)] == [[], [], []]

    def test_are_not_those_that_were_measured_later_on_a_busy_machine(self) -> None:
        state = placed()
        self.decode(state, 0, 10.0)
        assert self.decode(state, 1, 20.0, 4 * ENOUGH_TOKENS, now=60.0) == []
        self.decode(state, 0, 20.0, now=60.0)
        assert self.decode(state, 1, 20.0, 4 * ENOUGH_TOKENS, now=60.0) == []

    def test_are_not_told_from_others_by_less_than_the_programs_own_noise(self) -> None:
        state = placed()
        self.decode(state, 0, 0.5)
        assert self.decode(state, 1, 1.4, 4 * ENOUGH_TOKENS) == []

    def test_get_no_edges_and_are_told_of(self, lab: Lab) -> None:
        engines = [lab.engine("fake:0"), lab.engine("fake:1", decode_speed=250.0)]
        for engine in engines:
            engine.reply = lambda prompt: "abcdefgh" * 50
        model = lab.model(engines)
        record = lab.record(model)
        lab.chain(model, ("writer", "critic", "editor", "closer", "reader", "buyer")).invoke({"task": "Measure."})
        assert record.wait_for("device.slow").device == "fake:1"
        assert record.named("device.slow")[0].data["times_slower"] > 1.5
        lab.chain(model).invoke({"task": "Go on."})
        assert record.named("edge.quiet", "critic")
        assert record.certificate("critic")["device"] == "fake:0"
