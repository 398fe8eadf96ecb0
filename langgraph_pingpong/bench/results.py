"""Brings what is told of the committed results up to date: a report beside each file, and the tables in the README.

    python -m langgraph_pingpong.bench.results

`make results` runs it; a test fails where the reports or the README differ from the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from langgraph_pingpong.bench import demo, metrics
from langgraph_pingpong.bench.common import SHARED, table
from langgraph_pingpong.bench.document import Block, save_pictures, to_markdown
from langgraph_pingpong.bench.groups import Compared, Group, compare, hidden_share, named, varying
from langgraph_pingpong.bench.lines import Results
from langgraph_pingpong.bench.modes import scale_of
from langgraph_pingpong.bench.profiles import PROFILES
from langgraph_pingpong.bench.report import MANY_CASES, report
from langgraph_pingpong.config import Device
from langgraph_pingpong.errors import OtherResults

BEGIN, END = "<!-- results: made by `make results` -->", "<!-- end of results -->"
DEMO_BEGIN, DEMO_END = "<!-- demo: made by `make results` -->", "<!-- end of demo -->"

EARLIER = "earlier"
"""A folder of files that say how it was before: they keep their reports, and have no row in the README."""

HEAD = (
    "",
    "mode",
    "runs",
    "end to end, median ms",
    "faster than the baseline by",
    "hidden share",
    "first token of downstreams, median ms",
    "in decode steps",
    "prompt ids equal",
    "texts equal",
)


def committed(folder: Path) -> dict[Path, Results]:
    """The files that `pingpong bench` wrote below a folder, in the order of their paths."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            results = Results.read(path)
        except OtherResults:  # of another benchmark
            continue
        if results.counted:
            found[path] = results
    return found


def report_on(path: Path, results: Results) -> list[Block]:
    """The report that belongs beside a file."""
    return report(results, path.stem)


def section(files: Mapping[Path, Results], root: Path) -> str:
    """What the README tells of the files, as Markdown, with links as from `root`."""
    if not files:
        return ""
    rows: list[list[str]] = []
    more: list[str] = []
    for path, results in files.items():
        if EARLIER in path.parts:
            continue
        compared = compare(results)
        link = f"[{_row_title(results)}]({path.with_suffix('.md').relative_to(root).as_posix()})"
        if len(compared) > MANY_CASES:
            more.append(f"- {link}: {len(compared)} cases, {len(results.counted)} runs.")
        else:
            rows += _rows(link, compared)
    parts = [table(HEAD, rows)] if rows else []
    return "\n\n".join([*parts, *(["\n".join(more)] if more else [])])


def title_of(results: Results) -> str:
    """What a file is called in short: its own title, or workload, model and devices."""
    setup = results.setup
    devices = ", ".join(setup["devices"])
    where = f"one GPU as {devices}" if SHARED in setup["machine"] else devices
    return str(setup.get("title") or f"{setup['profile']}, {setup['model']} on {where}")


def _row_title(results: Results) -> str:
    """With the sizes that are not those of the workload on such devices, which tell files of one workload apart."""
    scale = scale_of(Device.parse(results.setup["devices"][0]).kind)
    usual = PROFILES[results.setup["profile"]].values[scale]
    cases = [run["case"] for run in results.counted]
    values = {name: tuple(dict.fromkeys(case[name] for case in cases if name in case)) for name in usual}
    sizes = [f"{name}={','.join(map(str, values[name]))}" for name in usual if values[name] != tuple(usual[name])]
    return ", ".join([title_of(results), *sizes])


def _rows(link: str, all_compared: Sequence[Compared]) -> Iterator[list[str]]:
    names = varying([compared.case for compared in all_compared])
    first = True
    for compared in all_compared:
        for group in compared.groups:
            if group.chains == 1:
                case = named(compared.case, names)
                label = link if first else ""
                yield [label, f"{group.mode}{f' ({case})' if case else ''}", *_cells(group, compared.baseline(group))]
                first = False


def _cells(group: Group, base: Group | None) -> list[str]:
    ttft, steps = metrics.downstream_ttft(group.runs), metrics.ttft_in_steps(group.runs)
    first = f"{ttft.median:.0f}" if ttft else "-"
    known = [str(len(group.runs)), f"{metrics.e2e(group.runs).median:.0f}"]
    measured = [first, "-" if steps is None else f"{steps:.1f}"]
    if base is None or base is group:
        return [*known, "baseline" if base is group else "-", "-", *measured, "-", "-"]
    share, equal = hidden_share(group, base), metrics.equal(group.runs, base.runs)
    against = [f"{metrics.speedup(group.runs, base.runs):+.1%}", "-" if share is None else f"{share:.2f}"]
    return [*known, *against, *measured, f"{equal.ids} of {equal.runs}", f"{equal.texts} of {equal.runs}"]


def demo_section(folder: Path, root: Path) -> str:
    """The table of what the demo's benchmark wrote into a folder, as Markdown."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            if " langgraph_pingpong.bench.demo " not in json.loads(next(file))["setup"].get("command", ""):
                continue
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows.append(demo.row(lines, path.with_suffix(".md").relative_to(root).as_posix()))
    return table(demo.HEAD, rows) if rows else ""


def with_section(readme: str, made: str, begin: str = BEGIN, end: str = END) -> str:
    """The README with a section in its place, which is between the lines `begin` and `end`.

    Raises:
        ValueError: it has no place for it.
    """
    before, found, rest = readme.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"The README lacks the lines {begin} and {end}.")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}" if made else f"{before}{begin}\n{end}{after}"


def main(
    folder: Annotated[Path, typer.Option(help="Where the files are.")] = Path("docs/results"),
    readme: Annotated[Path, typer.Option(help="The file with the table.")] = Path("README.md"),
) -> None:
    """Write the report beside each file, and the tables in the README."""
    files = committed(folder)
    for path, results in files.items():
        blocks = report_on(path, results)
        save_pictures(blocks, path.parent / "figures")
        path.with_suffix(".md").write_text(to_markdown(blocks, "figures"), encoding="utf-8")
    text = with_section(readme.read_text(encoding="utf-8"), section(files, readme.parent))
    readme.write_text(with_section(text, demo_section(folder, readme.parent), DEMO_BEGIN, DEMO_END), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
