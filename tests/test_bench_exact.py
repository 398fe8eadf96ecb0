"""The benchmark of `exact` writes every run, and tells roundings from wrong hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from langgraph_pingpong.bench import exact


def run_bench(output: Path, **options: Any) -> list[dict[str, Any]]:
    settings = {
        "runs": 3,
        "minutes": 5.0,
        "modes": "bits,ids",
        "devices": "fake:0,fake:1",
        "dtype": "float32",
        "max_tokens": 40,
        "brief_tokens": 60,
        "max_model_len": 8192,
        "model": "",
        "engine_args": "{}",
        "more": False,
    }
    exact.main(output, **{**settings, **options})
    return [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]


def test_every_run_is_written_and_summed_up(tmp_path: Path) -> None:
    setup, *runs = run_bench(tmp_path / "out" / "exact")
    assert setup["setup"]["brief_tokens"] == 60
    assert [(run["exact"], run["run"], run["cache"]) for run in runs] == [
        (mode, number, cache) for mode in ("bits", "ids") for number, cache in enumerate(("cold", "cold", "warm"))
    ]
    for run in runs:
        assert [each["node"] for each in run["compared"]] == list(exact.NODES)
        assert all(each["logprobs_equal"] for each in run["compared"])
        assert [len(answer["logprobs"]) for answer in run["on"]["answers"]] == [40, 40]
        assert run["on"]["certificates"][1]["streamed"] > 0 == run["off"]["certificates"][1]["streamed"]
    assert len({run["off"]["answers"][0]["prompt"] for run in runs}) == 3
    text = (tmp_path / "out" / "exact.md").read_text()
    assert text == exact.summary([setup, *runs])
    assert "| bits | 3 | 12 of 12 | 3 | 6 | 6 | 6 | 0 | 0 |" in text


def test_it_ends_in_time(tmp_path: Path) -> None:
    assert len(run_bench(tmp_path / "exact", runs=50, minutes=0.0)) == 1


def test_it_goes_on_with_a_file(tmp_path: Path) -> None:
    first = run_bench(tmp_path / "exact", runs=1, modes="bits")
    lines = run_bench(tmp_path / "exact", runs=2, more=True)
    assert lines[: len(first)] == first
    assert [(line["exact"], line["run"]) for line in lines if "run" in line] == [
        ("bits", 0), ("bits", 1), ("ids", 0), ("ids", 1)
    ]  # fmt: skip
    text = (tmp_path / "exact.md").read_text()
    assert "| bits | 2 | 8 of 8 | 2 |" in text and "| ids | 2 | 8 of 8 | 2 |" in text


def answer(*tokens: tuple[str, dict[str, float]], prompt: str = "p") -> dict[str, Any]:
    said = [{"token": token, "logprob": top[token], "top": top} for token, top in tokens]
    return {"prompt": prompt, "text": "".join(token for token, _ in tokens), "tokens": said}


@pytest.mark.parametrize(
    ("on", "gap"),
    [
        ({" crab": -0.74, " eel": -0.71}, 0.05),
        ({" crab": -0.9, " eel": -0.7}, 0.2),
        ({" eel": -0.1, " cod": -0.9}, None),
    ],
)
def test_where_answers_part_the_gap_tells_what_it_was(on: dict[str, float], gap: float | None) -> None:
    same = (" The", {" The": -0.1})
    off = answer(same, (" crab", {" crab": -0.7, " eel": -0.75}))
    line = exact.compare("critic", off, answer(same, (" eel", on)))
    assert not line["texts_equal"] and not line["tokens_equal"]
    parted = line["parted"]
    assert (parted["at"], parted["off"], parted["on"]) == (1, " crab", " eel")
    assert parted["gap"] == (None if gap is None else pytest.approx(gap))


def test_an_answer_that_just_ends_is_a_wrong_hit(tmp_path: Path) -> None:
    the = (" The", {" The": -0.1})
    assert exact.compare("critic", answer(the), answer(the, the))["parted"] == {"at": 1, "gap": None}


def test_answers_to_different_prompts_are_not_compared() -> None:
    the = (" The", {" The": -0.1})
    line = exact.compare("critic", answer(the), answer(the, prompt="q"))
    assert line == {"node": "critic", "prompts_equal": False}


def test_wrong_hits_are_counted(tmp_path: Path) -> None:
    setup, *runs = run_bench(tmp_path / "exact", modes="ids")
    for run, gap in zip(runs, (0.05, 0.3, None), strict=True):
        run["compared"][1].update(texts_equal=False, tokens_equal=False, logprobs_equal=False, parted={"gap": gap})
    assert "| ids | 3 | 12 of 12 | 0 | 6 | 3 | 3 | 1 | 2 |" in exact.summary([setup, *runs])
