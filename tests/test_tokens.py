"""While a text grows, only ids are given out that are in the whole text's prompt, whatever comes."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.errors import ModelNotFound, NoChatTemplate, TemplateRefused
from langgraph_pingpong.growing_prompt import GrowingPrompt, Probes, Stream, common_prefix
from langgraph_pingpong.tokens import ChatTemplate, load_tokenizer, parse_tool_arguments
from tests import shipped_tokenizers
from tests.growing_prompts import WRITER, growing_with, segments_of

NAMES = ("qwen", "smollm2", "tekken", "sentencepiece")
ASTRONAUT = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}"
PIECES = [
    *["Tide pools empty twice a day.", " the", " of", " it'l", "l", " we've", " don't", "'", "'S", " I'm", "a", "B"],
    *["def f(x: int) -> int:\n    return x  # ok", "```python\n", "```", "{'a': [1, 2.50]}", "==", "!=", "/*", "*/"],
    *["\n\n", "\n", "\r\n", "\t", " ", "  ", " " * 17, "\n" * 7, "\u00a0", "\u200b", "\ufeff", "\u2003"],
    *["1", "23", "2024", "12,345.67", "%", ".", "...", "?!", "\u2026", "\u2014", "\u201c", "\u2019s"],
    *["\u4f60\u597d", "\u6f6e\u6c60", "\u65e5\u672c\u8a9e", "\ud55c\uad6d\uc5b4", "\u1112", "\u1161", "\u11ab"],
    *["\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd"],
    *["\u1019\u103c\u1014\u103a\u1019\u102c", "\u0e20\u0e32\u0e29\u0e32", "\u0915\u094d\u0937\u093f"],
    *[ASTRONAUT, "\N{ROCKET}", "\N{WOMAN}\N{ZERO WIDTH JOINER}", "\U0001f1ef\U0001f1f5", "\ufe0f", "\ufffd"],
    *["e\u0301", "\u0301", "\u0316", "S\u0316\u0301", "\u00e9", "\ufb01", "\u0130", "\u0958", "\u212b"],
    *["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|", "|>", "<", "<s>", "</s>", "[INST]", "[/IN", "ST]"],
    *["x" * 40, "ha" * 30, "=" * 33, "ACGT" * 12, "0" * 25],
]


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(getattr(shipped_tokenizers, name)())


def quoting(text: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "You review."},
        {"role": "user", "content": f"Text:\n{text}\n\nList one flaw."},
    ]


def growing(name: str) -> tuple[GrowingPrompt, ChatTemplate]:
    """The growing prompt of a node that quotes what another says."""
    prompt = growing_with(template(name), quoting)
    assert prompt.calls == {WRITER}
    return prompt, template(name)


def expect_prefix(name: str, pieces: Sequence[str]) -> list[int]:
    """Feed the pieces; everything given out is in the prompt of the whole. Returns what was given out at the end."""
    prompt, tokens = growing(name)
    whole = list(tokens.prompt_ids(quoting("".join(pieces))))
    for count, piece in enumerate(pieces, start=1):
        before = len(prompt.ids)
        prompt.feed(WRITER, piece)
        given_out = list(prompt.ids)
        assert len(given_out) >= before, "an id was taken back"
        assert given_out == whole[: len(given_out)], pieces[:count]
    return list(prompt.ids)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    parts = draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=14))
    text = "".join(parts)
    cuts = draw(st.sets(st.integers(0, len(text)), max_size=len(text)))
    return [text[start:end] for start, end in pairwise([0, *sorted(cuts - {0, len(text)}), len(text)])]


class TestWhatIsGivenOut:
    @pytest.mark.parametrize("name", NAMES)
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @example(["S\u0316\u0301'l", "'ve\u0627"])
    @example(["it'l", "l"])
    @example(["abc <|im_end|", "> d"])
    @example(["<s>!<s>", "\u11ab[INST]"])
    @given(cut_texts())
    def test_is_in_the_prompt_of_the_whole(self, name: str, pieces: list[str]) -> None:
        expect_prefix(name, pieces)

    @pytest.mark.parametrize("name", NAMES)
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8))
    def test_is_in_it_at_every_character(self, name: str, parts: list[str]) -> None:
        expect_prefix(name, list("".join(parts)))

    @pytest.mark.parametrize("name", NAMES)
    def test_is_nearly_everything(self, name: str) -> None:
        text = "Tide pools empty twice a day, and what lives there has learned to wait. " * 8
        given_out = expect_prefix(name, [text[at : at + 5] for at in range(0, len(text), 5)])
        assert len(template(name).prompt_ids(quoting(text))) - len(given_out) <= 14

    @pytest.mark.parametrize("name", NAMES)
    def test_holds_back_the_end_of_a_long_run(self, name: str) -> None:
        for run in ("x" * 2000, " " * 500, "\n" * 300, "\u6f6e" * 600):
            expect_prefix(name, [run[at : at + 7] for at in range(0, len(run), 7)])

    def test_ends_with_whole_characters(self) -> None:
        prompt, tokens = growing("qwen")
        for (
            piece
        ) in f"So {ASTRONAUT}{ASTRONAUT} fly. \u1019\u103c\u1014\u103a\u1019\u102c \u0e20\u0e32\u0e29\u0e32 said.":
            prompt.feed(WRITER, piece)
            assert "\ufffd" not in tokens.tokenizer.decode(list(prompt.ids))

    def test_does_not_end_in_white_space_that_a_template_may_strip(self) -> None:
        prompt, tokens = growing("qwen")
        for piece in ("One two three four.", "\n", "\n", "   "):
            prompt.feed(WRITER, piece)
        given_out = tokens.tokenizer.decode(list(prompt.ids))
        assert given_out.endswith(("One two", "One two three"))

    def test_costs_the_same_however_long_the_text_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prompt, tokens = growing("qwen")
        prompt.feed(WRITER, "Tide pools empty twice a day. " * 1000)
        seen: list[int] = []
        before = tokens.unsettled_from
        monkeypatch.setattr(tokens, "unsettled_from", lambda text: (seen.append(len(text)), before(text))[1])
        for _ in range(20):
            prompt.feed(WRITER, " again")
        assert seen
        assert max(seen) < 200, "the whole text is looked at again with every piece"


class TestPromptShape:
    def of(self, use: Any) -> tuple[str, bool]:
        before, *rest = segments_of(lambda text: f"Text: {use(text)} End.")
        return before, rest[:1] == [Stream(WRITER)]

    def test_of_a_text_used_as_it_is(self) -> None:
        assert self.of(str) == ("Text: ", True)

    def test_of_a_text_used_twice_goes_up_to_the_first(self) -> None:
        assert self.of(lambda text: f"{text}, that is {text}") == ("Text: ", True)

    @pytest.mark.parametrize(
        "use",
        [
            str.upper,
            str.title,
            json.dumps,
            lambda text: text.split("\n")[0],
            lambda text: text[:100],
            lambda text: " ".join(text.split()),
            lambda text: text.replace('"', "'"),
            lambda text: text.encode("ascii", "ignore").decode(),
            lambda text: f"{len(text)} characters: {text}",
        ],
    )
    def test_of_a_text_that_is_changed_goes_up_to_the_change(self, use: Any) -> None:
        before, literal = self.of(use)
        assert not literal
        assert before.startswith("Text: ")
        probes = Probes()
        assert all(f"Text: {use(probes.of(WRITER, variant))} End.".startswith(before) for variant in (0, 1))

    def test_of_a_text_that_is_not_used_is_the_whole_prompt(self) -> None:
        assert self.of(lambda text: "nothing") == ("Text: nothing End.", False)

    @pytest.mark.parametrize(
        ("use", "place"),
        [
            (str.strip, Stream(WRITER, lstrip=True, rstrip=True)),
            (str.lstrip, Stream(WRITER, lstrip=True)),
            (str.rstrip, Stream(WRITER, rstrip=True)),
            (lambda text: text.strip("\n"), Stream(WRITER, lstrip=True, rstrip=True)),
            (lambda text: f"\n\n{text.strip()}\n\n", Stream(WRITER, lstrip=True, rstrip=True)),
            (lambda text: f"\n\n{text}\n\n", Stream(WRITER)),
        ],
    )
    def test_of_a_text_that_is_stripped(self, use: Any, place: Stream) -> None:
        segments = segments_of(lambda text: f"Text: {use(text)} End.")
        assert segments[1] == place
        assert "".join(part for part in segments if isinstance(part, str)) == f"Text: {use('')} End."

    @pytest.mark.parametrize("strips", [".strip()", ".strip('\\n')", ".rstrip()", ""])
    @pytest.mark.parametrize(
        ("answer", "certain"),
        [
            ("One two three  four.", True),
            ("\n\nOne two  three\n\nfour.\n", True),
            ("One two three four.\n\n\n\n\n", True),
            ("  One two three four.", False),
            ("One two three four. \n ", False),
            ("\n \n", False),
            ("", True),
        ],
    )
    def test_of_a_template_that_strips_a_text(self, strips: str, answer: str, certain: bool) -> None:
        tokens = ChatTemplate(
            shipped_tokenizers.qwen(),
            "{% for m in messages %}From:\n{{ m.content" + strips + " }}|{% endfor %}The end.",
        )
        whole = tokens.prompt_ids([{"role": "user", "content": answer}])
        for size in (1, 3, 100):
            prompt = growing_with(tokens, lambda text: [{"role": "user", "content": text}])
            for at in range(0, len(answer), size):
                prompt.feed(WRITER, answer[at : at + size])
                assert tuple(prompt.ids) == whole[: len(prompt.ids)]
            prompt.finish(WRITER)
            assert tuple(prompt.ids) == whole[: len(prompt.ids)]
            if certain or not strips:
                assert len(prompt.ids) >= len(whole) - 2

    def test_a_prompt_that_is_not_literal_takes_no_text(self) -> None:
        tokens = template("smollm2")
        prompt = growing_with(tokens, lambda text: quoting(text.upper()))
        known = list(prompt.ids)
        prompt.feed(WRITER, "Tide pools empty twice a day. " * 5)
        assert list(prompt.ids) == known
        assert prompt.static_tokens == len(known) > 0


class TestTemplate:
    def test_ids_are_those_of_the_rendered_text(self) -> None:
        tokens = template("qwen")
        messages = quoting("Tide pools empty twice a day.")
        ids = tokens.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokens.prompt_ids(messages) == tuple(ids)

    def test_the_start_token_comes_from_the_template_alone(self) -> None:
        tokens = template("sentencepiece")
        ids = tokens.prompt_ids([{"role": "user", "content": "Hello."}])
        assert ids.count(tokens.tokenizer.bos_token_id) == 1

    def test_a_given_template_takes_the_place_of_the_tokenizers(self) -> None:
        tokens = ChatTemplate(shipped_tokenizers.qwen(), "{{ messages[0].content }}!")
        assert tokens.render([{"role": "user", "content": "Hello"}]) == "Hello!"

    def test_there_must_be_one(self) -> None:
        bare = fake_tokenizer()
        bare.chat_template = None
        with pytest.raises(NoChatTemplate, match="has no chat template"):
            ChatTemplate(bare)
        assert ChatTemplate(bare, "{{ messages[0].content }}").render([{"role": "user", "content": "Hi"}]) == "Hi"

    def test_that_refuses_names_the_roles(self) -> None:
        strict = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
        tokens = ChatTemplate(shipped_tokenizers.qwen(), strict)
        with pytest.raises(TemplateRefused, match=r"system, user.*one at a time"):
            tokens.render(quoting("x"))

    def test_tool_arguments_become_objects(self) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": '{"place": "Oslo"}'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        (parsed,) = parse_tool_arguments(message)["tool_calls"]
        assert parsed["function"] == {"name": "tide", "arguments": {"place": "Oslo"}}
        assert call["function"]["arguments"] == '{"place": "Oslo"}'
        assert parse_tool_arguments({"role": "user", "content": "x"}) == {"role": "user", "content": "x"}

    def test_a_tokenizer_that_cannot_be_loaded_is_named(self, tmp_path: Any) -> None:
        with pytest.raises(ModelNotFound, match=str(tmp_path)):
            load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize(
        ("text", "settled"),
        [
            ("One two", 7),
            ("One two ", 7),
            ("One two\n\n", 7),
            ("One \ufffd", 4),
            ("One <|im_e", 4),
            ("One <", 4),
            ("One <|im_end|>", 14),
            ("", 0),
            ("  ", 0),
        ],
    )
    def test_knows_what_later_text_may_fuse_with(self, text: str, settled: int) -> None:
        assert template("qwen").unsettled_from(text) == settled


@pytest.mark.parametrize(
    ("a", "b", "length"), [("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("ab", "abc", 2)]
)
def test_common_prefix(a: str, b: str, length: int) -> None:
    assert common_prefix(a, b) == length
