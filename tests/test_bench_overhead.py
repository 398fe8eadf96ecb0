"""The benchmark of the overhead measures runs that stream, and writes every one and a summary made from them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from langgraph_pingpong.bench import overhead
from langgraph_pingpong.bench.overhead import Case
from langgraph_pingpong.trace import JsonLines


def test_every_run_is_written_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CASES", [Case(3, 100, 48), Case(2, 50, 48, messages=4)])
    overhead.main(tmp_path / "out" / "overhead", runs=2)
    setup, *runs = [json.loads(line) for line in (tmp_path / "out" / "overhead.jsonl").read_text().splitlines()]
    order = [(0, "off"), (0, "on"), (1, "on"), (1, "off")]
    assert [(run["nodes"], run["run"], run["mode"]) for run in runs] == [
        (nodes, *each) for nodes in (3, 2) for each in order
    ]
    assert {run["mode"]: sum(run["streamed"]) > 30 for run in runs} == {"off": False, "on": True}
    assert all(len(run["streamed"]) == run["nodes"] - 1 and sum(run["wasted"]) == 0 for run in runs)
    assert all(min(run["token_us"], run["cpu_ms"]) > 0 for run in runs)
    text = (tmp_path / "out" / "overhead.md").read_text()
    assert text == overhead.summary([setup, *runs])
    for mode in ("off", "on"):
        cpu = median(run["cpu_ms"] for run in runs if run["nodes"] == 3 and run["mode"] == mode)
        assert f"| {cpu:.2f} |" in text


def test_tracing_is_held_against_nobody_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "TRACED_CASES", [Case(2, 100, 48)])
    heard: list[str] = []
    write = JsonLines.__call__
    monkeypatch.setattr(JsonLines, "__call__", lambda lines, event: (heard.append(event.name), write(lines, event)))
    overhead.main(tmp_path / "tracing", runs=2, tracing=True)
    setup, *runs = [json.loads(line) for line in (tmp_path / "tracing.jsonl").read_text().splitlines()]
    assert [run["mode"] for run in runs] == ["on", "traced", "traced", "on"]
    assert all(sum(run["streamed"]) > 20 for run in runs)  # the last block may be left to the answer
    assert heard.count("finish") == 2 * (2 + overhead.LEARNING_RUNS)  # both nodes, in the traced runs only
    text = (tmp_path / "tracing.md").read_text()
    assert text == overhead.summary([setup, *runs])
    plain, traced = (median(run["e2e_ms"] for run in runs if run["mode"] == mode) for mode in overhead.TRACING)
    assert f"{traced - plain:.2f} | {traced / plain:.3f} |" in text


COMMITTED = Path(__file__).parent.parent / "docs" / "results"


@pytest.mark.parametrize("name", ["overhead", "overhead-tracing", "overhead-paced"])
def test_the_committed_summary_is_made_from_the_file_beside_it(name: str) -> None:
    lines = [json.loads(line) for line in (COMMITTED / f"{name}.jsonl").read_text().splitlines()]
    assert (COMMITTED / f"{name}.md").read_text() == overhead.summary(lines)


@pytest.mark.parametrize("tokens", [1, 16, 1_024])
def test_an_engine_answers_with_so_many_tokens(tokens: int) -> None:
    engine = overhead.idle_engine("fake:0", None, Case(2, 100, tokens))
    first, second = next(engine.answers), next(engine.answers)
    for answer in (first, second):
        assert len(answer) == tokens
        assert [delta.finish_reason for delta in answer] == [None] * (tokens - 1) + ["stop"]
    assert tokens == 1 or first != second
