"""Files of results, written as they come and never changed.

The first line tells the setup. Then comes a line for each start of the program (a session), and one for each run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from langgraph_pingpong.errors import OtherResults

Line = dict[str, Any]

SAME = ("profile", "seed", "model", "dtype", "devices", "machine", "max_model_len", "engine_args", "exact", "switches")
"""What of the setup has to be equal in one file, beside the versions and the program's own code."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """Which run: mode, case, chains at once, number."""

    mode: str
    case: tuple[tuple[str, int], ...]
    chains: int
    run: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> RunKey:
        """That of a line."""
        return cls(line["mode"], tuple(line["case"].items()), line["chains"], line["run"])


@dataclass
class Results:
    """A file of results: its setup, and what was written after it."""

    setup: Line
    lines: list[Line] = field(default_factory=list)

    @property
    def runs(self) -> list[Line]:
        """All runs, warm-ups among them."""
        return [line for line in self.lines if "mode" in line]

    @property
    def sessions(self) -> list[Line]:
        """The starts of the program that wrote the file."""
        return [line for line in self.lines if "mode" not in line]

    @property
    def counted(self) -> list[Line]:
        """The runs without the warm-ups. None is ever left out."""
        return [run for run in self.runs if not run["warmup"]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            OtherResults: it cannot be read, or holds something else.
        """
        try:
            lines = [json.loads(line) for line in _whole_lines(path.read_text(encoding="utf-8"))]
            setup = dict(lines[0]["setup"])
        except (OSError, UnicodeDecodeError) as error:
            raise OtherResults(f"{path} cannot be read: {error}.") from None
        except (ValueError, LookupError, TypeError):
            raise OtherResults(f"{path} is no file of results: its first line tells no setup.") from None
        if "profile" not in setup:
            raise OtherResults(f"{path} holds results of another benchmark.")
        return cls(setup, lines[1:])


def _whole_lines(text: str) -> Iterator[str]:
    """Lines that were written to their end: a program that was killed may leave half of one."""
    return (line for line in text.splitlines(keepends=True) if line.endswith("\n"))


class ResultsFile:
    """A file of results that is being written. What is there stays, and is not measured again."""

    def __init__(self, path: Path, setup: Mapping[str, Any]) -> None:
        """Open or begin a file.

        Raises:
            OtherResults: the file belongs to another setup, holds something else, or cannot be written.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.is_file() and path.stat().st_size > 0
        except OSError as error:
            raise OtherResults(f"{path} cannot be written: {error.strerror}.") from None
        if not there:
            self._results = Results(dict(setup))
            self._append({"setup": setup})
            return
        self._results = Results.read(path)
        _check_same(path, self._results.setup, setup)
        _cut_half_line(path)

    @property
    def done(self) -> set[RunKey]:
        """The runs that are there and count."""
        return {RunKey.of(run) for run in self._results.counted}

    def begin(self, about: Line) -> int:
        """Note a start of the program; returns its number, from 0 on."""
        number = len(self._results.sessions)
        self._add({"session": number, **about})
        return number

    def add(self, run: Line) -> None:
        """Write a run, at once and to its end.

        Raises:
            OtherResults: the file cannot be written.
        """
        self._add(run)

    def _add(self, line: Line) -> None:
        self._append(line)
        self._results.lines.append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OtherResults(f"{self._path} cannot be written: {error.strerror}.") from None


def _cut_half_line(path: Path) -> None:
    text = path.read_bytes()
    end = text.rfind(b"\n") + 1
    if end < len(text):
        with path.open("r+b") as file:
            file.truncate(end)


def _check_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    apart = [name for name in (*SAME, "versions", "source") if there.get(name) != here.get(name)]
    if apart:
        name = apart[0]
        raise OtherResults(
            f"{path} was measured with {name} {_short(there.get(name))}, and now it is {_short(here.get(name))}."
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def read_all(paths: Sequence[Path]) -> list[Results]:
    """Several files.

    Raises:
        OtherResults: one cannot be read, or holds something else.
    """
    return [Results.read(path) for path in paths]
