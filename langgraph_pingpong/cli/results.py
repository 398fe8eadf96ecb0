"""`pingpong report`: what files of results come to, on the terminal, as Markdown with figures, or as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from langgraph_pingpong.cli.plain_errors import plain_errors
from langgraph_pingpong.errors import ConfigError


def report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULTS.JSONL...", help="Files that `pingpong bench` wrote.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one page with everything in it.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write NAME.md for each NAME.jsonl, and figures beside it.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(metavar="MODE", help="What modes are held against.")] = None,
) -> None:
    """Show what was measured: tables, and with --html or --out figures, too. All runs count, none is left out."""
    with plain_errors():
        from langgraph_pingpong.bench.document import save_pictures, to_console, to_html, to_markdown
        from langgraph_pingpong.bench.lines import Results
        from langgraph_pingpong.bench.report import report as report_on

        if out is not None:
            _check_names(files)
        reports = [report_on(Results.read(file), file.stem, baseline) for file in files]
        blocks = [block for each in reports for block in each]
        to_console(blocks, Console())
        if html is not None:
            page = to_html(blocks, ", ".join(file.stem for file in files))
            with _writing("--html", html):
                html.parent.mkdir(parents=True, exist_ok=True)
                html.write_text(page, encoding="utf-8")
        if out is not None:
            with _writing("--out", out):
                out.mkdir(parents=True, exist_ok=True)
                for file, each in zip(files, reports, strict=True):
                    save_pictures(each, out / "figures")
                    (out / f"{file.stem}.md").write_text(to_markdown(each, "figures"), encoding="utf-8")


def _check_names(files: Sequence[Path]) -> None:
    """Reports on files of one name would be written over each other."""
    seen: dict[str, Path] = {}
    for file in files:
        if (other := seen.setdefault(file.stem, file)) is not file:
            raise ConfigError(f"{other} and {file} have one name: --out takes one of them at a time.")


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}.") from None
