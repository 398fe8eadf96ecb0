"""The README's program runs, and what it says of it is so."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.bench.document import to_markdown
from langgraph_pingpong.bench.results import (
    DEMO_BEGIN,
    DEMO_END,
    committed,
    demo_section,
    report_on,
    section,
    with_section,
)
from tests.attentive import attentive

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "docs" / "results"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_program_streams_from_the_second_run_on(tmp_path: Path) -> None:
    (program,) = blocks("python")
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    build = runpy.run_path(str(path), run_name="program")["build"]
    finished: list[dict[str, Any]] = []
    with ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=150) as model:
        attentive(model).trace.subscribe(
            lambda e: finished.append(e.data["certificate"]) if e.name == "finish" else None
        )
        graph = build(model)
        results = [graph.invoke({"task": "Explain tide pools."}) for _ in range(2)]
    assert results[0] == results[1]
    assert [each["source"] for each in finished] == [None, None, None, "learned"]
    assert finished[-1]["streamed"] > 100


def test_every_block_is_run_by_a_test() -> None:
    text = README.read_text(encoding="utf-8")
    languages = re.findall(r"^```(\w*)\n", text, re.MULTILINE)[::2]  # the others end a block
    assert sorted(languages) == ["python", "sh"], "a new block needs a test that runs it"


def test_the_commands_exist() -> None:
    """`make test` runs this test, so they are gone through without being run."""
    programs = {"demo": "pingpong", "test": "pytest"}
    commands = re.findall(r"^make (\S+)", "".join(blocks("sh")), re.MULTILINE)
    assert set(commands) == set(programs)
    for command in commands:
        done = subprocess.run(["make", "-n", command], cwd=README.parent, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert f".venv/bin/{programs[command]}" in done.stdout


def means(name: str) -> str:
    """A result file in short: end to end off and on, first tokens off and on, equal ids, equal texts."""
    _, *runs = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    off, on = ([run for run in runs if run["overlap"] == mode] for mode in ("off", "on"))
    e2e = [mean(run["e2e_ms"] for run in mode) for mode in (off, on)]
    ttft = [mean(agent["ttft_ms"] for run in mode for agent in run["agents"][1:]) for mode in (off, on)]
    ids = [agent["ids_equal"] for run in runs for agent in run["agents"]]
    texts = [before["state"] == after["state"] for before, after in zip(off, on, strict=True)]
    figures = [f"{figure:.0f}" for figure in (*e2e, *ttft)]
    return " | ".join([*figures, f"{sum(ids)} of {len(ids)}", f"{sum(texts)} of {len(texts)}"])


def test_its_figures_are_those_of_the_committed_results() -> None:
    of_the_demo = README.read_text(encoding="utf-8").partition(DEMO_END)[0]
    rows = re.findall(r"\| \[.*?\]\(docs/results/(.*?)\.md\) \| (.*) \|", of_the_demo)
    assert len(rows) == 2
    for name, figures in rows:
        assert figures == means(name)


def test_the_tables_of_results_are_made_from_the_committed_files() -> None:
    readme = README.read_text(encoding="utf-8")
    assert with_section(readme, section(committed(RESULTS), README.parent)) == readme, "run make results"
    made = demo_section(RESULTS, README.parent)
    assert with_section(readme, made, DEMO_BEGIN, DEMO_END) == readme, "run make results"


def test_reports_are_made_from_the_files_beside_them() -> None:
    for path, results in committed(RESULTS).items():
        report = path.with_suffix(".md").read_text(encoding="utf-8")
        assert report == to_markdown(report_on(path, results), "figures"), f"run make results for {path}"
