"""`pingpong report`: what files of results come to, on the terminal, as Markdown with figures, or as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from langgraph_pingpong.cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from langgraph_pingpong.bench.document import Block


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

        reports: dict[str, list[Block]] = {
            file.stem: report_on(Results.read(file), file.stem, baseline) for file in files
        }
        blocks = [block for each in reports.values() for block in each]
        to_console(blocks, Console())
        if html is not None:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(to_html(blocks, ", ".join(reports)), encoding="utf-8")
        if out is not None:
            for name, each in reports.items():
                save_pictures(each, out / "figures")
                (out / f"{name}.md").write_text(to_markdown(each, "figures"), encoding="utf-8")
