"""Every graph of the gallery gives the same with edges on and off: states, streams, events, history, side effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langgraph.config import get_stream_writer

from langgraph_pingpong import ChatPingPong
from tests.graph_gallery import MODULES, SCENARIOS, RunRecord, Scenario, Scene, run
from tests.graph_gallery.chains import chain
from tests.graph_gallery.scene import Texts, ask, scripted, tasks


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")  # version 3 of events
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_edges_change_nothing(scenario: Scenario, caplog: pytest.LogCaptureFixture) -> None:
    off, on = run(scenario, "off"), run(scenario, "on")
    assert off.differences(on) == []
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    assert [each for each in (*off.certificates, *on.certificates) if not each["ids_equal"]] == []
    assert [round_.prefilled + round_.wasted for round_ in off.rounds] == [0] * len(off.rounds)
    assert failures(off) == []
    assert bool(failures(on)) == scenario.unplanned, failures(on)
    assert scenario.declared <= prefilled(on)


def failures(record: RunRecord) -> list[str]:
    """What went wrong unseen, but for plans that a busy machine had no time for."""
    found = [failure for round_ in record.rounds for failure in round_.failures]
    return [failure for failure in found if "TimeoutError" not in failure]


def prefilled(record: RunRecord) -> set[str]:
    """The nodes whose prompts were prefilled before their turn."""
    return {each["node"] for each in record.certificates if each["static"] + each["streamed"]}


def test_the_gallery_is_complete() -> None:
    assert len(SCENARIOS) >= 45
    assert len({each.name for each in SCENARIOS}) == len(SCENARIOS)
    assert [each for each in SCENARIOS if not (each.description and each.shape)] == []
    assert {each.build.__module__ for each in SCENARIOS} == {module.__name__ for module in MODULES}


def scene_that_differs(
    write: Callable[[ChatPingPong, list[str], Texts], dict[str, Any]], more_nodes: bool = False
) -> Scenario:
    """One node that may look whether edges are on, which no real node can."""

    def build(model: ChatPingPong) -> Scene:
        effects: list[str] = []
        nodes = [("writer", lambda state: write(model, effects, state))]
        if more_nodes and model.overlap == "on":
            nodes.append(("idle", lambda state: {}))
        return Scene(chain(*nodes), tasks(), effects)

    return Scenario("differs", "", "writer", build, scripted({}))


def other_state(model: ChatPingPong, effects: list[str], state: Texts) -> dict[str, Any]:
    return {"draft": model.overlap}


def other_prompt(model: ChatPingPong, effects: list[str], state: Texts) -> dict[str, Any]:
    model.invoke(ask("writer", model.overlap), stop=["a", "e", "i", "o", "u"])
    return {"draft": "the same"}


def more_effects(model: ChatPingPong, effects: list[str], state: Texts) -> dict[str, Any]:
    effects.extend(["writer"] * (1 + (model.overlap == "on")))
    return {"draft": "the same"}


def other_event(model: ChatPingPong, effects: list[str], state: Texts) -> dict[str, Any]:
    get_stream_writer()(model.overlap)
    return {"draft": "the same"}


def more_calls(model: ChatPingPong, effects: list[str], state: Texts) -> dict[str, Any]:
    for _ in range(1 + (model.overlap == "on")):
        model.invoke(ask("writer", state["task"]))
    return {"draft": "the same"}


def nothing(model: ChatPingPong, effects: list[str], state: Texts) -> dict[str, Any]:
    return {}


def named(name: str) -> Scenario:
    return next(each for each in SCENARIOS if each.name == name)


class TestTheComparison:
    """It would notice what it is there to notice."""

    @pytest.mark.parametrize(
        ("write", "where"),
        [
            (other_state, "round 0 (invoke)/seen/0/1/draft"),
            (other_prompt, "round 0 (invoke)/prompts/0"),
            (more_effects, "round 0 (invoke)/effects/writer"),
            (other_event, "round 1 (stream)/seen"),
            (more_calls, "round 0 (invoke)/callbacks/model start"),
        ],
    )
    def test_sees_a_difference(self, write: Callable[..., dict[str, Any]], where: str) -> None:
        scenario = scene_that_differs(write)
        found = run(scenario, "off").differences(run(scenario, "on"))
        assert any(line.startswith(where) for line in found), found

    def test_sees_another_drawing(self) -> None:
        scenario = scene_that_differs(nothing, more_nodes=True)
        found = run(scenario, "off").differences(run(scenario, "on"))
        assert any(line.startswith("drawing") for line in found), found

    def test_lets_named_nodes_run_more_often(self) -> None:
        scenario = scene_that_differs(more_effects)
        assert run(scenario, "off").differences(run(scenario, "on"), repeated={"writer"}) == []

    def test_sees_none_between_two_equal_runs(self) -> None:
        scenario = named("time_travel_in_memory")
        assert run(scenario, "off").differences(run(scenario, "off")) == []


def test_a_record_holds_the_certificate_of_every_call() -> None:
    scenario = named("declared_nodes")
    record = run(scenario, "on")
    assert [[each["node"] for each in round_.certificates] for round_ in record.rounds] == [
        ["planner", "writer", "critic"]
    ] * len(record.rounds)
    assert [len(round_.prompts) for round_ in record.rounds] == [3] * len(record.rounds)
    assert all(round_.prefilled > 0 for round_ in record.rounds)


def test_options_are_set_before_the_first_round() -> None:
    scenario = named("fan_out")
    seen: list[Any] = []
    run(scenario, "off", prepare=lambda graph, scenario: seen.append((scenario.name, "writer" in graph.nodes)))
    assert seen == [("fan_out", True)]
