"""The benchmarks of engines write every figure, and summaries made from them."""

from __future__ import annotations

import json
from pathlib import Path

from langgraph_pingpong.bench import appends, foreground, kv_pull


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def test_appends_of_both_kinds_are_timed_at_each_length(tmp_path: Path) -> None:
    output = tmp_path / "appends"
    appends.main(output, lengths="64,256", appends=3, device="fake:0")
    setup, *cells = lines_of(output)
    assert setup["setup"]["deltas"] is True  # type: ignore[index]
    assert [(cell["way"], cell["length"]) for cell in cells] == [
        (way, length) for length in (64, 256) for way in ("delta", "growing prefix")
    ]
    assert all(len(cell["ms"]) == 3 for cell in cells)  # type: ignore[arg-type]
    assert output.with_suffix(".md").read_text() == appends.summary([setup, *cells])
    assert "| growing prefix | 256 |" in appends.summary([setup, *cells])


def test_foreground_requests_are_measured_beside_chains(tmp_path: Path) -> None:
    output = tmp_path / "foreground"
    foreground.main(output, rounds=2, chains=2, every_s=0.05, brief_tokens=100, devices="fake:0,fake:1")
    setup, *rounds = lines_of(output)
    assert [(each["round"], each["overlap"]) for each in rounds] == [(0, "off"), (0, "on"), (1, "on"), (1, "off")]
    assert all(len(times) == 16 for each in rounds for times in each["requests"])  # type: ignore[attr-defined]
    assert output.with_suffix(".md").read_text() == foreground.summary([setup, *rounds])
    rounds[0]["requests"] = [[1000.0, 1010.0]] * 50
    assert "| off | " in foreground.summary([setup, *rounds])
    assert "| 1000 | 1000 | 1000 |" in foreground.summary([setup, rounds[0], rounds[1]])
    tokens = [each["tokens"] for each in rounds]
    assert all(each["prompt_tokens"] > 500 for each in tokens)  # type: ignore[index]
    assert tokens[0]["static"] == tokens[3]["static"] == 0  # type: ignore[index]


def test_too_few_requests_have_no_percentiles() -> None:
    assert foreground._spread([5.0]) == ["nan", "nan", "nan"]
    assert foreground._spread([5.0, 5.0]) == ["5", "5", "5"]


def test_an_interval_tells_chance_from_a_difference() -> None:
    steady = [({"chains_ms": 100.0}, {"chains_ms": 110.0})] * 8
    assert foreground._ratio(steady, foreground._chains) == ["1.10", "1.10", "1.10"]
    noisy = [({"chains_ms": 100.0 + n}, {"chains_ms": 200.0 - n}) for n in range(0, 101, 10)]
    ratio, least, most = map(float, foreground._ratio(noisy, foreground._chains))
    assert ratio == 1.0
    assert least < 0.9 and most > 1.1


def test_reading_kv_is_timed_beside_computing_it(tmp_path: Path) -> None:
    output = tmp_path / "kv"
    kv_pull.main(output, lengths="64,1024", rounds=2, devices="fake:0,fake:1")
    setup, *cells = lines_of(output)
    assert [(cell["round"], cell["length"]) for cell in cells] == [(0, 64), (0, 1024), (1, 64), (1, 1024)]
    assert output.with_suffix(".md").read_text() == kv_pull.summary([setup, *cells])
    for cell in cells:
        cell.update(prefill_ms=1.0 * cell["length"], keep_ms=300.0, read_ms=0.1 * cell["length"])  # type: ignore[operator]
    text = kv_pull.summary([setup, *cells])
    assert "| 1024 | 1024 | 402 | 300 | 102 | 2.5 |" in text
    assert "from 352 tokens on" in text
