"""Run the test suites of LangGraph and LangChain twice: as they are, and with streaming edges behind every model call.

    .venv/bin/python scripts/upstream_suites.py [--quick]

The suites come from PyPI's source distributions of the installed releases. A test that passes as it is and fails with
edges, also when it is repeated, is a new failure. The exit code is 1 if there is one, or if any code of this package
raised what it should not. Nothing is installed into the environment that runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "upstream-suites.md"
REQUIREMENTS = ROOT / "requirements" / "upstream-suites.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "langgraph-pingpong" / "upstream-suites"

PROCESSES = 2
TEST_WITHIN_S = 120
SUITE_WITHIN_S = 900
"""One run of one suite that takes longer is ended, in seconds."""

SHOWN_ERRORS = 20
"""Errors of this package that are printed in full; the JSON holds all."""


@dataclass(frozen=True)
class Suite:
    """The tests of one distribution."""

    package: str
    tests: str
    left_out: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The distribution with the release that is installed."""
        return f"{self.package} {version(self.package)}"


SUITES = (
    Suite(
        "langgraph",
        "tests",
        # Servers, databases, and a benchmark.
        left_out=("example_app", "test_remote_graph*", "test_prune_postgres.py", "test_delta_channel_benchmark.py"),
    ),
    Suite("langgraph-prebuilt", "tests"),
    Suite("langchain", "tests/unit_tests/agents", options=("--disable-socket", "--allow-unix-socket")),
)


@dataclass(frozen=True)
class Run:
    """What one run of a suite gave."""

    outcomes: Mapping[str, str]
    counts: Mapping[str, int]
    errors: Sequence[str]
    seconds: float

    def having(self, outcome: str) -> set[str]:
        """The tests with an outcome."""
        return {test for test, had in self.outcomes.items() if had == outcome}


@dataclass(frozen=True)
class Comparison:
    """A suite as it is, and with edges. In a quick comparison only tests that fail with edges were run as they are."""

    suite: str
    tests: int
    passed: int
    failed_plain: list[str]
    failed_with_edges: list[str]
    new_failures: list[str]
    unsteady: list[str]
    """Failed with edges only, and passed when repeated with edges."""
    counts: Mapping[str, int]
    errors: Sequence[str]
    seconds_plain: float
    seconds_with_edges: float

    @property
    def good(self) -> bool:
        """Whether the edges changed nothing and raised nothing."""
        return not self.new_failures and not self.errors


@dataclass(frozen=True)
class Bench:
    """Where suites are unpacked and what they run with."""

    cache: Path
    processes: int = PROCESSES
    _folders: dict[str, Path] = field(default_factory=dict)

    def folder(self, suite: Suite) -> Path:
        """The unpacked tests of a suite."""
        return _once(self.cache / suite.name.replace(" ", "-"), lambda target: _download_tests(suite, target))

    def packages(self) -> Path:
        """What the suites need beside the packages that are installed."""
        stamp = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
        name = f"packages-{sys.version_info.major}.{sys.version_info.minor}-{stamp}"
        return _once(self.cache / name, _install)

    def run(self, suite: Suite, edges: bool, only: Iterable[str] = ()) -> Run:
        """Run a suite, or only some of its tests."""
        label = f"{suite.name} {'with edges' if edges else 'as it is'}"
        report = self.cache / "report.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, *_pytest_arguments(suite, self.processes, only), f"--outcomes={report}"]
        folder, environment = self.folder(suite), self._environment()
        started = time.monotonic()
        output = _run_within(command + ["--edges"] * edges, folder, environment)
        if not report.exists():
            raise SystemExit(f"{label} did not come to its end:\n{output[-5000:]}")
        seconds = time.monotonic() - started
        run = Run(**json.loads(report.read_text()), seconds=seconds)
        _say(f"{label}: {len(run.outcomes)} tests, {len(run.having('failed'))} failed, {seconds:.0f} s")
        return run

    def _environment(self) -> dict[str, str]:
        ours = (self.packages(), ROOT / "scripts", ROOT)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, ours)),
            "PYTHONHASHSEED": "0",
            "NO_DOCKER": "true",
            "HF_HUB_OFFLINE": "1",
            "LANGSMITH_TRACING": "false",
        }


def _pytest_arguments(suite: Suite, processes: int, only: Iterable[str]) -> list[str]:
    """A file's tests run in one process and in order, so that what edges learn does not depend on chance."""
    left_out = [f"--ignore-glob=**/{name}" for name in suite.left_out]
    settings = ["-q", "--tb=short", "-o", "addopts=", "--snapshot-warn-unused", "--benchmark-disable"]
    plugins = ["-p", "no:cacheprovider", "-p", "upstream_plugin"]
    spread = ["-n", str(processes), "--dist", "loadfile", f"--timeout={TEST_WITHIN_S}"]
    tests = sorted(only) or [suite.tests]
    return ["-m", "pytest", *settings, *plugins, *spread, *suite.options, *left_out, *tests]


def compare(bench: Bench, suite: Suite, quick: bool) -> Comparison:
    """Run a suite with edges and as it is."""
    edges = bench.run(suite, edges=True)
    failed = edges.having("failed")
    plain = bench.run(suite, edges=False, only=failed if quick else ()) if failed or not quick else None
    failed_plain = plain.having("failed") if plain else set()
    suspects = failed - failed_plain
    repeated = bench.run(suite, edges=True, only=suspects).having("failed") if suspects else set()
    return Comparison(
        suite=suite.name,
        tests=len(edges.outcomes),
        passed=len(edges.having("passed")),
        failed_plain=sorted(failed_plain),
        failed_with_edges=sorted(failed),
        new_failures=sorted(suspects & repeated),
        unsteady=sorted(suspects - repeated),
        counts=edges.counts,
        errors=edges.errors,
        seconds_plain=plain.seconds if plain else 0.0,
        seconds_with_edges=edges.seconds,
    )


# -- figures -------------------------------------------------------------------------------------------------

FIGURES = {
    "tests that call models": "tests that call models",
    "model calls in tasks": "calls in tasks",
    "plans made": "plans made",
    "plans failed": "failed",
    "edges opened": "edges opened",
    "edges claimed": "claimed",
    "edges dropped": "dropped",
    "prompts with a right prefill": "prefills right",
    "prompts with a wasted prefill": "wasted",
    "supersteps foreseen": "supersteps foreseen",
}
"""The counts that have a column, and its head."""


def tables(comparisons: Sequence[Comparison]) -> str:
    """All figures as Markdown."""
    outcomes = _table(
        ["suite", "tests", "passed with edges", "failed as it is", "failed with edges", "new failures", "errors"],
        [[c.suite, c.tests, c.passed, *map(len, _failures(c)), len(c.errors)] for c in comparisons],
    )
    counts = _table(
        ["suite", *FIGURES.values()],
        [[c.suite, *(c.counts.get(name, 0) for name in FIGURES)] for c in comparisons],
    )
    return "\n\n".join([outcomes, counts, *_lists(comparisons)])


def _failures(comparison: Comparison) -> tuple[list[str], ...]:
    return comparison.failed_plain, comparison.failed_with_edges, comparison.new_failures


def _lists(comparisons: Sequence[Comparison]) -> Iterable[str]:
    yield from _list("New failures", [(c.suite, c.new_failures) for c in comparisons])
    yield from _list("Failed once with edges, passed when repeated", [(c.suite, c.unsteady) for c in comparisons])
    yield from _list("Failed as it is", [(c.suite, c.failed_plain) for c in comparisons])
    yield from _list(
        "Edges dropped and things not done, by reason", [(c.suite, _reasons(c.counts)) for c in comparisons]
    )


def _reasons(counts: Mapping[str, int]) -> list[str]:
    return [f"{count} {name}" for name, count in sorted(counts.items()) if ": " in name]


def _list(title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> Iterable[str]:
    lines = [f"- {suite}: `{entry}`" for suite, entries in rows for entry in entries]
    if lines:
        yield "\n".join([f"{title}:", "", *lines])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_document(text: str) -> None:
    """Put the figures between the markers of the document."""
    between = re.compile(r"(?<=<!-- figures -->\n).*(?=<!-- end of figures -->)", re.DOTALL)
    DOCUMENT.write_text(between.sub(lambda _: f"\n{text}\n\n", DOCUMENT.read_text()))


# -- files and processes -------------------------------------------------------------------------------------


def _once(target: Path, make: Any) -> Path:
    """A folder that is made if it is not there; half of one is never left under its name."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as parent:
            draft = Path(parent) / "draft"
            draft.mkdir()
            make(draft)
            shutil.move(draft, target)
    return target


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments], check=True)


def _install(target: Path) -> None:
    _pip("install", "--no-deps", "--target", str(target), "-r", str(REQUIREMENTS))


def _download_tests(suite: Suite, target: Path) -> None:
    """Only the tests: the code that they test is what is installed."""
    release = f"{suite.package}=={version(suite.package)}"
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--no-deps", "--no-binary", suite.package, "--dest", folder, release)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            for member in archive:
                _, _, member.name = member.name.partition("/")
                if member.name.startswith("tests/") or member.name == "pyproject.toml":
                    archive.extract(member, target, filter="data")


def _run_within(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """The output of a command; when its time is over, it and its processes are ended."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=SUITE_WITHIN_S)[0]
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"ended after {SUITE_WITHIN_S} s"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [suite.package for suite in SUITES]
    parser.add_argument("--quick", action="store_true", help="run as they are only the tests that fail with edges")
    parser.add_argument("--only", choices=names, help="one suite")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where suites are unpacked (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where the figures go (default: figures.json in the cache)")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all suites and write the figures; those of a quick or partial run do not go into the document."""
    chosen = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the tests end with this
    bench = Bench(chosen.cache.resolve(), chosen.processes)
    suites = [suite for suite in SUITES if chosen.only in (None, suite.package)]
    comparisons = [compare(bench, suite, chosen.quick) for suite in suites]
    text = tables(comparisons)
    _say(f"\n{text}\n")
    for error in [error for c in comparisons for error in c.errors][:SHOWN_ERRORS]:
        _say(error)
    (chosen.json or bench.cache / "figures.json").write_text(json.dumps([asdict(c) for c in comparisons], indent=1))
    if not chosen.quick and not chosen.only:
        write_document(text)
    return 0 if all(comparison.good for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
