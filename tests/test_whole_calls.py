"""Tool calls that were cut off or written wrong are never carried out, however LangChain makes the message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langgraph_pingpong import ChatPingPong, after_tools
from langgraph_pingpong.engines.base import ToolCallPart
from langgraph_pingpong.whole_calls import RawCalls, WholeCalls, parse_calls
from tests.test_chat_contract import HERMES, answering, call, essence, every_way, pieces, same, tide_time

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")

CUT_OFF = HERMES.format(name="send", arguments='{"to": "all", "text": "Do not delete the files"}').split(" files")[0]
NO_OBJECTS = {
    "encoded twice": json.dumps('{"place": "Oslo"}'),
    "a word": '"Oslo"',
    "a list": '["Oslo"]',
    "an empty list": "[]",
    "a number": "7",
    "a number too long": "1" * 4500,
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda graph: graph.invoke(INPUT),
    "ainvoke": lambda graph: asyncio.run(graph.ainvoke(INPUT)),
    "messages": lambda graph: list(graph.stream(INPUT, stream_mode=["messages", "values"]))[-1][1],
    "events": lambda graph: asyncio.run(last_event(graph)),
    "v3": lambda graph: graph.stream_events(INPUT, version="v3").output,
}
INPUT = {"messages": [("user", "Hi")]}


async def last_event(graph: Any) -> Any:
    return [event async for event in graph.astream_events(INPUT, version="v2")][-1]["data"]["output"]


def asking(model: ChatPingPong, sent: list[str]) -> Any:
    """A graph whose model may send a text."""

    @tool
    def send(to: str, text: str = "") -> str:
        """Send a text."""
        sent.append(text)
        return "sent"

    bound = model.bind_tools([send])
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([send]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", lambda s: "tools" if s["messages"][-1].tool_calls else END, ["tools", END])
    builder.add_edge("tools", "model")
    return builder.compile()


class TestCallsThatWereCutOff:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("settings", [{}, {"streaming": True}, {"output_version": "v1"}], ids=str)
    def test_are_not_carried_out_in_a_graph(self, way: str, settings: dict[str, Any]) -> None:
        sent: list[str] = []
        result = WAYS[way](asking(answering(CUT_OFF, **settings), sent))
        message = result["messages"][-1]
        assert sent == []
        assert message.tool_calls == []
        (wrong,) = message.invalid_tool_calls
        assert (wrong["name"], wrong["args"]) == ("send", '{"to": "all", "text": "Do not delete the')
        assert "raw_tool_calls" not in message.response_metadata
        assert "tool_call" not in str([block for block in message.content if not isinstance(block, str)])

    def test_are_not_carried_out_from_a_cache(self) -> None:
        model = answering(CUT_OFF, streaming=True, cache=InMemoryCache())
        messages = [model.bind_tools([tide_time]).invoke("Hi") for _ in range(2)]
        assert [message.tool_calls for message in messages] == [[], []]
        assert [len(message.invalid_tool_calls) for message in messages] == [1, 1]

    def test_are_told_to_who_adds_up_the_chunks(self) -> None:
        *_, last = answering(CUT_OFF).bind_tools([tide_time]).stream("Hi")
        (made,) = last.response_metadata["raw_tool_calls"]
        assert made["function"] == {"name": "send", "arguments": '{"to": "all", "text": "Do not delete the'}

    def test_leave_whole_ones_beside_them(self) -> None:
        whole = HERMES.format(name="send", arguments='{"to": "Ada"}')
        model = answering(f"{whole}\n{CUT_OFF}", streaming=True).bind_tools([tide_time])
        message = model.invoke("Hi")
        assert [made["args"] for made in message.tool_calls] == [{"to": "Ada"}]
        assert len(message.invalid_tool_calls) == 1

    def test_langchain_still_makes_messages_where_they_are_read_again(self) -> None:
        for name in ("_generate_with_cache", "_agenerate_with_cache"):
            assert hasattr(BaseChatModel, name) and hasattr(WholeCalls, name)


class TestArgumentsThatAreNoObject:
    @pytest.mark.parametrize("arguments", NO_OBJECTS.values(), ids=NO_OBJECTS)
    def test_make_an_invalid_call_in_every_way(self, arguments: str) -> None:
        text = pieces(HERMES.format(name="tide_time", arguments=arguments), 500)
        plain = [answering(text, streaming=on).bind_tools([tide_time]).invoke("Hi") for on in (False, True)]
        message = same(plain)
        assert message.tool_calls == []
        assert [made["args"] for made in message.invalid_tool_calls] == [arguments]
        streamed = every_way(answering(text).bind_tools([tide_time]))
        assert {len(each.tool_calls) for each in streamed} == {0}

    @pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
    def test_make_an_invalid_call_in_the_third_events(self) -> None:
        model = answering(HERMES.format(name="tide_time", arguments='"Oslo"')).bind_tools([tide_time])
        message = model.stream_events("Hi", version="v3").output
        assert [(made["name"], made["args"]) for made in message.invalid_tool_calls] == [("tide_time", '"Oslo"')]
        assert message.tool_calls == []

    @pytest.mark.parametrize("overlap", ["on", "off"])
    @pytest.mark.parametrize("way", WAYS)
    def test_do_not_break_a_node(self, way: str, overlap: Any) -> None:
        text = HERMES.format(name="send", arguments=NO_OBJECTS["encoded twice"])
        result = WAYS[way](asking(answering(text, overlap=overlap), []))
        assert len(result["messages"][-1].invalid_tool_calls) == 1

    def test_null_is_no_arguments(self) -> None:
        text = HERMES.format(name="tide_time", arguments="null")
        message = same([answering(text, streaming=on).bind_tools([tide_time]).invoke("Hi") for on in (False, True)])
        assert [made["args"] for made in message.tool_calls] == [{}]

    def test_a_line_break_in_a_string_is_read_as_it_is(self) -> None:
        raw = RawCalls([ToolCallPart(0, "1", "tide_time", '{"place": "Os\nlo"}')])
        assert not raw.whole()
        assert [made["args"] for made in parse_calls(raw.told())[0]] == [{"place": "Os\nlo"}]

    def test_nesting_without_end_is_no_object(self) -> None:
        raw = RawCalls([ToolCallPart(0, "1", "tide_time", '{"place": ' + "[" * 100_000)]).told()
        assert [len(calls) for calls in parse_calls(raw)] == [0, 1]


class TestContentBlocks:
    TEXT = f"I look. {call('Oslo')}\n{call('Lima')}"

    @pytest.mark.parametrize("cut", [1, 7, 40, 1000])
    def test_of_a_streamed_answer_keep_calls_and_text_apart(self, cut: int) -> None:
        models = [
            answering(pieces(self.TEXT, cut), output_version="v1", streaming=on).bind_tools([tide_time])
            for on in (False, True)
        ]
        for message in (*every_way(models[0]), models[1].invoke("Hi"), asyncio.run(models[1].ainvoke("Hi"))):
            assert self.told(message) == [("text", "I look. "), ("tool_call", "Oslo"), ("tool_call", "Lima")]
            assert [made["args"]["place"] for made in message.tool_calls] == ["Oslo", "Lima"]

    @pytest.mark.parametrize("cut", [1, 40, 1000])
    @pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
    def test_of_the_third_events_hold_calls_that_come_with_text(self, cut: int) -> None:
        model = answering(pieces(self.TEXT, cut)).bind_tools([tide_time])
        message = model.stream_events("Hi", version="v3").output
        assert self.told(message) == [("text", "I look. "), ("tool_call", "Oslo"), ("tool_call", "Lima")]

    def told(self, message: AIMessage) -> list[tuple[str, str]]:
        return [(block["type"], block.get("text") or block["args"]["place"]) for block in message.content_blocks]


def test_a_hint_that_fails_does_not_fail_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no message")

    monkeypatch.setattr(after_tools, "calling_message", broken)
    sent: list[str] = []
    text = HERMES.format(name="send", arguments='{"to": "all", "text": "noon"}')
    model = answering(lambda prompt: "Done." if "<tool_response>" in prompt else text)
    result = asking(model, sent).invoke(INPUT)
    assert sent == ["noon"]
    assert essence(result["messages"][-1])["content"] == "Done."
