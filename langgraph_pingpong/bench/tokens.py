"""What it costs to keep a prompt's ids up to date while a text streams in, and how many of them are held back.

`python -m langgraph_pingpong.bench.tokens [MODEL ...] [--out docs/results/tokens.md]` measures the tokenizers of the
default model and of the models named, which are folders or Hugging Face ids.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from langgraph_pingpong.default_model import MODEL_NAME, default_model_path
from langgraph_pingpong.growing import GrowingIds
from langgraph_pingpong.tokens import ChatTemplate, load_tokenizer

SEED = 20261129
CONTEXTS = (1_000, 8_000, 64_000)
"""Tokens of the prompt before the streamed text."""
PIECES = 400
"""Pieces timed at each context."""
RUN = 50_000
"""Characters of a text without a break."""
CUT = 1_500
"""Characters of each text that is cut everywhere."""

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Stands in where a tokenizer has no template: none is used here."""

SENTENCES = {
    "Chinese": [
        "潮池每天排空两次。",
        "水里的生物学会了等待\uff0c它们把壳关紧\uff0c保存一点海水\uff01",
        "有三种螃蟹和ABC型的海葵住在这里。",
    ],
    "Arabic": [
        "تفرغ برك المد والجزر مرتين في اليوم. ",
        "تعلّمت الكائنات هناك أن تنتظر، فهي تغلق أصدافها! ",
        "كم عددها؟ ٣ أو ٤. ",
    ],
    "Emoji": [
        "So \U0001f469\u200d\U0001f680\U0001f469\u200d\U0001f680 fly \U0001f1ef\U0001f1f5, ",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 wave\U0001f44b\U0001f3fd! ",
        "\u2764\ufe0f\u200d\U0001f525 and e\u0301\u0323 too\u2026\n",
    ],
    "Markdown": [
        "# Tide pools\n\n- **Empty** twice a day; it'll fill.\n- See <https://example.com/a?b=1>.\n\n",
        "```python\nx = {'a': [1, 2.5]}\n```\n\n",
        "| a | b |\n|---|---|\n| 1,234 | x |\n\n",
    ],
}
PROSE = "".join(topics.values())
"""The topics of Python's own help."""

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A table and what it shows."""

    title: str
    note: str
    columns: Row
    rows: list[Row]


def texts(rng: random.Random) -> dict[str, str]:
    """Texts of several kinds, `CUT` characters each."""
    said = {"English": PROSE, "Code": inspect.getsource(argparse)}
    for name, sentences in SENTENCES.items():
        said[name] = "".join(rng.choice(sentences) for _ in range(CUT))
    return {name: text[:CUT] for name, text in said.items()}


def runs(rng: random.Random) -> dict[str, str]:
    """Texts in which no word ends, `RUN` characters each."""
    characters = [chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(RUN)]
    return {
        "one letter": "a" * RUN,
        "base64": base64.b64encode(rng.randbytes(RUN)).decode()[:RUN],
        "Chinese, no space or stop": "".join(characters),
    }


def token_pieces(template: ChatTemplate, text: str) -> list[str]:
    """The text cut at its own tokens, as a model streams it; a piece never ends within a character."""
    encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = sorted({start for start, _ in encoding["offset_mapping"]} - {0, len(text)})
    return [text[start:end] for start, end in pairwise([0, *starts, len(text)])]


def append_times(growing: GrowingIds, pieces: Sequence[str]) -> list[float]:
    """How long each append took, in microseconds, shortest first."""
    times = []
    for piece in pieces:
        started = time.perf_counter_ns()
        growing.append(piece)
        times.append((time.perf_counter_ns() - started) / 1000)
    return sorted(times)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of the ordered values does not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def kind_rows(name: str, template: ChatTemplate) -> Iterator[Row]:
    """The rule that applies, and how long it takes to take the tokenizer apart and to check the rule."""
    started = time.perf_counter()
    kind = type(ChatTemplate(template.tokenizer, CHAT).growing()).__name__
    yield (name, kind, f"{(time.perf_counter() - started) * 1000:.0f}")


def cost_rows(name: str, template: ChatTemplate) -> Iterator[Row]:
    """Microseconds per streamed token at each context length."""
    pieces = token_pieces(template, PROSE[: 10 * PIECES])[:PIECES]
    characters = len("".join(pieces)) / len(pieces)
    for context in CONTEXTS:
        growing = template.growing((PROSE * 2)[: int(context * characters)])
        prompt = len(growing.ids) + len(growing.rest())
        times = append_times(growing, pieces)
        yield (name, f"{prompt:,}", f"{quantile(times, 0.5):.0f}", f"{quantile(times, 0.99):.0f}")


def run_rows(name: str, template: ChatTemplate, rng: random.Random) -> Iterator[Row]:
    """Microseconds per piece of four characters in a text without a break."""
    for kind, text in runs(rng).items():
        growing = template.growing("Look: ")
        times = append_times(growing, [text[at : at + 4] for at in range(0, len(text), 4)])
        figures = (quantile(times, 0.5), quantile(times, 0.99), times[-1], sum(times) / len(times))
        yield (name, kind, *(f"{figure:.0f}" for figure in figures), f"{len(growing.rest()):,}")


def held_rows(name: str, template: ChatTemplate, rng: random.Random) -> Iterator[Row]:
    """How many ids of the text so far a later text changed, and how many were held back for that."""
    for kind, text in texts(rng).items():
        for cut_at, pieces in (("tokens", token_pieces(template, text)), ("characters", list(text))):
            needed, held, rollbacks = held_back(template, pieces)
            figures = (quantile(needed, 0.99), needed[-1], sum(held) / len(held), held[-1], rollbacks)
            yield (name, kind, cut_at, f"{len(needed):,}", *(f"{figure:.3g}" for figure in figures))


def held_back(template: ChatTemplate, pieces: Sequence[str]) -> tuple[list[int], list[int], int]:
    """Ids that had to be held back and that were, after each piece, both in order; and ids given out wrongly."""
    before, after = "Review this draft.\n\n", "\n\nList one flaw."
    whole = template.encode(before + "".join(pieces) + after)
    growing, said = template.growing(before), before
    needed, held, rollbacks = [], [], 0
    for piece in pieces:
        growing.append(piece)
        said += piece
        ids = template.encode(said)
        same = next((i for i, pair in enumerate(zip(ids, whole, strict=False)) if pair[0] != pair[1]), len(ids))
        needed.append(len(ids) - same)
        held.append(len(ids) - len(growing.ids))
        rollbacks += growing.ids != whole[: len(growing.ids)]
    return sorted(needed), sorted(held), rollbacks


def measure(templates: dict[str, ChatTemplate]) -> list[Section]:
    """Every table, for every tokenizer."""
    rng = random.Random(SEED)

    def rows(of: Callable[[str, ChatTemplate], Iterator[Row]]) -> list[Row]:
        return [row for name, template in templates.items() for row in of(name, template)]

    return [
        Section(
            "Rules",
            "The class in `growing.py` that fits the tokenizer, and the time to take it apart and check the rule.",
            ("tokenizer", "kind of growing ids", "made ready, ms"),
            rows(kind_rows),
        ),
        Section(
            "Cost of a streamed token",
            f"{PIECES} pieces, cut at the tokenizer's own tokens, appended to a prompt of that length.",
            ("tokenizer", "context, tokens", "median us", "p99 us"),
            rows(cost_rows),
        ),
        Section(
            f"Texts of {RUN:,} characters without a break, four characters a piece",
            "A word is not final before it ends, so that what never ends stays held back. The largest time is one "
            "encoding of nearly the whole text.",
            ("tokenizer", "text", "median us", "p99 us", "max us", "mean us", "held at the end, tokens"),
            rows(lambda name, template: run_rows(name, template, rng)),
        ),
        Section(
            "Tokens held back",
            "Needed: ids of the text so far that the whole prompt does not have, which had to be held back. Held: what "
            "was held back. Rollbacks: cuts at which an id was given out that the whole prompt does not have.",
            ("tokenizer", "text", "cut at", "cuts", "needed p99", "needed max", "held mean", "held max", "rollbacks"),
            rows(lambda name, template: held_rows(name, template, rng)),
        ),
    ]


def circumstances() -> str:
    """Machine, versions, seed and command."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    packages = ", ".join(f"{name} {version(name)}" for name in ("langgraph-pingpong", "tokenizers", "transformers"))
    command = " ".join(["python -m langgraph_pingpong.bench.tokens", *sys.argv[1:]])
    return (
        f"Machine: {cpu or platform.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start. "
        f"Python {platform.python_version()}, {packages}. Seed {SEED}. Other programs used the cores as well where the "
        f"load says so: compare medians.\n\nCommand: `{command}`\n"
    )


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def markdown(sections: Sequence[Section], header: str) -> str:
    """The results as a page."""
    parts = [f"# Token ids of a growing text\n\n{header}"]
    for section in sections:
        lines = [section.columns, tuple("---" for _ in section.columns), *section.rows]
        parts.append(
            f"## {section.title}\n\n{section.note}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
        )
    return "\n".join(parts)


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Folders or Hugging Face ids.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the results to this Markdown file.")] = None,
) -> None:
    """Measure cost and hold-back of growing token ids."""
    header = circumstances()
    names = {MODEL_NAME: str(default_model_path()), **{Path(model).name: model for model in models or ()}}
    tokenizers = {name: load_tokenizer(model) for name, model in names.items()}
    sections = measure({name: ChatTemplate(each, each.chat_template or CHAT) for name, each in tokenizers.items()})
    console = Console()
    for section in sections:
        table = Table(*section.columns, title=section.title)
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
    if out is not None:
        out.write_text(markdown(sections, header))


if __name__ == "__main__":
    typer.run(main)
