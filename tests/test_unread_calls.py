"""What looks like a tool call and is none stays in the answer, and calls whose keys come in another order are read."""

from __future__ import annotations

import pytest

from tests import test_chat_contract as contract
from tests.conftest import Lab
from tests.test_chat_contract import TAKES_TOOLS, answering, call, every_way, pieces, same, tide_time

NONE = {
    "a mention": "Use <tool_call> tags please.",
    "no JSON": "<tool_call>\ntide_time(place=Oslo)\n</tool_call>",
    "other keys": '<tool_call>\n{"tool": "tide_time", "args": {}}\n</tool_call> Done.',
    "a name cut off": 'I look. <tool_call>\n{"na',
    "nothing behind the tag": "I look. <tool_call>",
    "two": "<tool_call>a</tool_call> and <tool_call>b</tool_call> or <tool",
}
CUTS = [1, 7, 1000]


@pytest.mark.parametrize("cut", CUTS)
class TestTextBehindATag:
    @pytest.mark.parametrize("text", NONE.values(), ids=NONE)
    def test_that_calls_nothing_is_content(self, text: str, cut: int) -> None:
        message = same(every_way(answering(pieces(text, cut)).bind_tools([tide_time])))
        assert message.content == text
        assert message.tool_calls == message.invalid_tool_calls == []
        assert message.response_metadata["finish_reason"] == "stop"

    def test_that_calls_nothing_is_content_behind_a_call(self, cut: int) -> None:
        text = f"I look. {call('Oslo')} <tool_call>tide_time(Lima)</tool_call> Done."
        message = same(every_way(answering(pieces(text, cut)).bind_tools([tide_time])))
        assert message.content == "I look. <tool_call>tide_time(Lima)</tool_call> Done."
        assert [made["args"] for made in message.tool_calls] == [{"place": "Oslo"}]

    def test_that_was_left_out_as_one_call_too_many_is_not_content(self, cut: int) -> None:
        bound = answering(pieces(f"{call('Oslo')}\n{call('Lima')}", cut)).bind_tools(
            [tide_time], parallel_tool_calls=False
        )
        assert same(every_way(bound)).content == ""

    def test_is_content_behind_reasoning(self, cut: int) -> None:
        text = f"<think>Where?</think>{NONE['a mention']}"
        message = same(every_way(answering(pieces(text, cut), reasoning_parser="qwen3").bind_tools([tide_time])))
        assert message.additional_kwargs["reasoning_content"] == "Where?"
        assert message.content == NONE["a mention"]

    def test_is_not_said_twice_where_a_parser_gives_it_itself(self, cut: int) -> None:
        model = answering(pieces(NONE["other keys"], cut), tool_parser="poolside_v1", chat_template=TAKES_TOOLS)
        assert model.bind_tools([tide_time]).invoke("Hi").text.count("Done.") == 1


@pytest.mark.parametrize("end", ["", f"</think>{NONE['a mention']}"], ids=["cut off", "whole"])
def test_a_tag_in_reasoning_stays_there(end: str) -> None:
    model = answering(
        f"<think>A <tool_call> or none?{end}", contract.thinking_tokenizer(), reasoning_parser="deepseek_r1"
    )
    message = same(every_way(model.bind_tools([tide_time])))
    assert message.additional_kwargs["reasoning_content"] == "A <tool_call> or none?"
    assert message.content == end.removeprefix("</think>")


def test_text_behind_a_tag_is_forwarded(lab: Lab) -> None:
    text = f"{contract.TestEdges.text}Use <tool_call> tags."
    prompt = contract.TestEdges().run(lab, lambda model: model.bind_tools([tide_time]), text)
    assert f"Text:\n{text}\n" in prompt


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "keys",
    [
        '{"arguments": {"place": "Oslo, {north}"}, "name": "tide_time"}',
        '{"name": "tide_time", "arguments": {"place": "Oslo, {north}"}, "id": 7}',
        '{"id": 7, "name": "tide_time", "arguments":  {"place": "Oslo, {north}"} , "type": "function"}',
    ],
)
def test_a_call_is_read_in_any_order_of_its_keys(keys: str, cut: int) -> None:
    text = f"<tool_call>\n{keys}\n</tool_call>"
    message = same(every_way(answering(pieces(text, cut)).bind_tools([tide_time])))
    assert [(made["name"], made["args"]) for made in message.tool_calls] == [("tide_time", {"place": "Oslo, {north}"})]
    assert message.content == ""
