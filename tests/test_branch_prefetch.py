"""Calls that may not come: how many are prefilled, which first, within which room, and when they are given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langgraph.graph import START, StateGraph
from pydantic import ValidationError
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node
from langgraph_pingpong.kv_budget import BRANCH_SHARE
from tests.conftest import edges_on, wait_until

if TYPE_CHECKING:
    from tests.conftest import Lab, Recorder

EXPERTS = ("poet", "lawyer", "judge", "baker")
CACHE = 1800
"""Tokens of a small cache: of four candidates, a quarter of it holds a few."""


class State(TypedDict, total=False):
    task: str
    plan: str
    report: str


def router(lab: Lab, model: ChatPingPong, *experts: str) -> Any:
    """A planner, and of the experts the one that the task names."""
    builder = StateGraph(State).add_node(
        "planner", agent_node(model, prompt=lab.prompt("planner", "task"), writes="plan")
    )
    for name in experts:
        builder.add_node(name, agent_node(model, prompt=lab.prompt(name, "plan"), writes="report"))

    def route(state: State) -> str:
        return next(name for name in experts if name in state["task"])

    builder.add_edge(START, "planner").add_conditional_edges("planner", route, list(experts))
    return builder.compile()


def begun(record: Recorder) -> list[str]:
    """The experts whose prompts were prefilled, in the order in which that began."""
    return list(dict.fromkeys(event.node for event in record.named("append.started") if event.node in EXPERTS))


def sees(lab: Lab, model: ChatPingPong, task: str, graph: Any) -> Recorder:
    record = lab.record(model)
    graph.invoke({"task": task})
    wait_until(lambda: not model._serving().pool.runs or not _guesses(model), 3.0, "end of guesses")
    return record


def _guesses(model: ChatPingPong) -> list[Any]:
    return [edge for edge in edges_on(model._serving().pool) if edge.upcoming.branched is not None]


@pytest.mark.parametrize(("limit", "prefilled"), [(0, 0), (1, 1), (3, 3), (8, 4)])
def test_no_more_candidates_are_prefilled_than_one_says(lab: Lab, limit: int, prefilled: int) -> None:
    model = lab.model(branch_prefetch_limit=limit)
    record = sees(lab, model, "Ask the baker.", router(lab, model, *EXPERTS))
    assert len(begun(record)) == prefilled


def test_a_limit_is_no_negative_number() -> None:
    with pytest.raises(ValidationError, match="branch_prefetch_limit"):
        ChatPingPong(branch_prefetch_limit=-1)


def test_what_earlier_runs_took_most_often_comes_first(lab: Lab) -> None:
    model = lab.model(branch_prefetch_limit=2)
    graph = router(lab, model, *EXPERTS)
    for expert in ("baker", "baker", "judge", "judge", "judge", "baker", "baker"):
        graph.invoke({"task": f"Ask the {expert}."})
    graph.invoke({"task": "Ask the judge."})
    record = sees(lab, model, "Ask the poet.", graph)
    assert begun(record) == ["baker", "judge"]


def test_losers_are_given_up_when_the_winner_is_called(lab: Lab) -> None:
    model = lab.model(engines=[lab.engine(f"fake:{i}", decode_speed=200.0) for i in range(2)])
    record = sees(lab, model, "Ask the judge.", router(lab, model, *EXPERTS))
    dropped = {event.node: event for event in record.named("edge.dropped")}
    assert dropped.keys() == {"poet", "lawyer", "baker"}
    first = record.named("first_token", "judge")[0]
    assert all(event.data["reason"] == "not chosen" and event.t < first.t for event in dropped.values())
    assert all(event.data["wasted"] > 0 for event in dropped.values())
    assert record.certificate("judge")["wasted"] == 0


def test_what_runs_beside_the_winner_keeps_its_edge(lab: Lab) -> None:
    model = lab.model()
    builder = StateGraph(TypedDict("S", {"task": str, "plan": str, "poet": str, "lawyer": str, "judge": str}))
    builder.add_node("planner", agent_node(model, prompt=lab.prompt("planner", "task"), writes="plan"))
    for name in EXPERTS[:3]:
        builder.add_node(name, agent_node(model, prompt=lab.prompt(name, "plan"), writes=name))
    builder.add_edge(START, "planner")
    builder.add_conditional_edges("planner", lambda state: ["poet", "judge"], list(EXPERTS[:3]))
    record = sees(lab, model, "Go.", builder.compile())
    assert [record.certificate(name)["source"] for name in ("poet", "judge")] == ["declared"] * 2
    assert [event.node for event in record.named("edge.dropped")] == ["lawyer"]


def test_candidates_hold_a_share_of_the_cache_at_most(lab: Lab) -> None:
    engines = [lab.engine(f"fake:{i}") for i in range(2)]
    for engine in engines:
        engine.cache_tokens = CACHE
    model = lab.model(engines)
    record = sees(lab, model, "Ask the poet.", router(lab, model, *EXPERTS))
    sizes = {event.node: event.data["tokens"] for event in record.named("append.started")}
    assert 0 < sum(sizes.values()) <= CACHE * BRANCH_SHARE
    assert 0 < len(sizes) < len(EXPERTS)
    assert {event.node for event in record.named("edge.quiet")} == set(EXPERTS) - set(sizes)
