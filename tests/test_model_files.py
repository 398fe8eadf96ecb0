"""A model's files are read by the engine arguments that vLLM reads them by, and say no less than it settles on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.engines.vllm_engine import VllmEngine
from langgraph_pingpong.errors import ModelNotFound
from langgraph_pingpong.model_files import context_limit, tokenizer_args
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.serving import make_serving, serving_on
from langgraph_pingpong.tokens import load_tokenizer

CPU = parse_devices(["cpu:0"])
OWN_CODE = """
from transformers import Qwen2Config

class TideConfig(Qwen2Config):
    model_type = "tide"
"""


def folder(place: Path, **more: Any) -> str:
    """A model, as far as this side reads it."""
    fake_tokenizer().save_pretrained(place)
    values = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 640, **more}
    (place / "config.json").write_text(json.dumps(values))
    return str(place)


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model whose config is a class of its own; nothing of it stays behind, nor is anybody asked."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked at the terminal"))
    model = tmp_path / "tide_model"
    model.mkdir()
    (model / "configuration_tide.py").write_text(OWN_CODE)
    return folder(model, model_type="tide", auto_map={"AutoConfig": "configuration_tide.TideConfig"})


class TestContext:
    @pytest.mark.parametrize(
        ("rope", "limit"),
        [
            ({"rope_type": "default"}, 640),
            ({"rope_type": "linear", "factor": 4.0}, None),
            ({"type": "dynamic", "factor": 2.0}, None),
            ({"rope_type": "dynamic", "factor": 1.0}, 640),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160}, None),
            ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 80}, 640),
        ],
    )
    def test_is_left_to_the_engine_where_vllm_may_scale_it(
        self, tmp_path: Path, rope: dict[str, Any], limit: int | None
    ) -> None:
        llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope.get("rope_type") == "llama3" else {}
        model = folder(tmp_path, rope_scaling={**rope, **llama3})
        assert context_limit(EngineConfig(model, CPU)) == limit

    def test_is_left_to_the_engine_where_one_kind_of_layers_is_scaled(self, tmp_path: Path) -> None:
        kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
        kinds["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
        model = folder(tmp_path, model_type="gemma3_text", rope_parameters=kinds)
        assert context_limit(EngineConfig(model, CPU)) is None

    @pytest.mark.parametrize("overrides", [{"max_position_embeddings": 2560}, lambda config: config])
    def test_is_left_to_the_engine_where_the_config_is_overridden(self, tmp_path: Path, overrides: Any) -> None:
        given = {"hf_overrides": overrides}
        assert context_limit(EngineConfig(folder(tmp_path), CPU, engine_args=given)) is None
        assert context_limit(EngineConfig(folder(tmp_path), CPU, max_model_len=320, engine_args=given)) == 320

    def test_is_the_longer_one_that_a_config_names_beside(self, tmp_path: Path) -> None:
        assert context_limit(EngineConfig(folder(tmp_path, model_max_length=2560), CPU)) == 2560

    def test_is_that_of_the_config_elsewhere(self, tmp_path: Path) -> None:
        for name in ("model", "config"):
            (tmp_path / name).mkdir()
        elsewhere = folder(tmp_path / "config", max_position_embeddings=320)
        given = {"hf_config_path": elsewhere}
        assert context_limit(EngineConfig(folder(tmp_path / "model"), CPU, engine_args=given)) == 320


class TestCodeOfTheModels:
    def test_that_is_trusted_is_run_for_config_and_tokenizer(self, own_code: str) -> None:
        model = make_serving(own_code, ["cpu:0"], {"engine_args": {"trust_remote_code": True}})
        assert model.context == 640

    def test_that_is_not_trusted_is_an_error_that_says_where_to_trust_it(self, own_code: str) -> None:
        with pytest.raises(ModelNotFound, match=r"engine_args=\{'trust_remote_code': True\}"):
            make_serving(own_code, ["cpu:0"], {})


class TestTokenizer:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, {}),
            ({"revision": "v2"}, {"revision": "v2"}),
            ({"revision": "v2", "tokenizer_revision": "v3"}, {"revision": "v3"}),
            ({"tokenizer": "org/other", "tokenizer_revision": "v3"}, {"model": "org/other", "revision": "v3"}),
            ({"trust_remote_code": True, "code_revision": "v4"}, {"trust_remote_code": True, "code_revision": "v4"}),
            ({"hf_token": "secret", "max_num_seqs": 4}, {"token": "secret"}),
        ],
    )
    def test_is_loaded_as_vllm_loads_it(
        self, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        told: list[Any] = []
        loaded = lambda model, **how: told.append({"model": model, **how}) or fake_tokenizer()  # noqa: E731
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", loaded)
        load_tokenizer(**tokenizer_args("org/model", given))
        assert told == [{"model": "org/model", "trust_remote_code": False, **expected}]

    @pytest.mark.parametrize("device", ["cpu:0", "fake:0"])
    def test_of_its_own_is_that_of_prompts(self, tmp_path: Path, device: str) -> None:
        model, other = self.two_folders(tmp_path)
        chat = ChatPingPong(model=model, devices=[device], engine_args={"tokenizer": other})
        assert chat._serving().template.tokenizer.name_or_path == other

    def test_of_a_pool_is_that_of_its_engines(self, tmp_path: Path) -> None:
        model, other = self.two_folders(tmp_path)
        pool = EnginePool([VllmEngine(EngineConfig(model, CPU, engine_args={"tokenizer": other}), CPU[0])])
        assert serving_on(pool, None).template.tokenizer.name_or_path == other

    @staticmethod
    def two_folders(place: Path) -> tuple[str, str]:
        for name in ("model", "tokenizer"):
            (place / name).mkdir()
        return folder(place / "model"), folder(place / "tokenizer")
