"""`pingpong run --live`: lanes as text, from events made by hand and while a graph runs on modelled engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from langgraph_pingpong import FakeEngine
from langgraph_pingpong.cli import app
from langgraph_pingpong.cli.live import LiveScreen, lanes
from langgraph_pingpong.viz.timeline import timeline_of
from tests.traced_runs import append, called, event, finish, first, pingpong

SLOW = {"time_scale": 1.0, "decode_speed": 500.0, "prefill_speed": 200_000.0}


def scaled(factor: float) -> list[Any]:
    """The small run, slower."""
    events = pingpong(upstream="A")
    return [type(each)(each.name, each.t * factor, *(each.run, each.node, each.device, each.data)) for each in events]


def test_lanes_show_who_did_what_when() -> None:
    lines = [line.plain for line in lanes(timeline_of(scaled(25)), 100)]
    assert lines == [
        "d0  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒" + "█" * 40,
        "    ",
        "d1  " + " " * 62 + "▒" * 8 + "█" * 20,
        "    " + " " * 21 + "▄" * 19 + " " * 10 + "▄" * 5 + " " * 5 + "▄" * 2,
        "2,250 ms, 25 a character · █ answer · ▒ prompt, after the call · ▄ prompt, ahead of the call",
    ]


@pytest.mark.parametrize(("factor", "cell_ms"), [(25, 25), (28, 50), (56, 100), (1000, 1600)])
def test_a_longer_run_is_drawn_smaller(factor: float, cell_ms: int) -> None:
    lines = [line.plain for line in lanes(timeline_of(scaled(factor)), 104)]
    assert max(map(len, lines[:-1])) <= 104
    assert f"{90 * factor:,.0f} ms, {cell_ms:,} a character" in lines[-1]


def test_lanes_have_the_colours_of_agents() -> None:
    first_line, *_ = lanes(timeline_of(scaled(25)), 100)
    assert {str(span.style) for span in first_line.spans} == {"#0072b2"}


def test_nothing_yet_and_no_room() -> None:
    assert [line.plain for line in lanes(timeline_of([]), 80)] == ["0 ms, 25 a character"]
    assert list(lanes(timeline_of(scaled(25)), 1))


def test_each_agent_has_a_line_that_says_what_it_does() -> None:
    screen = LiveScreen(Console(width=80), count_tokens=len)

    def agents() -> list[str]:
        return [
            str(line) for line in screen._draw().renderables if " · " in str(line) and "a character" not in str(line)
        ]

    for each in (called("A", 0), first("A", 20), *append("B", 21, 40, 64)):
        screen(each)
    assert agents() == ["A · ", "B · d1 · 64 tokens prefilled ahead"]
    for each in (finish("A", 60), event("finalize", 62, "B", "d1", static=64, streamed=0, wasted=0, ready=0)):
        screen(each)
    screen(called("B", 62, "d1"))
    assert agents()[1] == "B · d1 · reads 100 tokens"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    start = FakeEngine.start

    async def slow_start(self: FakeEngine) -> None:
        vars(self).update(SLOW)
        await start(self)

    monkeypatch.setattr(FakeEngine, "start", slow_start)


Run = Callable[..., str]


@pytest.fixture
def run(slow: None) -> Run:
    def run(*options: str, **env: str) -> str:
        command = ["run", "test_cli:chain", "--task", "Say it.", "--devices", "fake:0,fake:1", *options]
        done = CliRunner().invoke(app, command, env={"COLUMNS": "90", **env})
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def test_a_terminal_shows_lanes_and_agents_while_they_work(run: Run) -> None:
    shown = run("--live", TTY_COMPATIBLE="1", NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n").partition("static + streamed")[0]
    frames = plain.split("fake:0  ")[1:]
    assert len(frames) > 3
    lengths = [len(re.findall("█", frame.splitlines()[0])) for frame in frames[:-1]]
    assert len(set(lengths)) > 2  # it grows
    assert re.search(r"^planner · fake:0 · \d+ tokens · \d\.\d s · \d+ tokens/s", plain, re.MULTILINE)
    assert re.search(r"^writer · fake:1 · \d+ tokens prefilled ahead", plain, re.MULTILINE)
    assert re.search(r"^planner · fake:0 · first token after [\d,]+ ms · \d+ tokens", frames[-2], re.MULTILINE)
    assert "fake:1  " in frames[-1] and "▄" in frames[-1]  # what stays


def test_a_file_gets_the_answers_and_the_lanes_once(run: Run) -> None:
    shown = run("--live", "--compare")
    assert shown.count("a character") == 2 and shown.count("\nfake:0  ") == 2
    off, on = shown.split("overlap on", 1)
    assert "▄" not in off and "▄" in on
    assert len(re.findall(r"^planner · .* tokens", shown, re.MULTILINE)) == 2
    assert "a character" not in run()
