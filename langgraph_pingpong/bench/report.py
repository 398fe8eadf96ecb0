"""What files of results come to: tables and figures, with all that stands beside a figure. From the lines alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from langgraph_pingpong.bench import metrics
from langgraph_pingpong.bench.document import Block, Heading, Picture, Table, Text
from langgraph_pingpong.bench.groups import Compared, Group, compare, hidden_share, named, varying
from langgraph_pingpong.bench.lines import Results
from langgraph_pingpong.bench.metrics import Figures
from langgraph_pingpong.bench.timeline import middle_run, timeline
from langgraph_pingpong.bench.token_report import SHARES, edge_table, memory_table, share_cells
from langgraph_pingpong.bench.turn_report import turn_blocks
from langgraph_pingpong.viz import figures, timeline_png

MANY_CASES = 3
"""With more cases than this, each is a row and not a section."""


def report(results: Results, name: str, baseline: str | None = None) -> list[Block]:
    """The report on one file; `name` tells its pictures apart from those of others."""
    compared = compare(results, baseline)
    setup = results.setup
    blocks: list[Block] = [Heading(setup.get("title") or setup["profile"], 1)]
    blocks.append(Text(f"{setup['profile']}: {setup['about']}"))
    blocks += [Text(text) for text in circumstances(results)]
    if not compared:
        return [*blocks, Text("No run was counted yet.")]
    if len(compared) > MANY_CASES:
        blocks += _overview(compared, name)
    else:
        for number, one in enumerate(compared):
            blocks += _case(one, varying([each.case for each in compared]), f"{name}-{number}" if number else name)
    return [*blocks, Text(f"What each figure means: docs/metrics.md. Baseline: {compared[0].baseline_mode}.")]


def circumstances(results: Results) -> Iterator[str]:
    """What ran where, and with which command."""
    setup = results.setup
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    driver = f", driver {setup['driver']}" if setup.get("driver") else ""
    code = f"commit {setup['commit'] or 'unknown'}, code {setup['source']}"
    yield f"`{setup['command']}`"
    yield (
        f"{setup['date']}; {setup['machine']}{driver}; devices {', '.join(setup['devices'])}; {setup['model']}, dtype "
        f"{setup['dtype']}, engine arguments {setup['engine_args']}, exact {setup['exact']}; seed {setup['seed']}; "
        f"Python {setup['python']}; {versions}; {code}."
    )
    loads = [run["machine"]["load"] for run in results.counted]
    if loads:
        warmups = len(results.runs) - len(loads)
        yield (
            f"{len(loads)} counted runs and {warmups} warm-ups in {len(results.sessions)} starts of the program; load "
            f"of the machine {min(loads):.1f} to {max(loads):.1f}."
        )


# -- one case --------------------------------------------------------------------------------------------------


def _case(compared: Compared, names: Sequence[str], name: str) -> list[Block]:
    blocks: list[Block] = [Heading(named(compared.case, names) or "Results")]
    blocks.append(Text(", ".join(f"{key} {value:,}" for key, value in compared.case)))
    sections: list[tuple[str, Table | None]] = [
        ("End to end, ms", _e2e_table(compared)),
        ("Time to first token from the upstream's end, median ms", _agent_table(compared, "ttft_ms")),
        ("From the upstream's end to the last token, median ms", _agent_table(compared, "total_ms")),
        ("Downstream first tokens, and upstreams", _overlap_table(compared)),
        ("Time per output token, by device", _device_table(compared)),
        ("Tokens of downstream prompts", _token_table(compared)),
        ("Tokens of prompts by node and edge", edge_table(compared)),
        ("Key-value caches", memory_table(compared)),
        ("Equal to the baseline's run of the same number", _equality_table(compared)),
    ]
    for title, made in sections:
        if made is not None:
            blocks += [Heading(title, 3), made]
    return [*blocks, *turn_blocks(compared), *_remarks(compared), *_pictures(compared, name)]


def _e2e_table(compared: Compared) -> Table:
    head = ["mode", "runs", "mean", "median", "min", "max", "p95", "speed-up", "hidden share", "every run"]
    rows = []
    for group in compared.groups:
        e2e = metrics.e2e(group.runs)
        against = _against(compared, group, _gain)
        every = " ".join(f"{value:.0f}" for value in e2e.values)
        rows.append([group.name, str(len(e2e.values)), *_figures(e2e), *(against or ["-", "-"]), every])
    return Table(head, rows)


def _agent_table(compared: Compared, time: str) -> Table:
    of_groups = [(group, metrics.by_agent(group.runs, time)) for group in compared.groups]
    nodes = list(dict.fromkeys(node for _, by_agent in of_groups for node in by_agent))
    rows = [
        [group.name, *(f"{by_agent[node].median:.1f}" if node in by_agent else "-" for node in nodes)]
        for group, by_agent in of_groups
    ]
    return Table(["mode", *nodes], rows)


def _overlap_table(compared: Compared) -> Table:
    head = ["mode", "TTFT mean", "median", "min", "max", "p95", "in decode steps", "first TTFT", "upstream slow-down"]
    rows = []
    for group in compared.groups:
        ttft, steps = metrics.downstream_ttft(group.runs), metrics.ttft_in_steps(group.runs)
        cells = _figures(ttft, 1) if ttft else ["-"] * 5
        against = _against(compared, group, _side_effects)
        rows.append([group.name, *cells, "-" if steps is None else f"{steps:.2f}", *(against or ["-", "-"])])
    return Table(head, rows)


def _device_table(compared: Compared) -> Table:
    rows = []
    for group in compared.groups:
        slow = metrics.slow_devices(group.runs)
        for device in metrics.devices_of(group.runs):
            step, jitter = metrics.tpot(group.runs, device), metrics.jitter(group.runs, device)
            if step is not None and jitter is not None:
                rows.append([group.name, device, f"{step:.2f}", f"{jitter:.2f}", _change(slow.get(device, 0.0))])
    return Table(["mode", "device", "TPOT ms", "jitter ms", "slower than the fastest"], rows)


def _token_table(compared: Compared) -> Table | None:
    rows = []
    for group in compared.groups:
        if (shares := metrics.mean_prefill(group.runs)) is not None:
            rows.append([group.name, *share_cells(shares)])
    return Table(["mode", *SHARES], rows) if rows else None


def _equality_table(compared: Compared) -> Table | None:
    rows = []
    for group in compared.groups:
        base = compared.baseline(group)
        if base is None or base is group:
            continue
        equal = metrics.equal(group.runs, base.runs)
        rows.append([group.name, *(f"{count} of {equal.runs}" for count in (equal.ids, equal.texts, equal.counts))])
    return Table(["mode", "ids", "texts", "output token counts"], rows) if rows else None


def _remarks(compared: Compared) -> Iterator[Text]:
    """What a reader should know before believing a figure."""
    for group in compared.groups:
        for device, share in metrics.slow_devices(group.runs).items():
            yield Text(f"{group.name}: {device} takes {share:.1%} longer for a token than the fastest device.")
        change = metrics.drift(group.runs)
        if change is not None and abs(change) > metrics.SLOWER - 1:
            yield Text(f"{group.name}: the last third of the runs took {change:+.1%} against the first third.")
        quiet = all(not (agent["static"] or agent["streamed"]) for run in group.runs for agent in run["agents"])
        if quiet and group.mode in ("pingpong", "pingpong-plain", "overlap-1", "tp2-overlap", "pingpong-many"):
            yield Text(f"{group.name}: nothing was prefilled ahead.")


def _against(compared: Compared, group: Group, cells: Callable[[Group, Group], list[str]]) -> list[str] | None:
    """Cells that hold a group against its baseline; None where there is none."""
    base = compared.baseline(group)
    return cells(group, base) if base is not None and base is not group else None


def _gain(group: Group, base: Group) -> list[str]:
    share = hidden_share(group, base)
    return [f"{metrics.speedup(group.runs, base.runs):+.1%}", "-" if share is None else f"{share:.3f}"]


def _side_effects(group: Group, base: Group) -> list[str]:
    first = metrics.first_ttft_change(group.runs, base.runs)
    return [f"{first:+.1%}", _change(metrics.upstream_slowdown(group.runs, base.runs))]


def _figures(of: Figures, digits: int = 0) -> list[str]:
    return [f"{value:.{digits}f}" for value in (of.mean, of.median, of.min, of.max, of.p95)]


def _change(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


# -- figures ---------------------------------------------------------------------------------------------------


def _pictures(compared: Compared, name: str) -> Iterator[Picture]:
    singles = [group for group in compared.groups if group.chains == 1]
    if singles:
        e2e = {group.name: metrics.e2e(group.runs) for group in singles}
        ttft = {group.name: metrics.by_agent(group.runs, "ttft_ms") for group in singles}
        yield Picture(f"{name}-e2e", "End to end, every run", partial(figures.e2e_runs, e2e))
        yield Picture(f"{name}-ttft", "Time to first token by agent", partial(figures.ttft_bars, ttft))
    for group in singles:
        run, which = middle_run(group.runs)
        title = f"{group.name}, {which} ({run['e2e_ms']:,.0f} ms)"
        yield Picture(f"{name}-timeline-{group.mode}", title, partial(timeline_png.draw, [timeline(run, title)]))
    if any(group.chains > 1 for group in compared.groups):
        by_load = _by_load(compared)
        yield Picture(f"{name}-load", "Latency against load", partial(figures.latency_against_load, by_load))


def _by_load(compared: Compared) -> Mapping[str, Mapping[int, Figures]]:
    modes = dict.fromkeys(group.mode for group in compared.groups if group.chains > 1)
    return {
        mode: {group.chains: metrics.chain_latency(group.runs) for group in compared.groups if group.mode == mode}
        for mode in modes
    }


# -- many cases ------------------------------------------------------------------------------------------------


def _overview(all_compared: Sequence[Compared], name: str) -> list[Block]:
    names = varying([compared.case for compared in all_compared])
    rows = []
    for compared in all_compared:
        for group in compared.groups:
            against = _against(compared, group, _gain)
            ttft = metrics.downstream_ttft(group.runs)
            first = f"{ttft.median:.1f}" if ttft else "-"
            e2e = metrics.e2e(group.runs)
            values = [f"{dict(compared.case)[each]:,}" for each in names]
            runs = f"{e2e.median:.0f}", f"{e2e.min:.0f}", f"{e2e.max:.0f}"
            rows.append([group.name, *values, str(len(group.runs)), *runs, first, *(against or ["-", "-"])])
    head = ["mode", *names, "runs", "E2E median", "min", "max", "downstream TTFT", "speed-up", "hidden share"]
    return [Heading("All cases, ms"), Table(head, rows), *_surfaces(all_compared, names, name)]


def _surfaces(all_compared: Sequence[Compared], names: Sequence[str], name: str) -> Iterator[Picture]:
    """The speed-up of every mode over three parameters."""
    if len(names) != 3:
        return
    cells: dict[str, dict[tuple[int, int, int], float]] = {}
    for compared in all_compared:
        values = dict(compared.case)
        key = values[names[0]], values[names[1]], values[names[2]]
        for group in compared.groups:
            base = compared.baseline(group)
            if base is not None and base is not group:
                cells.setdefault(group.name, {})[key] = metrics.speedup(group.runs, base.runs)
    for mode, of_mode in cells.items():
        title = f"{mode}, speed-up"
        yield Picture(f"{name}-surface-{mode}", title, partial(figures.surface, of_mode, names, title))
