"""Steps that prefill are whole CUDA graphs where that is sound; what the user decided stays."""

from __future__ import annotations

from typing import Any

import pytest

from langgraph_pingpong.bench.engine_sets import EngineSettings
from langgraph_pingpong.bench.modes import MODES
from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.engines import vllm_setup
from langgraph_pingpong.engines.server_processes import server_command
from langgraph_pingpong.engines.vllm_setup import engine_args
from tests.engines_fixture import DEVICES

pytest.importorskip("vllm")

FULL = {"cudagraph_mode": "FULL"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup, "_is_hopper", lambda: True)


def config(device: str = "cuda:0", *, same_device: bool = False, exact: Any = "ids", **given: Any) -> EngineConfig:
    return EngineConfig("m", parse_devices([device]), exact=exact, same_device=same_device, engine_args=given)


@pytest.mark.usefixtures("hopper")
class TestOnHopper:
    def test_every_engine_has_them(self) -> None:
        assert engine_args(config())["compilation_config"] == FULL
        assert '--compilation-config {"cudagraph_mode": "FULL"}' in " ".join(server_command(config()))

    def test_beside_what_else_is_compiled(self) -> None:
        given = {"pass_config": {"fuse_allreduce_rms": False}}
        assert engine_args(config(compilation_config=given))["compilation_config"] == {**FULL, **given}
        assert FULL["cudagraph_mode"] in " ".join(server_command(config(compilation_config=given)))

    @pytest.mark.parametrize(
        "given",
        [
            {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
            {"compilation_config": {"mode": 0}},
            {"compilation_config": 3},
            {"enforce_eager": True},
            {"optimization_level": 1},
            {"attention_backend": "FLEX_ATTENTION"},
        ],
    )
    def test_unless_the_user_decided(self, given: dict[str, Any]) -> None:
        made = config(**given)
        assert engine_args(made) == made.vllm_args

    def test_not_where_bits_are_exact_nor_on_a_cpu(self) -> None:
        for made in (config(exact="bits"), config("cpu:0")):
            assert engine_args(made) == made.vllm_args


@pytest.mark.skipif(DEVICES[0].startswith("cuda"), reason="this machine has a GPU, perhaps of that kind")
def test_other_gpus_keep_what_vllm_takes() -> None:
    assert vllm_setup._is_hopper() is False  # no GPU here
    assert engine_args(config()) == config().vllm_args


@pytest.mark.parametrize(("hopper", "paces", "apart"), [(True, False, False), (True, True, True), (False, False, True)])
def test_modes_share_engines_that_are_built_alike(
    hopper: bool, paces: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_setup, "_is_hopper", lambda: hopper)
    monkeypatch.setattr("langgraph_pingpong.config.engine_can_pace", lambda: paces)
    settings = EngineSettings(["cuda:0", "cuda:1"])
    assert (settings.key(MODES["serial"]) != settings.key(MODES["overlap-1"])) is apart
    assert (settings.key(MODES["tp2-serial"]) != settings.key(MODES["tp2-overlap"])) is apart
