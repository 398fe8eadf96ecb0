"""A pytest plugin for foreign test suites: it keeps every outcome, and with `--edges` puts edges behind model calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from upstream_edges import Edges


class Outcomes:
    """Keeps the outcome of every test, and writes them with what the edges of all processes counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of one phase of a test; a failure in any phase counts."""
        if self._of.get(report.nodeid, "passed") == "passed":
            self._of[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected fails as one test."""
        if report.failed:
            self._of[report.nodeid] = "failed"

    def pytest_testnodedown(self, node: Any) -> None:
        """A process ended."""
        output = getattr(node, "workeroutput", {}).get("edges", {"counts": {}, "errors": ["a process died"]})
        self._counts.update(output["counts"])
        self._errors += output["errors"]

    def pytest_unconfigure(self) -> None:
        """Write all of it as JSON."""
        report = {"outcomes": self._of, "counts": self._counts, "errors": self._errors}
        self._path.write_text(json.dumps(report, indent=1, sort_keys=True))


class Worker:
    """Reports what the edges of this process counted to the one that collects it."""

    def __init__(self, edges: Edges | None) -> None:
        self._edges = edges

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """All tests of this process are over."""
        output: dict[str, Any] = {"counts": {}, "errors": []}
        if self._edges is not None:
            self._edges.finish()
            output = {"counts": dict(self._edges.tally.counts), "errors": self._edges.tally.errors}
        session.config.workeroutput["edges"] = output  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    parser.addoption("--edges", action="store_true", help="send every model call through the streaming edges")
    parser.addoption("--outcomes", help="write the outcome of every test to this JSON file (needs -n)")


def pytest_configure(config: pytest.Config) -> None:
    """Set up what the options ask for: outcomes where they are collected, edges where the tests run."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(_edges() if config.getoption("--edges") else None))
    elif config.getoption("--outcomes"):
        config.pluginmanager.register(Outcomes(Path(config.getoption("--outcomes"))))


def _edges() -> Edges:
    from upstream_edges import Edges  # not without `--edges`: tests as they are shall not even import this package

    edges = Edges()
    edges.patch()
    return edges
