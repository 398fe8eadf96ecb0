"""`pingpong doctor`: the cost model against figures worked out by hand, links, what fits, and advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langgraph_pingpong import EnginePool, FakeEngine
from langgraph_pingpong.bench import doctor
from langgraph_pingpong.bench.calibration import calibrate, calibrate_across, takes_appends
from langgraph_pingpong.bench.cost_model import Across, Place, Speeds, Workload, advise, fits_beside, pays_from, predict
from langgraph_pingpong.bench.doctor import Answers, Memory, Sizes, checklist, fit, link_in_words, links, sizes_of
from langgraph_pingpong.bench.engine_sets import EngineSettings
from langgraph_pingpong.cli import app
from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.errors import ModelNotFound

SPEEDS = Speeds(prefill_s=0.001, step_s=0.01, floor_s=0.02, mixed_s=0.0005)
WORK = Workload(agents=3, static=1000, document=200, output=100, last_output=50)
PAIR = Place(2, "other", True, SPEEDS)


def test_predicted_times() -> None:
    times = predict(WORK, PAIR)
    assert times["serial"] == pytest.approx(3 * 1.0 + 0.2 + 2 * 0.1 + 3 * 0.02 + 250 * 0.01)
    assert times["ping-pong"] == pytest.approx(1.2 + 3 * 0.02 + 2.5)
    assert times["same-device overlap"] == pytest.approx(1.2 + 3 * 0.02 + 2.5 + 2 * 1100 * 0.0005)
    assert times["tensor parallel"] == pytest.approx(times["serial"] / 1.05)


def test_what_does_not_fit_beside_an_answer_is_left() -> None:
    long = predict(replace(WORK, static=3000), PAIR)
    assert long["ping-pong"] == pytest.approx(3.2 + 3 * 0.02 + 2.5 + 2 * 2.0)
    short = predict(replace(WORK, static=3000, output=10, last_output=10), PAIR)
    riding = 10 * 128
    mixed = (riding + 10) * 0.0005 + (3000 - riding) * 0.001 + 0.02
    assert short["same-device overlap"] == pytest.approx(3.2 + 0.02 + 0.3 + 2 * mixed)


def test_engines_that_slow_each_other() -> None:
    fits = replace(PAIR, across=Across(prefill_s=0.0008, slowed_s=0.0002))
    assert fits_beside(WORK, 0.01, fits.beside) == 1000  # 0.8 s of the answer's 1.2
    assert predict(WORK, fits)["ping-pong"] == pytest.approx(predict(WORK, PAIR)["ping-pong"] + 2 * 0.2)
    long = replace(PAIR, across=Across(prefill_s=0.002, slowed_s=0.0005))
    tokens = 1.0 / 0.0015  # the answer takes 1.333 s then, in which so many tokens take 0.002 s each
    assert fits_beside(WORK, 0.01, long.beside) == pytest.approx(tokens)
    more = tokens * 0.0005 + (1000 - tokens) * 0.001
    assert predict(WORK, long)["ping-pong"] == pytest.approx(predict(WORK, PAIR)["ping-pong"] + 2 * more)
    drowned = replace(PAIR, across=Across(prefill_s=0.001, slowed_s=0.001))
    assert fits_beside(WORK, 0.01, drowned.beside) == 1000
    assert any("slows a decode by 0.20 s" in reason for reason in advise(WORK, fits).reasons)


async def test_what_engines_cost_each_other_is_measured() -> None:
    engines = [
        FakeEngine(f"fake:{n}", prefill_speed=20_000.0, decode_speed=200.0, time_scale=1.0, reply=lambda _: "ab " * 40)
        for n in range(2)
    ]
    pool = EnginePool(engines)
    across = await calibrate_across(engines[0], engines[1], Speeds(1 / 20_000, 1 / 200, 0.0, 0.0))
    assert 0.8 / 20_000 < across.prefill_s < 4 / 20_000
    assert across.slowed_s < across.prefill_s, "modelled engines have nothing in common"
    pool.close()


@pytest.mark.parametrize(
    ("place", "topology"),
    [
        (PAIR, "ping-pong"),
        (replace(PAIR, fits_twice=False), "same-device overlap"),
        (replace(PAIR, devices=1), "same-device overlap"),
        (replace(PAIR, devices=1, speeds=replace(SPEEDS, mixed_s=0.01)), "serial"),
        (replace(PAIR, tp=SPEEDS.faster(2)), "tensor parallel"),
        (replace(PAIR, tp=SPEEDS.faster(2), gpus=False), "ping-pong"),
        (replace(PAIR, link="nvlink", speeds=replace(SPEEDS, prefill_s=1e-5, mixed_s=1e-3)), "tensor parallel"),
    ],
)
def test_the_fastest_that_is_possible_is_advised(place: Place, topology: str) -> None:
    advice = advise(WORK, place)
    assert advice.topology == topology
    assert len(advice.reasons) >= 3


def test_many_chains_get_engines_of_their_own() -> None:
    place = replace(PAIR, tp=SPEEDS.faster(2))
    assert advise(replace(WORK, chains=3), place).topology == "tensor parallel"
    assert advise(replace(WORK, chains=4), place).topology == "ping-pong"


def test_short_prompts_are_left_to_serial() -> None:
    quick = replace(PAIR, speeds=Speeds(1e-6, 0.01, 0.0, 1e-3))
    assert advise(WORK, replace(quick, gpus=False)).topology == "serial"
    assert pays_from(WORK, replace(quick, gpus=False), "ping-pong") == 32_768
    assert pays_from(WORK, PAIR, "ping-pong") == 256
    assert pays_from(WORK, replace(PAIR, devices=1), "ping-pong") is None


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-31\n"
    "GPU1\tNV18\t X \tPHB\t0-31\n"
    "GPU2\tSYS\tPHB\t X \t0-31\n"
    "\nLegend:\n  X    = Self\n"
)


def test_links_are_read_from_what_the_driver_prints() -> None:
    assert links(TOPOLOGY, [0, 1, 2]) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert links("", [0, 1]) == {}
    assert link_in_words("NV18") == "NV18 (NVLink)"
    assert link_in_words("X2") == "X2"


def shape(folder: Path, **more: Any) -> EngineConfig:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": True,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return EngineConfig(str(folder), parse_devices(["cpu:0"]))


def test_sizes_come_from_the_shape_where_there_are_no_weights(tmp_path: Path) -> None:
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
    assert sizes_of(shape(tmp_path)) == Sizes(2 * (3 * layer + 800), 2 * 3 * 2 * 2 * 2)
    assert sizes_of(shape(tmp_path, tie_word_embeddings=False)).weights == 2 * (3 * layer + 1600)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 5000)
    assert sizes_of(shape(tmp_path)).weights == 5000
    with pytest.raises(ModelNotFound):
        sizes_of(EngineConfig(str(tmp_path / "none"), parse_devices(["cpu:0"])))


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("H", Memory(100.0, 90.0)), ("H", Memory(100.0, 50.0))]
    monkeypatch.setattr(doctor, "gpu_memory", lambda: gpus)
    pair = ["cuda:0", "cuda:1"]
    assert fit(pair, Sizes(40.0, 2.0), 0.8, 1.0).tokens == {"cuda:0": 20, "cuda:1": 5}
    assert fit(pair, Sizes(40.0, 2.0), 0.8, 1.0).twice
    assert not fit(pair, Sizes(60.0, 2.0), 0.8, 1.0).twice
    assert doctor.free_share(pair) == 0.5
    assert doctor.device_rows(pair)[1][:2] == ["cuda:1", "H"]
    monkeypatch.setattr(doctor, "cpu_memory", lambda: Memory(4e9, 3e9))
    gib = 2**30
    assert fit(["cpu:0", "cpu:1"], Sizes(0.2 * gib, 1024), 0.8, 1.0).tokens == {"cpu:0": 2**20, "cpu:1": 2**20}
    assert not fit(["cpu:0", "cpu:1"], Sizes(0.5 * gib, 1024), 0.8, 1.0).twice


def test_the_checklist_asks_four_questions() -> None:
    rows = checklist(WORK, Answers(), 0.1)
    assert [answer for _, answer in rows] == [
        "no: 1,133 tokens",
        "not said (--branches)",
        "no: 10%",
        "not said (--first-token)",
    ]
    long = checklist(replace(WORK, static=4000), Answers(True, False, True), 0.2)
    assert [answer for _, answer in long] == ["yes: 4,133 tokens", "no", "yes: 20%", "yes"]
    assert checklist(replace(WORK, static=4000), Answers(reusable_pieces=False), 0.2)[0][1].startswith("no: 4,133")


async def test_an_engine_is_measured() -> None:
    engine = FakeEngine(prefill_speed=20_000.0, decode_speed=200.0, time_scale=1.0, reply=lambda prompt: "ab " * 40)
    speeds = await calibrate(engine)
    assert 0.8 / 20_000 < speeds.prefill_s < 4 / 20_000
    assert 0.8 / 200 < speeds.step_s < 4 / 200
    assert speeds.mixed_s < speeds.prefill_s * 5
    assert await takes_appends(engine)
    engine.takes_appends = False
    assert not await takes_appends(engine)
    EnginePool([engine]).close()


def test_the_command_looks_measures_and_advises() -> None:
    done = CliRunner().invoke(
        app, ["doctor", "--devices", "fake:0,fake:1", "--reusable", "--tp"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    for text in (
        "fake:1",
        "sound",
        "ping-pong",
        "tensor parallel",
        "slows a decode by",
        "Measured in ",
        "Advice: ",
        "yes: 4,506 tokens",
        "not said",
    ):
        assert text in done.output
    assert "is taken to be" not in done.output, "it was measured"


def test_on_cpus_one_engine_is_measured_with_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake devices that are taken for CPUs: an engine that runs alone is three times as fast there."""
    found: list[int] = []

    async def calibrated(engine: FakeEngine) -> Speeds:
        found.append(1)
        return SPEEDS if len(found) == 1 else SPEEDS.faster(3)

    monkeypatch.setattr("langgraph_pingpong.bench.calibration.calibrate", calibrated)
    monkeypatch.setattr(EngineSettings, "kind", "cpu")
    monkeypatch.setattr("langgraph_pingpong.cli.doctor._fit", lambda settings: (None, None))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    done = CliRunner().invoke(app, ["doctor", "--devices", "fake:0,fake:1"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "it prefills 3.0 times as fast as one of several" in done.output
    assert "Advice: ping-pong" not in done.output
    assert "one alone" in done.output


def test_one_engine_with_all_cores_may_win() -> None:
    quick = replace(PAIR, gpus=False, alone=SPEEDS.faster(3))
    assert predict(WORK, quick)["serial"] == pytest.approx(predict(WORK, PAIR)["serial"] / 3)
    assert predict(WORK, quick)["ping-pong"] == predict(WORK, PAIR)["ping-pong"]
    assert advise(WORK, replace(PAIR, gpus=False)).topology == "ping-pong"
    assert advise(WORK, quick).topology == "same-device overlap"


@pytest.mark.parametrize("option", ["--static", "--document"])
def test_lengths_below_nothing_are_refused(option: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "--devices", "fake:0", option, "-5000"], env={"COLUMNS": "200"})
    assert (done.exit_code, f"Invalid value for '{option}'" in done.stderr) == (2, True)


def test_a_cache_size_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "abc")
    command = ["doctor", "--devices", "cpu:0", "--model", str(tmp_path), "--no-calibrate"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert (done.exit_code, "and not 'abc'" in done.stderr) == (2, True)


def test_without_an_engine_it_gives_no_advice() -> None:
    done = CliRunner().invoke(app, ["doctor", "--devices", "fake:0", "--no-calibrate"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "unknown until an engine was started" in done.output
    assert "Advice" not in done.output


def test_devices_that_do_not_exist_are_told() -> None:
    done = CliRunner().invoke(app, ["doctor", "--devices", "fpga:0"])
    assert (done.exit_code, "Unknown device" in done.stderr) == (2, True)
