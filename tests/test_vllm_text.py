"""Text that is made from the end of a prompt is the text that vLLM makes from the whole of it."""

from __future__ import annotations

from typing import Any

import pytest

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from tests.shipped_tokenizers import qwen, sentencepiece, smollm2, tekken

pytest.importorskip("vllm")

from vllm import SamplingParams

from langgraph_pingpong.engines import vllm_text
from langgraph_pingpong.engines.vllm_text import AnswerText, can_make_text, is_made_here

PROMPT = "Rules for the pool. " * 40 + "What lives there? It's so — naïve \U0001f980 crabs:\n"
ANSWER = " Crabs, 12,345 of them — don't \U0001f980\U0001f990 mind.\n\n  日本語 too, and naïve code:\tx = 'é'"
FAMILIES = [fake_tokenizer, smollm2, qwen, tekken, sentencepiece]


def texts(tokenizer: Any, prompt: list[int], answer: list[int], **params: Any) -> list[str]:
    text = AnswerText(tokenizer, Request(tuple(prompt)), SamplingParams(**params))
    deltas = [Delta(token_ids=(id,)) for id in answer[:-1]] + [Delta(token_ids=(answer[-1],), finish_reason="length")]
    return [text.told(delta).text for delta in deltas]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [0, 1, 3, 7])
def test_text_is_that_of_the_whole_prompt(family: Any, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts end anywhere but in the middle of a character: there vLLM says the prompt again, all that it knows of."""
    tokenizer = family()
    ids = tokenizer.encode(PROMPT + ANSWER, add_special_tokens=False)
    end = len(tokenizer.encode(PROMPT, add_special_tokens=False)) - cut
    while tokenizer.decode(ids[:end]).endswith("\ufffd"):
        end -= 1
    assert end > vllm_text.PRIMING
    made = texts(tokenizer, ids[:end], ids[end:])
    monkeypatch.setattr(vllm_text, "PRIMING", end)
    assert made == texts(tokenizer, ids[:end], ids[end:])
    assert "".join(made).strip()


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_where_asked_for(skip: bool) -> None:
    tokenizer = qwen()
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    answer = tokenizer.encode("Hello<|im_end|>")
    assert ("<|im_end|>" in "".join(texts(tokenizer, ids, answer, skip_special_tokens=skip))) is not skip


def test_a_token_that_ended_the_answer_is_no_part_of_it() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("One two")
    for reason, said in (("stop", "One"), ("length", "One two")):
        text = AnswerText(tokenizer, Request((1, 2, 3)), SamplingParams())
        assert text.told(Delta(token_ids=tuple(ids), finish_reason=reason)).text == said


@pytest.mark.parametrize(
    ("sampling", "here"),
    [
        ({}, True),
        ({"stop": None, "stop_token_ids": [3], "max_tokens": 3}, True),
        ({"stop": []}, True),
        ({"stop": ["."]}, False),
        ({"stop": "."}, False),
        ({"logprobs": 0}, False),
        ({"n": 2}, False),
        ({"detokenize": False}, False),
    ],
)
def test_what_needs_text_in_the_engine_has_it_there(sampling: dict[str, Any], here: bool) -> None:
    assert is_made_here(sampling) is here


def test_where_vllm_s_own_moved_engines_make_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, prompt = smollm2(), smollm2().encode("One two three")
    assert can_make_text(tokenizer, SamplingParams(), prompt), "vLLM's detokenizer moved or takes something else now"
    monkeypatch.delattr("vllm.v1.engine.detokenizer.IncrementalDetokenizer.from_new_request")
    assert not can_make_text(tokenizer, SamplingParams(), prompt)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_answers_of_an_engine_read_the_same(real_model: ChatPingPong, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = real_model._serving().pool
    (engine, *_) = pool.engines
    ids = tuple(real_model.get_token_ids("List five animals with an emoji each:\n1. Crab \U0001f980\n2."))

    async def said(**sampling: Any) -> list[tuple[str, tuple[int, ...], str | None]]:
        request = Request(ids, {"max_tokens": 24, "temperature": 0.0, **sampling})
        return [(each.text, each.token_ids, each.finish_reason) async for each in engine.generate(request)]

    for sampling in ({}, {"stop_token_ids": list(real_model.get_token_ids(".")[:1])}, {"skip_special_tokens": False}):
        made = pool.loop.run(said(**sampling))
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_makes_text", False)
            assert pool.loop.run(said(**sampling)) == made
    assert engine._makes_text  # type: ignore[attr-defined]
