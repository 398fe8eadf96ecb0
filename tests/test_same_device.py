"""What an engine needs so that pieces of prompts ride on the decode steps of its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langgraph_pingpong import ChatPingPong, same_device
from langgraph_pingpong.bench.engine_sets import EngineSettings
from langgraph_pingpong.bench.modes import MODES
from langgraph_pingpong.cli import app
from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.engines.server_processes import server_command
from langgraph_pingpong.errors import NotExact
from langgraph_pingpong.same_device import DECODES, STEP, capture_sizes, riding


def args(**given: Any) -> dict[str, Any]:
    return EngineConfig("m", parse_devices(["cuda:0"]), same_device=True, engine_args=given).vllm_args


@pytest.mark.parametrize("max_num_seqs", [1, 32, 128, 256, 1024])
def test_a_step_with_a_piece_is_in_a_captured_graph(max_num_seqs: int) -> None:
    rides = riding("cuda", {"max_num_seqs": max_num_seqs})
    assert rides is not None
    vllms_own = capture_sizes(max_num_seqs) if max_num_seqs >= STEP else None
    sizes = rides.engine_args.get("cudagraph_capture_sizes", vllms_own)
    assert rides.piece + DECODES in sizes
    assert 2 * rides.piece + DECODES <= max(sizes)  # two prefills at once
    assert min(2 * max_num_seqs, 512) <= max(sizes)  # decodes alone have the graphs they would have without
    padded = [min(size for size in sizes if size >= rides.piece + decodes) for decodes in range(1, DECODES + 1)]
    assert set(padded) == {STEP}


def test_sizes_are_those_that_vllm_takes_by_itself() -> None:
    assert capture_sizes(32) == [1, 2, 4, *range(8, 256, 8), 256]
    assert capture_sizes(256) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def test_the_engine_paces() -> None:
    assert args()["long_prefill_token_threshold"] == STEP - DECODES
    assert "long_prefill_token_threshold" not in EngineConfig("m", parse_devices(["cuda:0"])).vllm_args


@pytest.mark.parametrize(
    ("given", "piece"),
    [
        ({"cudagraph_capture_sizes": [1, 2, 64]}, 56),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 96, 512]}}, 88),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, STEP - DECODES),
        ({"compilation_config": 3}, STEP - DECODES),
        ({"long_prefill_token_threshold": 64}, 64),
        ({"cudagraph_capture_sizes": [1]}, 1),
    ],
)
def test_what_the_user_gave_stays(given: dict[str, Any], piece: int) -> None:
    rides = riding("cuda", given)
    assert rides is not None and rides.paced and rides.piece == piece
    made = args(**given)
    compilation = given.get("compilation_config")
    for name, value in given.items():
        if name != "compilation_config":
            assert made[name] == value
    assert made.get("compilation_config") == compilation
    if isinstance(compilation, dict):
        assert (
            "cudagraph_capture_sizes" not in made or "cudagraph_capture_sizes" not in compilation
        )  # vLLM refuses both


@pytest.mark.parametrize(("given", "engine_paces"), [({"long_prefill_token_threshold": 0}, True), ({}, False)])
def test_without_pacing_pieces_are_whole_blocks_beside_the_decodes(given: dict[str, Any], engine_paces: bool) -> None:
    rides = riding("cuda", given, engine_paces=engine_paces)
    assert rides is not None and not rides.paced and rides.piece == STEP - DECODES
    assert "long_prefill_token_threshold" not in rides.engine_args


@pytest.mark.parametrize(("version", "paces"), [("0.26.0", False), ("0.31.1", False), ("0.32.0", True), (None, True)])
def test_older_engines_pace_prefills_that_are_alone_too(
    version: str | None, paces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_device, "_is_installed", lambda name: name == "vllm" and version is not None)
    monkeypatch.setattr(same_device.metadata, "version", lambda name: version)
    assert same_device.engine_can_pace.__wrapped__() is paces


def test_a_cpu_needs_nothing() -> None:
    config = EngineConfig("m", parse_devices(["cpu:0"]), same_device=True)
    assert config.riding is None
    assert config.vllm_args == EngineConfig("m", parse_devices(["cpu:0"])).vllm_args


def test_servers_get_the_flags() -> None:
    few = {"max_num_seqs": 8}
    command = " ".join(server_command(EngineConfig("m", parse_devices(["cuda:0"]), same_device=True, engine_args=few)))
    assert "--long-prefill-token-threshold 120" in command
    assert "--cudagraph-capture-sizes 1 2 4 8 " in command


@pytest.mark.parametrize("same_device", [False, True])
def test_no_engine_has_its_attention_in_graphs_of_steps_that_prefill(same_device: bool) -> None:
    """With FlashAttention 3 their numbers are wrong (docs/results/h200/cuda-graphs.md): vLLM's own mode stays."""
    config = EngineConfig("m", parse_devices(["cuda:0"]), same_device=same_device)
    assert "compilation_config" not in config.vllm_args
    assert "cudagraph" not in " ".join(server_command(config))


@pytest.mark.parametrize(("paces", "apart"), [(False, False), (True, True)])
def test_modes_share_engines_that_are_built_alike(paces: bool, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langgraph_pingpong.config.engine_can_pace", lambda: paces)
    settings = EngineSettings(["cuda:0", "cuda:1"])
    assert (settings.key(MODES["serial"]) != settings.key(MODES["overlap-1"])) is apart
    assert (settings.key(MODES["tp2-serial"]) != settings.key(MODES["tp2-overlap"])) is apart


def test_nothing_shares_a_step_where_bits_are_exact() -> None:
    with pytest.raises(NotExact, match="same-device"):
        EngineConfig("m", parse_devices(["cuda:0"]), same_device=True, exact="bits")


def test_the_value_is_taken_by_the_model_and_the_command() -> None:
    with ChatPingPong(devices=["fake:0"], overlap="same-device", max_tokens=4) as model:
        assert model.invoke("Hello").text
    document = str(Path(__file__).parent.parent / "graphs" / "texts" / "document.md")
    options = (
        "--input",
        document,
        "--devices",
        "fake:0",
        "--overlap",
        "same-device",
        "--set",
        "brief_tokens=60",
        "--task",
        "x",
    )
    result = CliRunner().invoke(app, ["run", "graphs.five_agents", *options, "--set", "max_tokens=8"])
    assert result.exit_code == 0, result.output
