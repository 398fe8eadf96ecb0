"""What runs come to: the tables at the end, and whether two runs agree. All of it from the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from langgraph_pingpong.trace import Event

T = TypeVar("T")

Turn = tuple[str, int]
"""A node, and how often it had its turn before."""

SINCE = "TTFT and total count from the moment the agent before has finished."

NOTHING_AHEAD = "Nothing was prefilled ahead: that takes two devices, and nodes whose next prompt is known in time."


@dataclass
class Run:
    """One run of a graph; subscribe it to the trace while the graph runs.

    `prompts` and `answers` pair a node with the hash of its prompt's ids and with what it said; `state` is the
    graph's final state; `e2e_ms` is the time from its start to its end.
    """

    overlap: str
    prompts: list[tuple[str, str]] = field(default_factory=list)
    certificates: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)
    state: Any = None
    e2e_ms: float = 0.0

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if event.name == "generate.started":
            self.prompts.append((event.node, event.data["prompt_sha256"]))
        elif event.name == "finish":
            self.certificates.append(event.data["certificate"])

    @property
    def prefilled(self) -> int:
        """Tokens of all prompts that were prefilled before their turn."""
        return sum(certificate["static"] + certificate["streamed"] for certificate in self.certificates)

    @property
    def rows(self) -> dict[Turn, dict[str, Any]]:
        """The certificates by turn."""
        return _by_turn((certificate["node"], certificate) for certificate in self.certificates)


def _by_turn(pairs: Iterable[tuple[str, T]]) -> dict[Turn, T]:
    seen: Counter[str] = Counter()
    turns: dict[Turn, T] = {}
    for node, value in pairs:
        turns[node, seen[node]] = value
        seen[node] += 1
    return turns


# -- tables ----------------------------------------------------------------------------------------------------


def run_table(run: Run) -> Table:
    """One run: a row for each agent's turn, then the end-to-end time."""
    headers = ("device", "prompt\ntokens", "prefilled before\nstatic + streamed", "TTFT\nms", "total\nms")
    table = _table(f"overlap {run.overlap}", headers)
    for turn, row in run.rows.items():
        prefilled = f"{row['static']:,} + {row['streamed']:,}"
        times = _ms(row["ttft_ms"]), _ms(row["total_ms"])
        table.add_row(_label(turn), row["device"], f"{row['prompt_tokens']:,}", prefilled, *times)
    table.add_section()
    table.add_row("end to end", "", "", "", "", _ms(run.e2e_ms), style="bold")
    return table


def compare_table(off: Run, on: Run) -> Table:
    """Two runs side by side: what each agent's turn took without and with overlap, and what that saves."""
    headers = ("device", "prompt\ntokens", "pre-\nfilled", "TTFT\noff", "\non", "total\noff", "\non")
    table = _table("overlap off and on, ms", (*headers, "\nsaved", "\n%"))
    before, after = off.rows, on.rows
    for turn in [*before, *(turn for turn in after if turn not in before)]:
        pair = before.get(turn, {}), after.get(turn, {})
        cells = _pair(pair, "device"), _pair(pair, "prompt_tokens", ","), _prefilled(pair[1])
        times = [_ms(row.get(name)) for name in ("ttft_ms", "total_ms") for row in pair]
        table.add_row(_label(turn), *cells, *times, *_saved(pair[0].get("total_ms"), pair[1].get("total_ms")))
    table.add_section()
    total = _ms(off.e2e_ms), _ms(on.e2e_ms), *_saved(off.e2e_ms, on.e2e_ms)
    table.add_row("end to end", "", "", "", "", "", *total, style="bold")
    return table


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.box, table.show_edge, table.padding, table.pad_edge = SIMPLE_HEAD, False, (0, 1, 0, 0), False
    table.add_column("\nagent", overflow="fold", min_width=len("end to end"))
    for header in headers:
        title = header if "\n" in header else f"\n{header}"
        if header == "device":  # the address of a server can be long: it is broken rather than the figures
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    return table


def _label(turn: Turn) -> str:
    node, before = turn
    return f"{node or '-'} ({before + 1})" if before else node or "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _prefilled(row: Mapping[str, Any]) -> str:
    return f"{row['static'] + row['streamed']:,}" if row else "-"


def _pair(rows: tuple[Mapping[str, Any], ...], name: str, form: str = "") -> str:
    """What both runs have in common, or both values."""
    return " / ".join(dict.fromkeys(format(row[name], form) for row in rows if row))


def _saved(before: float | None, after: float | None) -> tuple[str, str]:
    if before is None or after is None:
        return "-", "-"
    return _ms(before - after), f"{(before - after) / before:.0%}" if before else "-"


# -- verdict ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run with overlap did what the run without it did.

    `parted` is the first node whose answers differ. From there on prompts that quote the answer differ too, and
    are not held against `ids_equal`.
    """

    ids_equal: bool
    text_equal: bool
    parted: str | None

    def lines(self, sampled: bool) -> list[str]:
        """The verdict in words; `sampled` says that answers are drawn at random."""
        until = f" (up to the answer of {self.parted})" if self.ids_equal and self.parted else ""
        lines = [f"prompt ids equal: {_yes(self.ids_equal)}{until}", f"text equal: {_yes(self.text_equal)}"]
        return lines if self.text_equal else [*lines, self._reason(sampled)]

    def _reason(self, sampled: bool) -> str:
        if self.parted is None:
            return "Every answer is equal in both runs: the rest of the final state differs from run to run."
        if sampled:
            return f"The texts part in the answer of {self.parted}: without --seed, sampled answers always differ."
        return (
            f"The texts part in the answer of {self.parted}: a prompt prefilled in pieces rounds differently in "
            "bf16, which can flip a near tie between two tokens (see docs/architecture.md)."
        )


def hold_together(off: Run, on: Run) -> Verdict:
    """Hold two runs of the same graph on the same input against each other."""
    said, says = _by_turn(off.answers), _by_turn(on.answers)
    parted = next((turn[0] for turn in said if said[turn] != says.get(turn)), None)
    certified = all(row["ids_equal"] for run in (off, on) for row in run.certificates)
    text_equal = parted is None and _plain(off.state) == _plain(on.state)
    return Verdict(certified and _prompts_equal(off, on), text_equal, parted)


def _prompts_equal(off: Run, on: Run) -> bool:
    """Whether prompts are equal, in the order of turns up to the first answer that differs."""
    if Counter(off.prompts) == Counter(on.prompts):
        return True  # whatever the order, which varies among agents that run at the same time
    prompts = zip_longest(_by_turn(off.prompts).items(), _by_turn(on.prompts).items())
    said, says = _by_turn(off.answers), _by_turn(on.answers)
    for before, after in prompts:
        if before != after:
            return False
        if said.get(before[0]) != says.get(before[0]):
            return True
    return True


def _plain(value: Any) -> Any:
    """A state without what is new in every run: ids of messages and tool calls, measured times."""
    if hasattr(value, "tool_calls"):
        calls = [(call["name"], call["args"]) for call in value.tool_calls]
        return value.type, value.content, calls
    if hasattr(value, "response_metadata"):
        return value.type, value.content
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _yes(true: bool) -> str:
    return "yes" if true else "no"
