"""The benchmark of the demo writes every run and a summary made from them."""

from __future__ import annotations

import json
from pathlib import Path

from langgraph_pingpong.bench import demo


def run_demo(output: Path, runs: int) -> None:
    demo.main(
        output,
        runs=runs,
        devices="fake:0,fake:1",
        dtype="float32",
        seed=1,
        max_tokens=40,
        brief_tokens=200,
        engine_args='{"max_num_seqs": 8}',
    )


def test_every_run_is_written_and_summed_up(tmp_path: Path) -> None:
    run_demo(tmp_path / "out" / "demo", 2)
    setup, *runs = [json.loads(line) for line in (tmp_path / "out" / "demo.jsonl").read_text().splitlines()]
    assert setup["setup"]["seed"] == 1
    assert 'engine arguments {"max_num_seqs": 8}' in (tmp_path / "out" / "demo.md").read_text()
    assert [(run["run"], run["overlap"]) for run in runs] == [(0, "off"), (0, "on"), (1, "on"), (1, "off")]
    assert all([agent["node"] for agent in run["agents"]][-1] == "writer" for run in runs)
    text = (tmp_path / "out" / "demo.md").read_text()
    assert text == demo.summary([setup, *runs])
    assert "equal with edges off and on: 2 of 2" in text
    assert "20 of 20 calls" in text
    for run in runs:
        assert f"{run['e2e_ms']:.0f}" in text


def test_texts_that_differ_are_counted(tmp_path: Path) -> None:
    run_demo(tmp_path / "demo", 1)
    lines = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    lines[1]["state"]["report"] = "something else"
    lines[2]["agents"][3]["ids_equal"] = False
    assert "equal with edges off and on: 0 of 1" in demo.summary(lines)
    assert "9 of 10 calls" in demo.summary(lines)
