"""The README's program runs, and what it says of it is so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from langgraph_pingpong import ChatPingPong

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
        for engine in model._serving().pool.engines:
            engine.time_scale = 0.03  # type: ignore[attr-defined]
        model.trace.subscribe(lambda e: finished.append(e.data["certificate"]) if e.name == "finish" else None)
        graph = build(model)
        results = [graph.invoke({"task": "Explain tide pools."}) for _ in range(2)]
    assert results[0] == results[1]
    assert [each["source"] for each in finished] == [None, None, None, "learned"]
    assert finished[-1]["streamed"] > 100


def test_its_figures_are_those_of_the_committed_results() -> None:
    tables = (RESULTS / "demo-cpu.md").read_text(encoding="utf-8")
    figures = tables[tables.index("## End to end") :].replace("## ", "### ").strip()
    assert figures in README.read_text(encoding="utf-8")


def test_its_printed_table_is_the_committed_output() -> None:
    output = (RESULTS / "demo-output.txt").read_text(encoding="utf-8")
    (table,) = blocks("text")
    assert table.strip()
    assert table.strip() in output
