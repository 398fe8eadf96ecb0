"""`pingpong report` on files of modelled runs: every table, every figure, one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langgraph_pingpong.bench import common, machine
from langgraph_pingpong.bench.document import Heading, Picture, Table, Text, to_html, to_markdown
from langgraph_pingpong.bench.lines import Results
from langgraph_pingpong.bench.metrics import Figures
from langgraph_pingpong.bench.report import report
from langgraph_pingpong.bench.results import (
    BEGIN,
    DEMO_BEGIN,
    DEMO_END,
    END,
    committed,
    main,
    section,
    title_of,
    with_section,
)
from langgraph_pingpong.cli import app
from langgraph_pingpong.errors import OtherResults
from langgraph_pingpong.viz import figures

PNG = b"\x89PNG"


def run(*command: str) -> Any:
    return CliRunner().invoke(app, list(command))


def bench(path: Path, *options: str) -> None:
    command = ["bench", "--devices", "fake:0,fake:1", "--output", str(path), *options]
    done = run(*command)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    modes = ["--modes", "serial,pingpong,pingpong-many,dp2-serial", "--chains", "1,2", "--runs", "2"]
    small = [option for value in ("static=150", "document=60", "output=8") for option in ("--set", value)]
    bench(folder / "chain.jsonl", *modes, *small)
    bench(folder / "grid.jsonl", "--profile", "sweep", "--runs", "1", "--warmup-runs", "0", "--set", "document=40")
    return folder


def test_the_report_tells_every_figure_and_its_circumstances(folder: Path) -> None:
    results = Results.read(folder / "chain.jsonl")
    text = to_markdown(report(results, "chain"))
    for run_line in results.counted:
        assert f"{run_line['e2e_ms']:.0f}" in text
    setup = results.setup
    for known in (
        setup["command"],
        setup["commit"],
        setup["source"],
        setup["machine"],
        "seed 42",
        "load of the machine",
    ):
        assert known in text
    for title in ("End to end", "Time to first token", "Time per output token", "Tokens of downstream", "Equal to"):
        assert f"### {title}" in text
    assert "| pingpong-many x2 | 2 |" in text
    assert text.count("2 of 2 | 2 of 2 | 2 of 2") == 4
    assert "12 counted runs and 6 warm-ups in 1 starts" in text


def test_many_cases_are_a_row_each(folder: Path) -> None:
    blocks = report(Results.read(folder / "grid.jsonl"), "grid")
    (grid,) = [block for block in blocks if isinstance(block, Table)]
    assert len(grid.rows) == 2 * 8
    assert list(grid.head[:4]) == ["mode", "upstream", "static", "downstream"]
    assert [block.name for block in blocks if isinstance(block, Picture)] == ["grid-surface-pingpong"]


def test_the_baseline_can_be_chosen(folder: Path) -> None:
    results = Results.read(folder / "chain.jsonl")
    assert "Baseline: serial." in to_markdown(report(results, "x"))
    assert "Baseline: pingpong." in to_markdown(report(results, "x", "pingpong"))


def test_a_baseline_that_did_not_run_is_refused(folder: Path) -> None:
    done = run("report", str(folder / "chain.jsonl"), "--baseline", "nope")
    assert (done.exit_code, "No run is of the mode 'nope'" in done.stderr) == (2, True)


def test_files_of_one_name_are_all_told_and_never_written_over_each_other(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "chain.jsonl"
    other.write_text((folder / "chain.jsonl").read_text().replace('"title": ""', '"title": "The other one"', 1))
    files = [str(folder / "chain.jsonl"), str(other)]
    done = run("report", *files)
    assert (done.exit_code, "The other one" in done.output, "long-prefill" in done.output) == (0, True, True)
    assert done.output.count("Baseline: serial.") == 2
    done = run("report", *files, "--out", str(tmp_path / "out"))
    assert (done.exit_code, "have one name" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_where_nothing_can_be_written_is_told(folder: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    place = tmp_path if option == "--html" else tmp_path / "file"
    first = (folder / "chain.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "x.jsonl").write_text(first)
    done = run("report", str(tmp_path / "x.jsonl"), option, str(place))
    assert (done.exit_code, f"{option} {place} cannot be written" in done.stderr) == (2, True)


def test_figures_are_drawn_and_the_page_holds_them(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [str(folder / "chain.jsonl"), str(folder / "grid.jsonl")]
    done = run("report", *files, "--html", str(tmp_path / "page.html"), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    pictures = sorted((tmp_path / "out" / "figures").iterdir(), key=lambda each: each.stem)
    kinds = ["e2e", "load", "timeline-dp2-serial", "timeline-pingpong", "timeline-pingpong-many", "timeline-serial"]
    assert [each.stem for each in pictures] == [
        *(f"chain-{kind}" for kind in (*kinds, "ttft")),
        "grid-surface-pingpong",
    ]
    assert all(each.read_bytes().startswith(PNG) for each in pictures)
    for name in ("chain", "grid"):
        text = (tmp_path / "out" / f"{name}.md").read_text()
        assert all(f"(figures/{each.name})" in text for each in pictures if each.stem.startswith(name))
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures)
    assert "<script" not in page


def test_every_run_is_seen_in_its_figure() -> None:
    pytest.importorskip("matplotlib")
    by_mode = {"serial": Figures.of([90.0, 100.0, 80.0]), "pingpong": Figures.of([70.0, 75.0, 60.0])}
    (axes,) = figures.e2e_runs(by_mode).axes
    assert axes.get_ylim() == (0, pytest.approx(110)), "the slowest run is not on the edge"
    assert list(axes.get_xticks()) == [0, 1, 2]
    assert len({line.get_marker() for line in axes.get_lines()}) == 2
    bars = figures.ttft_bars({mode: {"A": each} for mode, each in by_mode.items()})
    for each in (axes, *bars.axes):
        each.figure.draw_without_rendering()
        legend = each.get_legend()
        assert legend is not None
        assert legend.get_window_extent().x0 >= each.get_window_extent().x1 - 1


def test_what_is_no_file_of_results_is_told(tmp_path: Path) -> None:
    done = run("report", str(tmp_path / "none.jsonl"))
    assert (done.exit_code, "cannot be read" in done.stderr) == (2, True)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    done = run("report", str(tmp_path / "x.jsonl"))
    assert (done.exit_code, "tells no setup" in done.stderr) == (2, True)
    done = run("report", "docs/results/demo-cpu.jsonl")
    assert (done.exit_code, "of another benchmark" in done.stderr) == (2, True)
    with pytest.raises(OtherResults):
        Results.read(tmp_path)


def test_a_file_without_runs_is_no_error(folder: Path, tmp_path: Path) -> None:
    first = (folder / "chain.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "x.jsonl").write_text(first)
    assert "No run was counted yet." in to_markdown(report(Results.read(tmp_path / "x.jsonl"), "x"))


def test_what_is_odd_is_said(folder: Path) -> None:
    results = Results.read(folder / "chain.jsonl")
    for line in results.runs:
        for agent in line["agents"]:
            agent |= {"static": 0, "streamed": 0}
    text = to_markdown(report(results, "x"))
    assert "pingpong: nothing was prefilled ahead." in text
    assert "dp2-serial: nothing" not in text
    for line in results.runs:
        for answer in line["answers"]:
            if answer["device"] == "fake:1":
                answer["tokens"] = [[2 * at, count] for at, count in answer["tokens"]]
    assert "pingpong: fake:1 takes" in to_markdown(report(results, "x"))


def test_texts_are_escaped_on_the_page() -> None:
    page = to_html([Heading("A & B", 1), Text("`x < y`\n\nand"), Table(["<a>"], [["1"]])], "t")
    assert "<h1>A &amp; B</h1>" in page
    assert "<p><code>x &lt; y</code></p><p>and</p>" in page
    assert "<th>&lt;a&gt;</th>" in page


def test_lines_of_a_file_are_plain_json(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "chain.jsonl").read_text().splitlines()]
    assert list(lines[0]) == ["setup"]
    assert "session" in lines[1]


def test_committed_results_get_a_report_and_a_table_in_the_readme(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, readme = tmp_path / "docs" / "results", tmp_path / "README.md"
    results.mkdir(parents=True)
    for name in ("chain", "grid"):
        (results / f"{name}.jsonl").write_text((folder / f"{name}.jsonl").read_text())
    (results / "other.jsonl").write_text('{"setup": {"seed": 1}}\n{"run": 0}\n')
    readme.write_text(f"{DEMO_BEGIN}\n{DEMO_END}\n\n{BEGIN}\n{END}\n\nAfter.\n")
    main(results, readme)
    text = readme.read_text()
    assert text.startswith(f"{DEMO_BEGIN}\n{DEMO_END}\n\n{BEGIN}\n\n| ") and text.endswith(f"{END}\n\nAfter.\n")
    rows = [row for row in text.splitlines() if row.startswith("|")][2:]
    assert [row.split(" | ")[1] for row in rows] == ["serial", "pingpong", "pingpong-many", "dp2-serial"]
    title = title_of(committed(results)[results / "chain.jsonl"])
    assert rows[0].startswith(f"| [{title}, static=150, document=60, output=8](docs/results/chain.md) | serial | 2 |")
    assert "(docs/results/grid.md): 8 cases, 16 runs." in text
    assert sorted(path.name for path in results.glob("*.md")) == ["chain.md", "grid.md"]
    assert with_section(text, section(committed(results), tmp_path)) == text
    lines = (results / "chain.jsonl").read_text().splitlines(keepends=True)
    (results / "chain.jsonl").write_text("".join(lines[:-1]))
    assert with_section(text, section(committed(results), tmp_path)) != text


@pytest.mark.parametrize(
    ("visible", "names", "title"),
    [
        ("0,1", ["GPU 0", "GPU 1"], "w, m on cuda:0, cuda:1"),
        ("3,3", ["GPU 3 (every engine on this one)"], "w, m on one GPU as cuda:0, cuda:1"),
    ],
)
def test_one_gpu_as_two_devices_is_told(
    visible: str, names: list[str], title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "output_of", lambda tool, option, gpu, *query: f"GPU {gpu}")
    devices = ["cuda:0", "cuda:1"]
    assert common._gpus(devices) == names
    setup = {"title": "", "profile": "w", "model": "m", "devices": devices, "machine": common.machine(*names)}
    assert title_of(Results(setup)) == title


def test_without_results_the_readme_says_nothing(tmp_path: Path) -> None:
    readme = f"{BEGIN}\nsomething old\n{END}\n"
    assert with_section(readme, section(committed(tmp_path), tmp_path)) == f"{BEGIN}\n{END}\n"
    with pytest.raises(ValueError, match="lacks the lines"):
        with_section("nothing", "")
