"""`pingpong bench`: every mode and every profile on modelled engines, files that go on, runs that are no results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolCall
from typer.testing import CliRunner

from langgraph_pingpong.bench.checks import check_run
from langgraph_pingpong.bench.engine_sets import TP_ARGS, EngineSets, EngineSettings, SetKey, memory_shares, merged
from langgraph_pingpong.bench.lines import Results
from langgraph_pingpong.bench.modes import MODES, in_order, parse_modes
from langgraph_pingpong.bench.profiles import PROFILES, Work, parse_chains, parse_values, tool_agents
from langgraph_pingpong.bench.recording import Recorder
from langgraph_pingpong.bench.runner import Plan
from langgraph_pingpong.bench.texts import Library
from langgraph_pingpong.cli import app
from langgraph_pingpong.errors import ConfigError, DeviceError, RunFailed, UnknownSetting

SMALL = ["--set", "agents=2", "--set", "static=120", "--set", "document=60", "--set", "output=24"]


def bench(path: Path, *options: str, devices: str = "fake:0,fake:1") -> Any:
    command = ["bench", "--devices", devices, "--warmup-runs", "0", "--runs", "1", "--output", str(path), *options]
    return CliRunner().invoke(app, command)


def read(path: Path) -> Results:
    return Results.read(path)


# -- every mode and every profile ------------------------------------------------------------------------------


def test_every_mode_runs_and_is_written(tmp_path: Path) -> None:
    done = bench(tmp_path / "out" / "all.jsonl", "--modes", ",".join(MODES), "--chains", "1,2", *SMALL)
    assert done.exit_code == 0, done.output
    results = read(tmp_path / "out" / "all.jsonl")
    many = [name for name, mode in MODES.items() if mode.many]
    assert Counter(run["mode"] for run in results.counted) == {name: 1 + (name in many) for name in MODES}
    assert {(run["mode"], run["chains"]) for run in results.runs if run["chains"] > 1} == {(name, 2) for name in many}
    assert list(results.sessions[0]["sets"]) == ["pair", "tp2", "pair+kv_transfer"]
    by_mode = {run["mode"]: run for run in results.runs if run["chains"] == 1}
    prefilled = {name: sum(a["static"] + a["streamed"] for a in run["agents"]) for name, run in by_mode.items()}
    assert all(prefilled[name] == 0 for name, mode in MODES.items() if not mode.overlaps)
    assert min(prefilled["pingpong"], prefilled["pingpong-plain"], prefilled["pingpong-many"]) > 120
    cached = {name: [agent["cached"] for agent in run["agents"]] for name, run in by_mode.items()}
    assert max(cached["serial"] + cached["serial-cold"]) < 120 <= min(cached["serial-prewarm"])
    assert len({json.dumps(run["texts"]) for run in by_mode.values()}) == 1


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_runs_and_says_the_same_in_every_mode(profile: str, tmp_path: Path) -> None:
    one_each = [f"{name}={values[0]}" for name, values in PROFILES[profile].values["fake"].items()]
    values = [part for each in one_each for part in ("--set", each)]
    done = bench(tmp_path / "x.jsonl", "--profile", profile, "--modes", "serial,pingpong", *values)
    assert done.exit_code == 0, done.output
    runs = read(tmp_path / "x.jsonl").runs
    assert [run["mode"] for run in runs] == ["serial", "pingpong"]
    assert runs[0]["texts"] == runs[1]["texts"]
    assert all(agent["ids_equal"] for run in runs for agent in run["agents"])
    prompts = [sorted(agent["prompt_sha256"] for agent in run["agents"]) for run in runs]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_profiles_have_the_same_parameters_at_every_scale(profile: Any) -> None:
    assert {tuple(values) for values in profile.values.values()} == {tuple(profile.values["gpu"])}
    assert len(profile.values) == 3


def test_the_sweep_covers_what_it_promises() -> None:
    cases = list(PROFILES["sweep"].cases("gpu", {}))
    for name, ends in {"upstream": (128, 4096), "static": (512, 32768), "downstream": (1, 256)}.items():
        assert (min(case[name] for case in cases), max(case[name] for case in cases)) == ends


@pytest.mark.parametrize("args", [{}, {"topic": "all"}, {"topic": "crabs"}])
def test_a_call_that_was_cut_off_is_made(args: dict[str, str]) -> None:
    said = AIMessage("", tool_calls=[ToolCall(name="look_up", args=args, id="said")])
    call = tool_agents._call(said, {"conversation": 3, "request": 1})
    assert call["id"] == ("said" if args.get("topic") == "crabs" else "made 3 1")
    assert call["args"] in ({"topic": "crabs"}, {"topic": "maps"})


LONG_ENOUGH = 48
"""Tokens of an answer during which there is time for an append."""


# -- a line ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("line") / "x.jsonl"
    assert bench(path, "--modes", "pingpong", *SMALL, "--set", f"output={LONG_ENOUGH}").exit_code == 0
    (run,) = read(path).runs
    return run


def test_a_line_holds_everything_with_times_from_the_start(line: dict[str, Any]) -> None:
    names = {event["name"] for event in line["events"]}
    assert {"generate.started", "first_token", "finish", "append.started", "append.complete", "finalize"} <= names
    times = [event["t"] for event in line["events"]]
    ends = [event["t"] for event in line["events"] if event["name"] == "finish"]
    assert min(times) >= 0
    assert max(ends) <= line["e2e_ms"]
    assert [agent["node"] for agent in line["agents"]] == ["A", "B"]
    assert list(line["texts"][0]) == ["A", "B"]
    finished = [answer for answer in line["answers"] if answer["finish_reason"]]
    assert [sum(count for _, count in answer["tokens"]) for answer in finished] == [LONG_ENOUGH, 8]
    assert all(answer["started"] <= answer["tokens"][0][0] <= line["e2e_ms"] for answer in finished)


WORK = Work([], 2, {"A": LONG_ENOUGH, "B": 8})


def test_a_whole_line_passes(line: dict[str, Any]) -> None:
    check_run(line, WORK, strict_tokens=True, cold=True)


def test_what_is_no_result_is_refused(line: dict[str, Any]) -> None:
    def refused(message: str, work: Work = WORK, **changes: Any) -> None:
        with pytest.raises(RunFailed, match=message):
            check_run({**line, **changes}, work, strict_tokens=True, cold=True)

    first, second = line["agents"]
    refused("1 of 2 answers", agents=[first])
    refused("1 of 2 turns ran no tool", turns=[{"tools": [[5.0, 9.0]]}, {"tools": []}])
    refused("some answers are empty", agents=[first, {**second, "output_tokens": 0}])
    refused("some answers are empty", texts=[{"A": "x"}])
    refused("nothing was measured", e2e_ms=0)
    refused("nothing was measured", events=[])
    refused("the engine says otherwise", agents=[first, {**second, "output_tokens": 7}])
    refused("the engine says otherwise", answers=line["answers"][:1])
    refused("B answered with 8 tokens, not 9", Work([], 2, {"A": LONG_ENOUGH, "B": 9}))
    events = [
        {**event, "data": {**event["data"], "cached": 16}} if event["name"] == "first_token" else event
        for event in line["events"]
    ]
    refused("found 16 tokens in caches", events=events)


def test_static_prefixes_need_not_wait(tmp_path: Path) -> None:
    assert bench(tmp_path / "x.jsonl", "--modes", "pingpong-plain", "--no-lazy-precreate", *SMALL).exit_code == 0
    results = read(tmp_path / "x.jsonl")
    (run,) = results.runs
    appends = [event for event in run["events"] if event["name"] == "append.complete"]
    assert appends[0]["data"]["cached"] >= 112, "it was there before the edge opened"
    assert results.setup["switches"]["lazy_precreate"] is False


# -- files -----------------------------------------------------------------------------------------------------


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert bench(path, "--modes", "serial", *SMALL).exit_code == 0
    before = path.read_text()
    path.write_text(before + '{"mode": "pingpong", "run": 0, "half')
    done = bench(path, "--modes", "serial,pingpong", "--runs", "2", *SMALL)
    assert done.exit_code == 0, done.output
    assert path.read_text().startswith(before)
    results = read(path)
    assert [(run["mode"], run["run"]) for run in results.runs] == [
        ("serial", 0),
        ("pingpong", 0),
        ("pingpong", 1),
        ("serial", 1),
    ]
    assert [run["session"] for run in results.runs] == [0, 1, 1, 1]
    done = bench(path, "--modes", "serial,pingpong", "--runs", "2", *SMALL)
    assert (done.exit_code, path.read_text().count("\n")) == (0, 7)
    assert "holds all of these runs" in done.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_can_be_killed_and_gone_on_with(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    command = [
        "bench",
        "--devices",
        "fake:0,fake:1",
        "--modes",
        "serial",
        "--runs",
        "400",
        "--output",
        str(path),
        *SMALL,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    code = "from langgraph_pingpong.cli import app; app()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *command], env=environment, stdout=subprocess.DEVNULL
    ) as program:
        deadline = time.monotonic() + 60
        while not (path.is_file() and path.read_text().count("\n") >= 4) and time.monotonic() < deadline:
            time.sleep(0.02)
        program.send_signal(number)
        assert program.wait(30) in (-number, 128 + number)
    done = len(read(path).counted)
    assert 1 <= done < 400
    assert bench(path, "--modes", "serial", "--runs", str(done + 1), *SMALL).exit_code == 0
    assert [run["run"] for run in read(path).counted] == list(range(done + 1))


def test_another_setup_does_not_go_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert bench(path, "--modes", "serial", *SMALL).exit_code == 0
    before = path.read_text()
    done = bench(path, "--modes", "serial", "--seed", "7", "--runs", "2", *SMALL)
    assert (done.exit_code, path.read_text()) == (2, before)
    assert "was measured with seed 42, and now it is 7" in done.stderr
    path.write_text("something else\n")
    done = bench(path, "--modes", "serial", *SMALL)
    assert (done.exit_code, path.read_text()) == (2, "something else\n")
    assert "no file of results" in done.stderr


def test_warm_ups_are_written_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert bench(path, "--modes", "serial", "--warmup-runs", "2", *SMALL).exit_code == 0
    results = read(path)
    assert [(run["warmup"], run["run"]) for run in results.runs] == [(True, 0), (True, 1), (False, 0)]
    assert len(results.counted) == 1


def test_no_run_begins_that_would_end_too_late(tmp_path: Path) -> None:
    done = bench(tmp_path / "x.jsonl", "--modes", "serial", "--stop-after", "0", *SMALL)
    assert done.exit_code == 0
    assert "1 runs are left" in done.output
    assert read(tmp_path / "x.jsonl").runs == []


def test_runs_that_failed_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langgraph_pingpong.bench.recording.Recorder.take", lambda self: [])
    done = bench(tmp_path / "x.jsonl", "--modes", "serial", *SMALL)
    assert done.exit_code == 1
    assert "the engine says otherwise" in done.stderr
    assert read(tmp_path / "x.jsonl").runs == []


# -- parts -----------------------------------------------------------------------------------------------------


def test_rounds_alternate() -> None:
    modes = parse_modes("serial, pingpong,serial")
    assert [mode.name for mode in modes] == ["serial", "pingpong"]
    assert in_order(modes, 1, "alternate") == modes[::-1]
    assert in_order(modes, 1, "fixed") == modes
    with pytest.raises(UnknownSetting, match="Did you mean 'serial'"):
        parse_modes("seriel")
    with pytest.raises(ConfigError, match="names no mode"):
        parse_modes(" ,")


def test_warm_ups_come_only_before_kinds_that_have_runs_left() -> None:
    plan = Plan(PROFILES["long-prefill"], [{"a": 1}, {"a": 2}], parse_modes("serial,pingpong-many"), (1, 2), 2)
    steps = list(plan.steps(set()))
    kinds = [("serial", 1), ("pingpong-many", 1), ("pingpong-many", 2)]
    assert [(step.mode.name, step.chains) for step in steps if step.warmup] == kinds * 2
    left = list(plan.steps({step.key for step in steps if step.mode.name == "serial" or step.case["a"] == 1}))
    assert {(step.mode.name, step.case["a"]) for step in left} == {("pingpong-many", 2)}
    assert len(left) == 2 + 4


def test_texts_have_the_length_and_a_beginning_of_their_own() -> None:
    library = Library(len, seed=3)
    texts = [library.text("Handbook", tokens, number) for tokens in (100, 3_000) for number in (0, 1)]
    assert all(n <= len(text) < n + 500 for n, text in zip((100, 100, 3_000, 3_000), texts, strict=True))
    assert len({text[:20] for text in texts}) == 2
    assert texts == [Library(len, seed=3).text("Handbook", n, k) for n in (100, 3_000) for k in (0, 1)]
    assert texts[2] != Library(len, seed=5).text("Handbook", 3_000, 0)
    assert len(library.text("Long", 200_000)) >= 200_000, "longer than all texts together"


@pytest.mark.parametrize("text", ["static", "static=x", "=3", "static=1,-2", "static="])
def test_values_are_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form name=1,2,3"):
        parse_values([text])


def test_nobody_and_nothing_to_say_are_refused() -> None:
    with pytest.raises(ConfigError, match="--set agents needs values of at least 1"):
        list(PROFILES["long-prefill"].cases("fake", {"static": [0], "agents": [2, 0]}))


@pytest.mark.parametrize("text", ["x", "", "0", "1,-2"])
def test_chains_at_once_are_told_by_their_own_option(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--chains {text} is not of the form 1,2,4"):
        parse_chains(text)
    assert parse_chains("1,8") == [1, 8]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "--devices", "fake:0,fake:1", "--output", str(tmp_path)])
    assert (done.exit_code, f"{tmp_path} cannot be written" in done.stderr) == (2, True)


def test_memory_is_shared_by_the_engines_of_a_device() -> None:
    keys = [SetKey("one"), SetKey("pair"), SetKey("tp2")]
    shares = memory_shares(keys, ["cuda:0", "cuda:1"], 0.85)
    assert sum(shares.values()) == pytest.approx(0.85, abs=0.002)
    assert shares[keys[0]] == shares[keys[1]] > shares[keys[2]] >= shares[keys[0]] / 2
    assert memory_shares(keys[:1], ["cuda:0"], 0.85) == {keys[0]: 0.85}


def test_engines_differ_for_prefills_that_ride_on_gpus_only() -> None:
    for devices, names in ((["cuda:0", "cuda:1"], ["one", "one+rides"]), (["fake:0", "fake:1"], ["one"])):
        sets = EngineSets(EngineSettings(devices), parse_modes("serial,overlap-1"), {})
        assert [str(key) for key in sets.keys] == names


def test_on_gpus_the_first_engine_of_a_pair_is_the_one_engine() -> None:
    modes = parse_modes("serial,overlap-1,pingpong")
    names = {
        devices: [str(key) for key in EngineSets(EngineSettings(devices.split(",")), modes, {}).keys]
        for devices in ("cuda:0,cuda:1", "fake:0,fake:1", "cpu:0,cpu:1")
    }
    assert names == {
        "cuda:0,cuda:1": ["pair", "one+rides"],
        "fake:0,fake:1": ["pair"],
        "cpu:0,cpu:1": ["one", "pair"],  # alone it has all cores
    }


def test_a_pair_that_stands_in_for_one_engine_uses_the_first_only(tmp_path: Path) -> None:
    done = bench(tmp_path / "x.jsonl", "--modes", "serial,pingpong,serial-prewarm", "--runs", "2", *SMALL)
    assert done.exit_code == 0, done.output
    for run in read(tmp_path / "x.jsonl").runs:
        devices = {"fake:0", "fake:1"} if run["mode"] == "pingpong" else {"fake:0"}
        assert {answer["device"] for answer in run["answers"]} == devices, run["mode"]
        assert {each["device"] for each in run["memory"]} == devices, run["mode"]


def test_arguments_are_merged_into_each_other() -> None:
    given = {"compilation_config": {"cudagraph_mode": "FULL"}, "load_format": "dummy"}
    both = {"pass_config": {"fuse_allreduce_rms": False}, "cudagraph_mode": "FULL"}
    assert merged(TP_ARGS, given) == {**TP_ARGS, **given, "compilation_config": both}


@pytest.mark.parametrize(
    ("devices", "mode", "message"),
    [
        ("fake:0", "pingpong", "needs two devices"),
        ("cpu:0,cpu:1", "tp2-serial", "needs GPUs"),
        ("cuda:0,cuda:2", "tp2-serial", "follow one another"),
    ],
)
def test_modes_that_the_devices_cannot_serve_are_refused(devices: str, mode: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        EngineSets(EngineSettings(devices.split(",")), parse_modes(mode), {})


@pytest.mark.parametrize(
    "options",
    [
        ["--profile", "short"],
        ["--modes", "ping"],
        ["--set", "stattic=3"],
        ["--engine-args", "[]"],
        ["--devices", "x:0"],
    ],
)
def test_wrong_options_are_told_before_anything_starts(options: list[str], tmp_path: Path) -> None:
    done = bench(tmp_path / "x.jsonl", *options)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert not (tmp_path / "x.jsonl").exists()


def test_modes_and_profiles_are_listed(tmp_path: Path) -> None:
    done = bench(tmp_path / "x.jsonl", "--list")
    assert done.exit_code == 0
    assert all(name in done.output for name in (*MODES, *PROFILES))


async def test_the_recorder_hides_the_cache_where_it_is_told_to() -> None:
    from langgraph_pingpong import EnginePool, FakeEngine
    from langgraph_pingpong.engines.base import Request

    engine = FakeEngine()
    pool = EnginePool([engine])
    recorder = Recorder(pool)
    cached = []
    for uncached in (False, False, True, True):
        recorder.uncached = uncached
        async for delta in engine.generate(Request(tuple(range(1, 50)), {"max_tokens": 2})):
            cached += [] if delta.num_cached_tokens is None else [delta.num_cached_tokens]
    assert cached == [0, 48, 0, 0]
    assert [answer.finish_reason for answer in recorder.take()] == ["length"] * 4
    assert recorder.take() == []
    pool.close()
