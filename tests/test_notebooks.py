"""The notebooks: what is stored in them reads well, and they still run."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from graphs.five_agents import CHAIN

ROOT = Path(__file__).parent.parent
FIRST_RUN, YOUR_GRAPH, RESULTS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NODES = [node for node, *_ in CHAIN]
ROW = re.compile(r"(\w+) +\w+:\d +(\d+) ms +(\d+) ms +(\d+) of (\d+) tokens")


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def assert_shows_the_gain(notebook: Any) -> None:
    """A table row for each agent, downstream ones faster with edges on, and equal prompts and texts."""
    text = printed(notebook)
    rows = {node: [int(figure) for figure in figures] for node, *figures in ROW.findall(text)}
    assert list(rows) == NODES, text
    prefilled = {node: tokens for node, (_, _, tokens, _) in rows.items()}
    assert prefilled.pop(NODES[0]) == 0
    assert min(prefilled.values()) > 300
    off, on = (mean(rows[node][column] for node in NODES[1:]) for column in (0, 1))
    assert on < off, text
    assert "Prompt ids equal: True (10 prompts)" in text
    assert "Texts equal: True (5 answers)" in text


CALL = re.compile(r"(drafter|reviewer|editor) +(-|learned|dry run|declared) +(\d+) +(\d+) +(\d+) +(\d+)  (True|False)")


def assert_shows_every_source(notebook: Any) -> None:
    """Foreseen by nobody, then learned, by dry run, declared; streamed, nothing wasted, and the same without edges."""
    text = printed(notebook)
    rows = [
        (node, source, int(streamed), int(wasted)) for node, source, _, _, streamed, wasted, _ in CALL.findall(text)
    ]
    nodes = ("drafter", "reviewer", "editor")
    sources = ("-", "-", "-", "-", *["learned"] * 2, "-", *["dry run"] * 2, "-", *["declared"] * 2)
    assert [(node, source) for node, source, *_ in rows] == list(zip(nodes * 4, sources, strict=True)), text
    assert [streamed > 100 for _, _, streamed, _ in rows] == [source != "-" for source in sources], text
    assert sum(wasted for *_, wasted in rows) == 0
    assert "fallback       None" in text
    assert "Same result without edges: True" in text


def shown(notebook: Any, kind: str) -> list[str]:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data[kind] for output in outputs if output.output_type == "display_data" and kind in output.data]


def assert_shows_the_results(notebook: Any) -> None:
    """Two pictures and three tables, the tables being those of the committed report."""
    assert [len(picture) > 10_000 for picture in shown(notebook, "image/png")] == [True] * 2
    report = (ROOT / "docs" / "results" / "h200x2" / "long-prefill-14b.md").read_text(encoding="utf-8")
    tables = [table.strip() for table in shown(notebook, "text/markdown")]
    assert len(tables) == 3
    assert [table in report for table in tables] == [True] * 3


@pytest.mark.parametrize(
    ("path", "assert_it_shows", "outputs"),
    [
        (FIRST_RUN, assert_shows_the_gain, {"stdout"}),
        (YOUR_GRAPH, assert_shows_every_source, {"stdout"}),
        (RESULTS, assert_shows_the_results, {"stdout", None}),
    ],
    ids=lambda each: getattr(each, "stem", ""),
)
def test_stored_outputs_read_well(path: Path, assert_it_shows: Any, outputs: set[str | None]) -> None:
    notebook = read(path)
    assert len(notebook.cells) <= 15
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.get("name") for cell in cells for output in cell.outputs} == outputs
    assert_it_shows(notebook)


@pytest.fixture(scope="module", autouse=True)
def first_run(request: pytest.FixtureRequest) -> Iterator[Future[Any] | None]:
    """The notebook that needs engines, if it is to run at all: others run while its engines come up."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setenv("PYTHONPATH", str(ROOT))  # what is tested is this checkout
        asked = any(item.name == test_first_run_runs.__name__ for item in request.session.items)
        yield thread.submit(run, FIRST_RUN, 500) if asked else None


def run(path: Path, timeout_s: int) -> Any:
    notebook = read(path)
    for cell in code_cells(notebook):
        cell.outputs = []
    client = NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(path.parent)}})
    asyncio.run(client.async_execute())  # `execute` would leave an event loop behind in a thread
    return notebook


def test_your_graph_runs() -> None:
    assert_shows_every_source(run(YOUR_GRAPH, 100))


def test_results_run() -> None:
    assert_shows_the_results(run(RESULTS, 100))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_first_run_runs(first_run: Future[Any]) -> None:
    assert_shows_the_gain(first_run.result())
