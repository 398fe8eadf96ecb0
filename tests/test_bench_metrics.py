"""Every metric on lines made by hand, whose values can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from langgraph_pingpong.bench import metrics, turn_metrics
from langgraph_pingpong.bench.document import Text
from langgraph_pingpong.bench.groups import Group, compare, hidden_share, named, varying
from langgraph_pingpong.bench.lines import Results
from langgraph_pingpong.bench.timeline import middle_run, timeline
from langgraph_pingpong.bench.turn_report import turn_blocks


def event(name: str, t: float, node: str, graph_run: int = 0, device: str = "d0", **data: Any) -> dict[str, Any]:
    return {"name": name, "t": t, "node": node, "graph_run": graph_run, "device": device, "data": data}


def agent(node: str, ttft: float, total: float, **more: Any) -> dict[str, Any]:
    known = {
        "node": node,
        "device": "d0",
        "ttft_ms": ttft,
        "total_ms": total,
        "prompt_tokens": 100,
        "output_tokens": 3,
        "prompt_sha256": f"prompt of {node}",
        "static": 0,
        "streamed": 0,
        "cached": 0,
        "wasted": 0,
        "ids_equal": True,
        "graph_run": 0,
    }
    return {**known, **more}


def answer(device: str, sha256: str, started: float, times: Sequence[float], done: bool = True) -> dict[str, Any]:
    return {
        "device": device,
        "prompt_tokens": 100,
        "prompt_sha256": sha256,
        "started": started,
        "ended": 99.0,
        "tokens": [[at, 1] for at in times],
        "finish_reason": "length" if done else None,
    }


def chain(e2e: float, ttft: Sequence[float], step: float = 10.0, **more: Any) -> dict[str, Any]:
    """A run of agents A, B, ... that say three tokens each, on two devices in turn."""
    events, agents, answers, now = [], [], [], 0.0
    for place, wait in enumerate(ttft):
        node, device = "ABCDE"[place], f"d{place % 2}"
        events.append(event("generate.started", now, node, device=device))
        times = [now + wait + step * number for number in range(3)]
        answers.append(answer(device, f"prompt of {node}", now, times))
        agents.append(agent(node, wait, wait + 2 * step, device=device))
        now = times[-1]
        events.append(event("finish", now, node, device=device, agent=place))
    known = {
        "mode": "serial",
        "run": 0,
        "warmup": False,
        "case": {"static": 100},
        "chains": 1,
        "at": "2026-11-30T00:00:00",
        "e2e_ms": e2e,
        "chain_ms": [e2e],
        "texts": [{"A": "x", "B": "y"}],
        "session": 0,
        "machine": {"load": 1.0},
        "events": events,
        "agents": agents,
        "answers": answers,
    }
    return {**known, **more}


SERIAL = [chain(1000.0, (200, 100, 100), run=0), chain(1100.0, (200, 140, 100), run=1)]
QUICK = [chain(850.0, (200, 5, 15), run=0, mode="pingpong"), chain(810.0, (202, 5, 5), run=1, mode="pingpong")]


def test_figures_leave_no_value_out() -> None:
    figures = metrics.Figures.of([5.0, 1.0, 2.0, 100.0])
    assert figures == metrics.Figures(27.0, 3.5, 1.0, 100.0, 100.0, (5.0, 1.0, 2.0, 100.0))
    assert metrics.p95(range(1, 101)) == 95
    assert metrics.p95(range(1, 21)) == 19
    assert metrics.p95([7]) == 7


def test_who_is_downstream_and_who_upstream() -> None:
    run = SERIAL[0]
    assert metrics.followers(run) == [False, True, True]
    assert [each["node"] for each in metrics.first_agents(run)] == ["A"]
    assert [each["node"] for each in metrics.upstream_agents(run)] == ["A", "B"]
    events = [
        event("generate.started", 0, "A"),
        event("generate.started", 0, "B"),
        event("generate.started", 1, "A", 1),
        event("finish", 5, "A"),
        event("generate.started", 6, "C"),
        event("finish", 7, "B"),
        event("finish", 8, "A", 1),
        event("finish", 9, "C"),
    ]
    agents = [agent("A", 1, 2), agent("B", 1, 2), agent("A", 1, 2, graph_run=1), agent("C", 1, 2)]
    together = {"events": events, "agents": agents}
    assert metrics.followers(together) == [False, False, False, True]
    assert [each["node"] for each in metrics.upstream_agents(together)] == ["A"]
    assert not metrics.is_one_chain(together)
    assert metrics.is_one_chain(run)


def test_times() -> None:
    assert metrics.e2e(SERIAL).values == (1000.0, 1100.0)
    assert metrics.chain_latency([chain(9, (1,), chain_ms=[3.0, 9.0])]).mean == 6
    ttft = metrics.downstream_ttft(SERIAL)
    assert ttft is not None
    assert ttft.values == (100, 100, 140, 100)
    assert metrics.downstream_ttft([chain(100, (5,))]) is None
    assert metrics.first_ttft(SERIAL).values == (200, 200)
    assert metrics.by_agent(SERIAL, "total_ms")["B"].values == (120, 160)


def test_gaps_between_tokens() -> None:
    run = chain(100, (5,))
    run["answers"] = [
        answer("d0", "x", 0, (10, 20, 30, 70)),
        {**answer("d1", "y", 0, ()), "tokens": [[0, 1], [30, 3]]},
        answer("d1", "z", 0, (0, 500), done=False),
    ]
    assert metrics.gaps(run) == [10, 10, 40, 10, 10, 10]
    assert metrics.gaps(run, "d1") == [10, 10, 10]
    assert metrics.tpot([run]) == 10
    assert metrics.jitter([run], "d0") == 30
    assert metrics.jitter([run], "d1") == 0
    assert metrics.tpot([run], "d2") is None
    assert metrics.jitter([run], "d2") is None
    assert metrics.devices_of([run]) == ["d0", "d1"]


def test_first_tokens_in_steps() -> None:
    assert metrics.ttft_in_steps(QUICK) == 0.5
    assert metrics.ttft_in_steps([chain(100, (5,))]) is None


def test_hidden_share() -> None:
    assert metrics.hidden_share(QUICK, SERIAL) == pytest.approx((1050 - 830) / 220)
    assert metrics.hidden_share(SERIAL, SERIAL) == 0
    assert metrics.hidden_share([chain(100, (5,))], [chain(100, (5,))]) is None, "there is nothing to hide"
    at_once = chain(100, (5, 5))
    at_once["events"].sort(key=lambda each: each["name"], reverse=True)
    assert metrics.hidden_share([at_once], SERIAL) is None


def test_held_against_the_baseline() -> None:
    assert metrics.speedup(QUICK, SERIAL) == pytest.approx(1050 / 830 - 1)
    assert metrics.first_ttft_change(QUICK, SERIAL) == pytest.approx(201 / 200 - 1)
    slower = [chain(1000, (200, 5, 5), step=10.5)]
    assert metrics.upstream_slowdown(slower, SERIAL) == pytest.approx(0.05)
    assert metrics.upstream_slowdown([chain(100, (5,))], SERIAL) is None


def test_shares_of_prompts() -> None:
    run = chain(100, (5, 5, 5))
    run["agents"][0] |= {"static": 50, "wasted": 7}
    run["agents"][1] |= {"static": 60, "streamed": 20, "cached": 96, "wasted": 10}
    run["agents"][2] |= {"static": 30, "streamed": 0, "cached": 16}
    shares = metrics.prefill_shares(run)
    assert shares is not None
    assert (shares.static, shares.streamed, shares.cached, shares.left, shares.wasted) == (0.45, 0.1, 0.08, 0.37, 0.05)
    assert shares.reduction == 0.63
    assert metrics.prefill_shares(chain(100, (5,))) is None
    mean = metrics.mean_prefill([run, chain(100, (5, 5, 5)), chain(100, (5,))])
    assert mean is not None
    assert (mean.static, mean.left) == (0.225, pytest.approx(0.685))


def test_a_server_may_not_tell_what_was_cached() -> None:
    run = chain(100, (5, 5))
    run["agents"][1]["cached"] = None
    shares = metrics.prefill_shares(run)
    assert shares is not None
    assert shares.cached == 0


def test_equality() -> None:
    other = chain(850, (200, 5, 5), run=1, texts=[{"A": "x", "B": "else"}])
    other["agents"][1]["prompt_sha256"] = "another"
    assert metrics.equal([QUICK[0], other], SERIAL) == metrics.Equal(runs=2, ids=2, texts=1, counts=2)
    wrong = chain(850, (200, 5, 5), run=1)
    wrong["agents"][1] |= {"prompt_sha256": "another", "output_tokens": 2}
    assert metrics.equal([QUICK[0], wrong], SERIAL) == metrics.Equal(runs=2, ids=1, texts=2, counts=1)
    wrong["agents"][1] |= {"prompt_sha256": "prompt of B", "ids_equal": False}
    assert metrics.equal([wrong], SERIAL).ids == 0
    assert metrics.equal([chain(1, (5,), run=9)], SERIAL).runs == 0


def test_what_slows_down_is_shown() -> None:
    run = chain(100, (5,))
    run["answers"] = [answer("d0", "x", 0, (0, 100)), answer("d1", "y", 0, (0, 103)), answer("d2", "z", 0, (0, 101))]
    assert metrics.slow_devices([run]) == {"d1": pytest.approx(0.03)}
    runs = [chain(100.0 + number, (5,), at=f"2026-11-30T00:00:0{number}") for number in (5, 0, 1, 4, 2, 3)]
    assert metrics.drift(runs) == pytest.approx(104.5 / 100.5 - 1)
    assert metrics.drift(runs[:2]) is None


def test_groups_and_their_baseline() -> None:
    runs = [
        chain(1, (5, 5), mode="pingpong"),
        chain(1, (5, 5), mode="serial", run=1),
        chain(1, (5, 5), mode="serial", warmup=True),
        chain(1, (5, 5), mode="serial"),
        chain(1, (5, 5), mode="dp2-serial"),
        chain(1, (5, 5), mode="dp2-serial", chains=4),
        chain(1, (5, 5), mode="pingpong-many", chains=4),
        chain(1, (5, 5), mode="serial", case={"static": 50}),
    ]
    gpus, cpus = ([*compare(Results({"devices": [device]}, runs))] for device in ("cuda:0", "cpu:0"))
    small, large = gpus
    assert [(group.name, len(group.runs)) for group in large.groups] == [
        ("pingpong", 1),
        ("serial", 2),
        ("dp2-serial", 1),
        ("dp2-serial x4", 1),
        ("pingpong-many x4", 1),
    ]
    by_name = {group.name: group for group in large.groups}
    assert large.baseline(by_name["pingpong"]) is by_name["serial"]
    assert large.baseline(by_name["pingpong-many x4"]) is by_name["dp2-serial x4"]
    assert [run["run"] for run in by_name["serial"].runs] == [0, 1]
    assert (gpus[0].baseline_mode, cpus[0].baseline_mode) == ("serial", "dp2-serial")
    assert (small.case, varying([small.case, large.case])) == ((("static", 50),), ["static"])
    assert named(large.case, ["static"]) == "static 100"


def test_only_modes_with_edges_hide_something() -> None:
    base = Group("serial", (), 1, SERIAL)
    assert hidden_share(Group("pingpong", (), 1, QUICK), base) == metrics.hidden_share(QUICK, SERIAL)
    assert hidden_share(Group("tp2-serial", (), 1, QUICK), base) is None


def test_the_timeline() -> None:
    run = chain(200, (50, 10))
    for told in run["events"]:
        if told["name"] == "generate.started":
            told["data"]["prompt_tokens"] = 100
    run["agents"][1]["upstream"] = "A"
    run["agents"][0]["upstream"] = None
    run["events"] = [
        *run["events"][:1],
        event("first_token", 50, "A", ttft_ms=50),
        event("append.started", 55, "B", device="d1", tokens=64),
        event("append.complete", 60, "B", device="d1", tokens=64),
        event("append.started", 61, "B", device="d1", tokens=96),
        event("finalize", 69, "B", device="d1", static=64),
        *run["events"][1:3],
        event("first_token", 80, "B", device="d1", ttft_ms=10),
        *run["events"][3:],
    ]
    made = timeline(run, "t")
    bars = [(span.device, span.kind, span.node, round(span.start), round(span.end), span.tokens) for span in made.spans]
    assert bars == [
        ("d0", "prefill", "A", 0, 50, 100),
        ("d0", "decode", "A", 50, 70, 3),
        ("d1", "append", "B", 55, 60, 64),
        ("d1", "append", "B", 61, 69, 96),
        ("d1", "prefill", "B", 70, 80, 100),
        ("d1", "decode", "B", 80, 100, 3),
    ]
    assert [(flow.source.node, flow.target.node, flow.whole) for flow in made.flows] == [
        ("A", "B", False),
        ("A", "B", True),
    ]
    assert run["events"][-1]["data"] == {"agent": 1}  # the line stays as it was
    run, which = middle_run([chain(3, (1,)), chain(1, (1,)), chain(2, (1,))])
    assert (run["e2e_ms"], which) == (2, "the median run")
    run, which = middle_run([chain(3, (1,)), chain(2, (1,))])
    assert (run["e2e_ms"], which) == (2, "the faster of the two runs in the middle"), "their mean is the median"


def test_shares_by_node_and_edge() -> None:
    brought = agent("B", 5, 9, upstream="A", static=30, streamed=20, cached=60, pulled=25, wasted=5, lost=10)
    run = {"agents": [agent("A", 5, 9), brought, agent("B", 5, 9, cached=40, pulled=10)]}
    edges = metrics.by_edge([run, run])
    assert {edge: count for edge, (count, _) in edges.items()} == {("A", ""): 2, ("B", ""): 2, ("B", "A"): 2}
    _, of = edges[
        "B", "A"
    ]  # of what was pulled, 10 are found beside the edge's, and 15 are what it would have computed
    assert (of.static, of.streamed, of.pulled, of.cached, of.left) == (0.15, 0.2, 0.25, 0.0, pytest.approx(0.4))
    assert (of.wasted, of.lost, of.reduction) == (0.05, 0.1, pytest.approx(0.6))
    _, plain = edges["B", ""]
    assert (plain.pulled, plain.cached, plain.left) == (0.1, 0.3, 0.6)


def turn(request: int, begun: float, ended: float, conversation: int = 0) -> dict[str, Any]:
    """Two calls with a tool between them, each part of another length; `begun` tells turns apart."""
    calls = [
        {"node": "ask", "asked": begun + 1, "first": begun + 10, "ended": begun + 20, "ttft_ms": begun, "total_ms": 1},
        {
            "node": "answer",
            "asked": begun + 64,
            "first": begun + 70,
            "ended": ended - 2,
            "ttft_ms": begun,
            "total_ms": 2,
        },
    ]
    tools = [[begun + 22, begun + 62]]
    return {
        "conversation": conversation,
        "request": request,
        "begun": begun,
        "ended": ended,
        "calls": calls,
        "tools": tools,
    }


def tool_run(*turns: dict[str, Any], warmup: int = 0) -> dict[str, Any]:
    """A run of these turns, each a run of the graph; requests are with an engine 3 ms after the call."""
    agents, events = [], []
    for number, each in enumerate(turns):
        for call in each["calls"]:
            agents.append(agent(call["node"], call["ttft_ms"], call["total_ms"], graph_run=number))
            events.append(event("generate.started", call["asked"] + 3, call["node"], number))
    return {"turns": list(turns), "case": {"warmup": warmup}, "agents": agents, "events": events}


def test_where_the_time_of_a_turn_goes() -> None:
    (parts,) = turn_metrics.breakdowns(tool_run(turn(0, 0, 100)))
    assert parts == turn_metrics.Breakdown(wait=6, ttft=9, decode=38, tool=40, hand_over=7)
    assert parts.turn == 100


def test_parts_of_turns_are_told_with_their_percentiles() -> None:
    parts = turn_metrics.parts_of_turns([tool_run(turn(0, 0, 100)), tool_run(turn(0, 0, 130))])
    assert {name: (figures.mean, figures.min, figures.max) for name, figures in parts.items()} == {
        "wait": (6, 6, 6),
        "ttft": (9, 9, 9),
        "decode": (53, 38, 68),
        "tool": (40, 40, 40),
        "hand_over": (7, 7, 7),
        "turn": (115, 100, 130),
    }
    assert turn_metrics.parts_of_turns([]) == {}


def test_turns_count_in_the_steady_state_only() -> None:
    run = tool_run(
        turn(0, 0, 100), turn(0, 50, 160, 1), turn(1, 101, 300), turn(1, 161, 500, 1), turn(2, 301, 600), warmup=1
    )
    assert [each["begun"] for each in turn_metrics.steady(run)] == [101, 161, 301]
    assert turn_metrics.steady(tool_run(turn(0, 0, 100), warmup=1)) == []
    times = turn_metrics.turn_times([run])
    assert times is not None
    assert times.values == (199, 339, 299)
    first = turn_metrics.stream_ttft([run])
    assert {node: figures.values for node, figures in first.items()} == {"ask": (9,) * 3, "answer": (6,) * 3}


def test_percentiles() -> None:
    values = list(range(1, 101))
    assert [turn_metrics.percentile(values, share) for share in (0.5, 0.95, 0.99, 1)] == [50, 95, 99, 100]
    assert turn_metrics.percentile([7.0], 0.01) == 7


def test_a_first_token_that_shortens_nothing_is_said() -> None:
    slow, sooner = tool_run(turn(0, 0, 100)), tool_run(turn(0, 0, 100))
    sooner["turns"][0]["calls"][1]["first"] = 65
    results = Results({"devices": ["cpu:0"]}, [
        {**run, "mode": mode, "run": 0, "chains": 1, "warmup": False, "case": {"warmup": 0}}
        for mode, run in (("dp2-serial", slow), ("pingpong-many", sooner))
    ])  # fmt: skip
    said = [block.text for block in turn_blocks(compare(results)[0]) if isinstance(block, Text)]
    assert said == ["pingpong-many: the first tokens of answer come sooner, and turns are no shorter."]
    sooner["turns"][0]["ended"] = 90
    assert not [block for block in turn_blocks(compare(results)[0]) if isinstance(block, Text)]
