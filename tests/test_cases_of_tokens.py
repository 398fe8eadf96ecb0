"""Faults that others have reported of tokens and templates, on the vocabularies of several kinds of model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import START, MessagesState, StateGraph

from langgraph_pingpong import agent_node
from langgraph_pingpong.engines.base import Delta
from langgraph_pingpong.growing_prompt import GrowingPrompt, common_prefix
from langgraph_pingpong.tokens import ChatTemplate
from tests import shipped_tokenizers
from tests.growing_prompts import WRITER, segments_of
from tests.test_cases import ASTRONAUT, NOTES, Quoting, saying
from tests.test_token_families import qwen_3

if TYPE_CHECKING:
    from tests.conftest import Lab, Recorder

NAMES = ("smollm2", "qwen", "tekken", "sentencepiece")
SENTENCE = "Tide pools empty twice a day."
ENDINGS = {
    "a full stop": SENTENCE,
    "a call": f"{SENTENCE} No!",
    "a code fence": "Try this:\n```\nx = 1\n```",
    "half a word": f"{SENTENCE} One, two, th",
    "an emoji": f"{SENTENCE} So {ASTRONAUT}",
    "spaces": f"{SENTENCE} Wait...  ",
    "another script": "ภาษาไทย น้ำขึ้นวันละสองครั้ง မြန်မာဘာသာ",
}


@functools.cache
def tokenizer(name: str) -> Any:
    return getattr(shipped_tokenizers, name)()


thinking_tokenizer = functools.cache(qwen_3)


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer(name))


def quoting(draft: str) -> list[dict[str, str]]:
    ask = f"Review this draft.\n\n{draft}\n\nList one flaw."
    return [{"role": "system", "content": NOTES[1]}, {"role": "user", "content": ask}]


def encode(name: str, text: str) -> list[int]:
    return list(tokenizer(name).encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", NAMES)
class TestGrowingDrafts:
    """Case 03: the draft's last token changes when text follows it."""

    @pytest.mark.parametrize("draft", ENDINGS.values(), ids=ENDINGS)
    def test_a_draft_cut_anywhere_gives_a_true_prefix(self, name: str, draft: str) -> None:
        tokens = template(name)
        segments = segments_of(lambda text: tokens.render(quoting(text)))
        whole = tokens.prompt_ids(quoting(draft))
        assert whole == tuple(tokens.encode(tokens.render(quoting(draft))))
        for cut in range(0, len(draft) + 1, 3):
            prompt = GrowingPrompt(tokens, segments)
            for piece in (draft[:cut], draft[cut:]):
                prompt.feed(WRITER, piece)
                assert tuple(prompt.ids) == whole[: len(prompt.ids)]
            assert len(prompt.ids) > 0

    @pytest.mark.parametrize("ending", ["a full stop", "a code fence", "an emoji"])
    def test_the_prompt_is_the_same_with_edges_on_and_off(self, lab: Lab, name: str, ending: str) -> None:
        draft = f"{SENTENCE} {ENDINGS[ending]}"
        pieces = [draft[at : at + 4] for at in range(0, len(draft), 4)]
        chain = Quoting(lab, saying(*pieces, tokenizer=tokenizer(name)), tokenizer=tokenizer(name))
        state, asked = chain.on_and_off()
        assert state["writer"] == draft
        assert asked == template(name).prompt_ids(quoting(draft))
        certificate = chain.record.certificate("critic")
        assert certificate["wasted"] == 0
        assert certificate["streamed"] >= 4


@pytest.mark.parametrize("name", NAMES)
class TestOwnTokenSequences:
    """Case 04: a model may say ids that its tokenizer would not choose."""

    def writer(self, name: str, pieces: Sequence[str]) -> list[Delta]:
        said = saying(*pieces, tokenizer=tokenizer(name))
        ids = [id for delta in said for id in delta.token_ids]
        assert len(ids) > len(encode(name, "".join(pieces)))
        return said

    @pytest.mark.parametrize(
        "pieces", [("T", "ide po", "ols empt", "y twice a d", "ay. So it is."), tuple(f"{SENTENCE} So it is.")]
    )
    def test_are_encoded_as_a_whole(self, lab: Lab, name: str, pieces: Sequence[str]) -> None:
        chain = Quoting(lab, self.writer(name, pieces), tokenizer=tokenizer(name))
        state, asked = chain.on_and_off()
        assert state["writer"] == "".join(pieces)
        assert asked == template(name).prompt_ids(quoting("".join(pieces)))
        writer, critic = chain.record.certificate("writer"), chain.record.certificate("critic")
        assert writer["output_tokens"] == sum(len(encode(name, piece)) for piece in pieces)
        assert critic["wasted"] == 0
        assert critic["streamed"] >= 4
        assert 0 < critic["cached"] <= critic["static"] + critic["streamed"]


class TestRewrittenHistory:
    """Case 05: the chat template leaves the thoughts of earlier turns out, so that a turn is no prefix of the next."""

    THOUGHT = "<think>\nCrabs live there.\n</think>\n\n"
    ANSWER = "A hermit crab."
    FIRST = (SystemMessage(NOTES[1]), HumanMessage("Name one tide pool animal."))

    @pytest.fixture
    def tokenizer(self) -> Any:
        return thinking_tokenizer()

    def graph(self, model: Any) -> Any:
        """Turn one, then turn two over the history."""
        second = HumanMessage("Add a fact.")
        prompts = {
            "first": lambda state: list(self.FIRST),
            "second": lambda state: [*self.FIRST, *state["messages"], second],
        }
        builder = StateGraph(MessagesState)
        for node, prompt in prompts.items():
            builder.add_node(node, agent_node(model, prompt=prompt, writes=lambda answer: {"messages": [answer]}))
        return builder.add_edge(START, "first").add_edge("first", "second").compile()

    def run(self, lab: Lab, tokenizer: Any, overlap: str, thinking: bool) -> tuple[Any, Recorder]:
        said = (self.THOUGHT if thinking else "") + self.ANSWER
        reply = lambda prompt: "It borrows its shell." if "Add a fact." in prompt else said  # noqa: E731
        engines = [
            lab.engine(f"fake:{n}", tokenizer=tokenizer, reply=reply, block_size=4, decode_speed=80.0) for n in range(2)
        ]
        model = lab.model(engines, overlap=overlap, chat_template_kwargs={"enable_thinking": thinking})
        record = lab.record(model)
        return self.graph(model).invoke({"messages": []}), record

    @pytest.mark.parametrize(("thinking", "sizes"), [(False, (28, 47)), (True, (24, 43))])
    def test_shortens_what_is_prefilled_and_nothing_else(
        self, lab: Lab, tokenizer: Any, thinking: bool, sizes: tuple[int, int]
    ) -> None:
        off, _ = self.run(lab, tokenizer, "off", thinking)
        expected = self.asked(lab)
        on, record = self.run(lab, tokenizer, "on", thinking)
        assert [message.text for message in on["messages"]] == [message.text for message in off["messages"]]
        first, second = self.asked(lab)
        assert [first, second] == expected
        assert (len(first), len(second)) == sizes
        assert common_prefix(first, second) == 24
        assert "Crabs" not in tokenizer.decode(list(second))
        certificate = record.certificate("second")
        assert certificate["fallback"] is None
        assert 20 <= certificate["static"] <= 24
        assert certificate["static"] + certificate["streamed"] <= 44
        assert (certificate["wasted"] > 0) is thinking, "thoughts that are part of the content stream in vain"
        assert [event.data for event in record.events if event.name in ("plan.failed", "append.failed")] == []

    def test_the_engine_that_answered_holds_no_more_than_what_both_have(self, lab: Lab, tokenizer: Any) -> None:
        tokens = ChatTemplate(tokenizer)
        _, record = self.run(lab, tokenizer, "off", thinking=True)
        first, second = self.asked(lab)
        held = [*first, *tokens.encode(f"{self.THOUGHT}{self.ANSWER}<|im_end|>")]
        assert len(held) == 39
        assert common_prefix(held, second) == 24
        certificate = record.certificate("second")
        assert (certificate["device"], certificate["cached"]) == ("fake:0", 24)  # where the conversation is, it goes on

    @staticmethod
    def asked(lab: Lab) -> list[tuple[int, ...]]:
        asked = [request.prompt_token_ids for engine in lab.engines for request in engine.requests]
        return sorted(asked, key=len)
