"""The notebooks: what is stored in them reads well, and they still run."""

import re
from pathlib import Path
from statistics import mean
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from graphs.five_agents import CHAIN

FIRST_RUN = Path(__file__).parent.parent / "notebooks" / "01_first_run.ipynb"
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


def test_stored_outputs_read_well() -> None:
    notebook = read(FIRST_RUN)
    assert len(notebook.cells) <= 15
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.get("name") for cell in cells for output in cell.outputs} == {"stdout"}
    assert_shows_the_gain(notebook)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_first_run_runs() -> None:
    notebook = read(FIRST_RUN)
    for cell in code_cells(notebook):
        cell.outputs = []
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(FIRST_RUN.parent)}})
    client.execute()
    assert_shows_the_gain(notebook)
