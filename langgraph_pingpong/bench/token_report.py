"""Tables of where the tokens of prompts came from, and what caches lost."""

from __future__ import annotations

from collections.abc import Sequence

from langgraph_pingpong.bench import metrics
from langgraph_pingpong.bench.document import Table
from langgraph_pingpong.bench.groups import Compared

SHARES = ("static", "streamed", "pulled", "cached", "left", "wasted", "lost", "prefill-token reduction")


def share_cells(of: metrics.Prefill) -> Sequence[str]:
    """The shares in the order of `SHARES`."""
    parts = (of.static, of.streamed, of.pulled, of.cached, of.left, of.wasted, of.lost, of.reduction)
    return [f"{part:.1%}" for part in parts]


def edge_table(compared: Compared) -> Table | None:
    """Of each mode the shares by node, apart for prompts that an edge prepared and for those that none did."""
    rows = []
    for group in compared.groups:
        for (node, upstream), (count, shares) in metrics.by_edge(group.runs).items():
            rows.append([group.name, f"{upstream} -> {node}" if upstream else node, str(count), *share_cells(shares)])
    return Table(["mode", "node or edge", "prompts", *SHARES], rows) if rows else None


def memory_table(compared: Compared) -> Table | None:
    """What the caches lost in the runs of each mode; None where no file tells."""
    rows = []
    for group in compared.groups:
        told = [each for run in group.runs for each in run.get("memory", ())]
        for device in dict.fromkeys(each["device"] for each in told):
            of_device = [each for each in told if each["device"] == device]
            holds = of_device[-1]["cache_tokens"]
            lost = (sum(each[name] for each in of_device) for name in ("evicted", "needed_again"))
            rows.append([group.name, device, f"{holds:,}" if holds else "-", *(f"{tokens:,}" for tokens in lost)])
    return Table(["mode", "device", "holds, tokens", "evicted in all runs", "needed again"], rows) if rows else None
