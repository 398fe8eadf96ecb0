"""A report as headings, texts, tables and figures, and its forms: Markdown, HTML, and a terminal."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table as RichTable

from langgraph_pingpong.bench.common import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawn


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading, of level 1 or lower."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, in Markdown."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts. All columns but the first hold figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure under a name that serves as a file's; drawn only where it is shown."""

    name: str
    alt: str
    draw: Callable[[], Drawn]


Block = Heading | Text | Table | Picture

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}img{max-width:100%}code{background:#f3f3f3;white-space:pre-wrap}"""


def to_markdown(blocks: Iterable[Block], pictures: str = "") -> str:
    """The report in Markdown, without pictures unless the folder they are in is given, as the text should link it."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"{'#' * level} {text}")
            case Text(text):
                parts.append(text)
            case Table(head, rows):
                parts.append(table(head, rows))
            case Picture(name, alt) if pictures:
                parts.append(f"![{alt}]({pictures}/{name}.png)")
    return "\n\n".join(parts) + "\n"


def to_html(blocks: Iterable[Block], title: str) -> str:
    """The report as one page with everything in it."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"<h{level}>{html.escape(text)}</h{level}>")
            case Text(text):
                parts.append(f"<p>{_inline(text)}</p>")
            case Table(head, rows):
                parts.append(_html_table(head, rows))
            case Picture(_, alt, draw):
                data = base64.b64encode(_png(draw())).decode()
                parts.append(f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">')
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_inline(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _inline(text: str) -> str:
    """Of Markdown, what the reports use within a paragraph: code, and paragraphs in one text."""
    parts = html.escape(text).split("`")
    marked = "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
    return marked.replace("\n\n", "</p><p>")


def to_console(blocks: Iterable[Block], console: Console) -> None:
    """Show the report without its pictures."""
    for block in blocks:
        match block:
            case Heading(text, level):
                console.rule(text, align="left", style="bold" if level < 3 else "dim")
            case Text(text):
                console.print(Markdown(text))
            case Table(head, rows):
                console.print(_rich_table(head, rows))
    console.print()


def _rich_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> RichTable:
    shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(head):
        shown.add_column(name, justify="right" if place else "left", overflow="fold", no_wrap=not place)
    for row in rows:
        shown.add_row(*row)
    return shown


def save_pictures(blocks: Iterable[Block], folder: Path) -> None:
    """Draw the figures into files NAME.png."""
    for block in blocks:
        if isinstance(block, Picture):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{block.name}.png").write_bytes(_png(block.draw()))


def _png(figure: Drawn) -> bytes:
    data = io.BytesIO()
    # Without the version of matplotlib in it, the same figures give the same file.
    figure.savefig(data, format="png", dpi=110, metadata={"Software": None})
    return data.getvalue()
