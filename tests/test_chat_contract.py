"""The contract of a LangChain chat model, on modelled engines with scripted replies."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import FakeListChatModel
from langchain_core.load import dumps
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine, agent_node
from langgraph_pingpong.engines.base import Delta
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.engines.vllm_parsers import _import_vllm
from langgraph_pingpong.errors import (
    CallRefused,
    CallTimedOut,
    EngineNotInstalled,
    TemplateRefused,
    UnknownParser,
    UnknownSetting,
)
from langgraph_pingpong.tokens import ChatTemplate
from tests.conftest import Lab

HERMES = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
TAKES_TOOLS = (
    "{% if tools %}TOOLS {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% if mood %}MOOD {{ mood }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<CALL {{ c.function.name }} {{ c.function.arguments.place }}>{% endfor %}"
    "{% endfor %}[assistant]"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def tide_time(place: str) -> str:
    """When the next high tide is.

    Args:
        place: a harbour.
    """
    return f"noon in {place}"


class Harbour(BaseModel):
    """A harbour and its tides."""

    name: str
    tides: int


class HarbourDict(TypedDict):
    """A harbour and its tides."""

    name: str
    tides: int


HARBOUR = {"name": "Oslo", "tides": 2}


def call(place: str, name: str = "tide_time") -> str:
    return HERMES.format(name=name, arguments=json.dumps({"place": place}))


def answering(
    reply: str | Sequence[Delta] | Callable[[str], str], tokenizer: Any = None, time_scale: float = 0.0, **settings: Any
) -> ChatPingPong:
    """A model on one modelled engine."""
    engine = FakeEngine(
        reply=reply if callable(reply) else lambda _: reply,
        tokenizer=tokenizer or fake_tokenizer(),
        time_scale=time_scale,
    )
    return ChatPingPong(pool=EnginePool([engine]), **settings)


def engine_of(model: ChatPingPong) -> FakeEngine:
    (engine,) = model._serving().pool.engines
    assert isinstance(engine, FakeEngine)
    return engine


def last_prompt(model: ChatPingPong) -> str:
    engine = engine_of(model)
    return str(engine.tokenizer.decode(list(engine.requests[-1].prompt_token_ids)))


def last_sampling(model: ChatPingPong) -> dict[str, Any]:
    return dict(engine_of(model).requests[-1].sampling)


def pieces(text: str, size: int) -> list[Delta]:
    """A reply in pieces of so many characters, whatever its tokens are."""
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    return [Delta(part, (1,)) for part in parts[:-1]] + [Delta(parts[-1], (1,), "stop")]


def merged(chunks: Sequence[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def every_way(model: Any, prompt: Any = "Hi") -> list[AIMessage]:
    """What `invoke`, `ainvoke`, `batch`, `abatch`, `stream` and `astream` give."""

    async def asynchronously() -> list[AIMessage]:
        return [
            await model.ainvoke(prompt),
            *await model.abatch([prompt]),
            merged([chunk async for chunk in model.astream(prompt)]),
        ]

    return [
        model.invoke(prompt),
        *model.batch([prompt]),
        merged(list(model.stream(prompt))),
        *asyncio.run(asynchronously()),
    ]


def essence(message: AIMessage) -> dict[str, Any]:
    """A message without what differs from call to call: ids, times and what was found cached."""
    metadata = {name: value for name, value in message.response_metadata.items() if name != "pingpong"}
    usage = message.usage_metadata
    return {
        "content": message.content,
        "kwargs": message.additional_kwargs,
        "calls": [(made["name"], made["args"]) for made in message.tool_calls],
        "invalid": [(made["name"], made["args"]) for made in message.invalid_tool_calls],
        "metadata": metadata,
        "usage": usage and (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]),
    }


def same(messages: Sequence[AIMessage]) -> AIMessage:
    """The first of several messages that say the same."""
    assert [essence(message) for message in messages[1:]] == [essence(messages[0])] * (len(messages) - 1)
    return messages[0]


class TestToolCalls:
    @pytest.mark.parametrize("cut", [None, 1, 7, 1000])
    def test_two_at_once_are_two_however_they_come(self, cut: int | None) -> None:
        text = f"{call('Oslo')}\n{call('Lima')}"
        model = answering(text if cut is None else pieces(text, cut)).bind_tools([tide_time])
        message = same(every_way(model))
        assert [(made["name"], made["args"]) for made in message.tool_calls] == [
            ("tide_time", {"place": "Oslo"}),
            ("tide_time", {"place": "Lima"}),
        ]
        assert message.invalid_tool_calls == []
        assert len({made["id"] for made in message.tool_calls} - {None, ""}) == 2
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert message.content == ""

    def test_stream_in_parts_that_name_the_call_once(self) -> None:
        chunks = list(answering(call("Oslo")).bind_tools([tide_time]).stream("Hi"))
        parts = [part for chunk in chunks for part in chunk.tool_call_chunks]
        assert [part["name"] for part in parts if part["name"]] == ["tide_time"]
        assert len([part["id"] for part in parts if part["id"]]) == 1
        assert {part["index"] for part in parts} == {0}
        assert len(parts) > 5
        assert json.loads("".join(part["args"] or "" for part in parts)) == {"place": "Oslo"}

    def test_leave_the_text_before_them_and_no_markup(self) -> None:
        message = same(every_way(answering(f"I look. {call('Oslo')}").bind_tools([tide_time])))
        assert message.content == "I look. "
        assert len(message.tool_calls) == 1

    def test_that_were_cut_off_are_invalid(self) -> None:
        model = answering(call("Oslo"), max_tokens=len(call("Oslo")) - 20).bind_tools([tide_time])
        message = model.invoke("Hi")
        assert message.tool_calls == []
        assert [made["name"] for made in message.invalid_tool_calls] == ["tide_time"]
        assert message.response_metadata["finish_reason"] == "length"

    @pytest.mark.parametrize("text", ["low < high", "1 <", "a <tool", "<", "Just text."])
    def test_text_that_might_have_become_one_is_not_lost(self, text: str) -> None:
        message = same(every_way(answering(text).bind_tools([tide_time])))
        assert message.content == text
        assert message.response_metadata["finish_reason"] == "stop"

    def test_can_be_limited_to_one(self) -> None:
        model = answering(f"{call('Oslo')}\n{call('Lima')}")
        message = same(every_way(model.bind_tools([tide_time], parallel_tool_calls=False)))
        assert [made["args"] for made in message.tool_calls] == [{"place": "Oslo"}]

    def test_without_tools_are_text(self) -> None:
        assert same(every_way(answering(call("Oslo")))).content == call("Oslo")

    def test_of_another_format_need_its_parser(self) -> None:
        model = answering('[tide_time(place="Oslo")]', tool_parser="pythonic", chat_template=TAKES_TOOLS)
        message = same(every_way(model.bind_tools([tide_time])))
        assert [made["args"] for made in message.tool_calls] == [{"place": "Oslo"}]

    def test_of_a_format_that_vllm_reads_by_ids_stream_as_well(self) -> None:
        text = "<tool_call>\n<function=tide_time>\n<parameter=place>\nOslo\n</parameter>\n</function>\n</tool_call>"
        model = answering(f"I look. {text}", tool_parser="qwen3_coder", chat_template=TAKES_TOOLS)
        message = same(every_way(model.bind_tools([tide_time])))
        assert message.content == "I look. "
        assert [made["args"] for made in message.tool_calls] == [{"place": "Oslo"}]

    def test_need_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(EngineNotInstalled, match="parsers"):
            _import_vllm.__wrapped__()

    def test_run_in_a_loop_with_their_results(self) -> None:
        def reply(prompt: str) -> str:
            return "It is noon." if "<tool_response>" in prompt else call("Oslo")

        model = answering(reply)
        bound = model.bind_tools([tool(tide_time)])
        messages: list[Any] = [HumanMessage("When is high tide in Oslo?")]
        messages.append(bound.invoke(messages))
        messages.append(tool(tide_time).invoke(messages[-1].tool_calls[0]))
        assert bound.invoke(messages).content == "It is noon."
        assert "<tool_response>\nnoon in Oslo\n</tool_response>" in last_prompt(model)


@tool
def tide_tool(place: str) -> str:
    """When the next high tide is."""
    return place


SCHEMA = {
    "name": "tide_schema",
    "description": "A schema.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


class TestBindTools:
    @pytest.mark.parametrize(
        ("given", "name"),
        [
            (tide_time, "tide_time"),
            (tide_tool, "tide_tool"),
            (Harbour, "Harbour"),
            (HarbourDict, "HarbourDict"),
            (SCHEMA, "tide_schema"),
            ({"type": "function", "function": SCHEMA}, "tide_schema"),
        ],
    )
    def test_takes_whatever_langchain_makes_a_tool_of(self, given: Any, name: str) -> None:
        model = answering("x")
        model.bind_tools([given]).invoke("Hi")
        assert f'"name": "{name}"' in last_prompt(model)

    @pytest.mark.parametrize("choice", ["any", "required", True, "tide_time", {"function": {"name": "tide_time"}}])
    def test_a_forced_choice_is_enforced_with_the_schema_of_the_arguments(self, choice: Any) -> None:
        model = answering(call("Oslo"))
        message = model.bind_tools([tide_time, Harbour], tool_choice=choice).invoke("Hi")
        assert message.tool_calls[0]["name"] == "tide_time"
        constraint = last_sampling(model)["structured_outputs"]["structural_tag"]
        tags = json.loads(constraint)["format"]["tags"]
        by_name = choice not in ("any", "required", True)
        assert ("Harbour" in constraint) is not by_name
        assert all(set(tag["content"]["json_schema"]["properties"]) & {"place", "tides"} for tag in tags)

    @pytest.mark.parametrize("choice", ["any", "tide_time"])
    def test_a_parser_without_a_grammar_of_its_own_forces_calls_as_json(self, choice: str) -> None:
        asked = [{"name": "tide_time", "parameters": {"place": place}} for place in ("Oslo", "Lima")]
        text = json.dumps(asked if choice == "any" else asked[0]["parameters"])
        model = answering(text, tool_parser="pythonic", chat_template=TAKES_TOOLS)
        message = same(every_way(model.bind_tools([tide_time], tool_choice=choice)))
        places = [made["args"]["place"] for made in message.tool_calls]
        assert places == (["Oslo", "Lima"] if choice == "any" else ["Oslo"])
        assert "place" in json.dumps(last_sampling(model)["structured_outputs"]["json"])
        assert message.response_metadata["finish_reason"] == "tool_calls"

    def test_the_models_own_choice_is_free(self) -> None:
        model = answering("x")
        model.bind_tools([tide_time]).invoke("Hi")
        assert "structured_outputs" not in last_sampling(model)

    def test_strict_binds_the_arguments_of_a_free_choice(self) -> None:
        model = answering("x")
        model.bind_tools([tide_time], strict=True).invoke("Hi")
        assert "structural_tag" in last_sampling(model)["structured_outputs"]

    def test_none_shows_no_tools(self) -> None:
        model = answering("x")
        model.bind_tools([tide_time], tool_choice="none").invoke("Hi")
        assert "tide_time" not in last_prompt(model)
        assert "structured_outputs" not in last_sampling(model)

    @pytest.mark.parametrize("choice", ["tide", {"type": "function", "function": {"name": "tide"}}])
    def test_refuses_a_choice_that_is_no_tool(self, choice: Any) -> None:
        with pytest.raises(CallRefused, match="tide_time"):
            answering("x").bind_tools([tide_time], tool_choice=choice)

    def test_refuses_to_force_a_call_without_tools(self) -> None:
        with pytest.raises(CallRefused, match="no tools"):
            answering("x").bind_tools([], tool_choice="any")

    @pytest.mark.parametrize("choice", [None, "any"])
    def test_a_tool_that_its_provider_runs_is_refused_when_it_is_bound(self, choice: str | None) -> None:
        with pytest.raises(CallRefused, match=r"'web_search_preview'.*functions only"):
            answering("x").bind_tools([tide_time, {"type": "web_search_preview"}], tool_choice=choice)
        with pytest.raises(CallRefused, match="'custom'"):
            answering("x").invoke("Hi", tools=[{"type": "custom"}], tool_choice="any")

    def test_an_unknown_parser_is_refused_with_the_names_of_those_there_are(self) -> None:
        with pytest.raises(UnknownParser, match=r"'hermess'.*hermes.*pythonic"):
            answering("x", tool_parser="hermess").start()
        with pytest.raises(UnknownParser, match=r"'qwen33'.*deepseek_r1.*qwen3"):
            answering("x", reasoning_parser="qwen33").start()


class TestTemplates:
    def test_with_a_place_for_tools_get_them(self) -> None:
        model = answering("x", chat_template=TAKES_TOOLS)
        model.bind_tools([tide_time]).invoke("Hi")
        assert last_prompt(model) == "TOOLS tide_time [user]Hi[assistant]"
        model.invoke("Hi")
        assert last_prompt(model) == "[user]Hi[assistant]"

    def test_with_a_place_for_tools_get_calls_with_arguments_as_objects(self) -> None:
        model = answering("x", chat_template=TAKES_TOOLS)
        model.invoke(HISTORY)
        assert "<CALL tide_time Oslo><CALL tide_time Lima>[tool]noon[tool]two" in last_prompt(model)

    def test_without_get_them_in_the_system_message(self) -> None:
        model = answering("x")
        model.bind_tools([tide_time]).invoke([SystemMessage("Be kind."), HumanMessage("Hi")])
        prompt = last_prompt(model)
        assert prompt.startswith("<|im_start|>system\nBe kind.\n\n")
        assert '"description": "When the next high tide is."' in prompt
        assert prompt.count("<|im_start|>system") == 1

    def test_without_get_calls_and_results_as_text(self) -> None:
        model = answering("x")
        model.invoke(HISTORY)
        prompt = last_prompt(model)
        assert f"assistant\nI look.\n{call('Oslo')}\n{call('Lima')}<|im_end|>" in prompt
        results = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
        assert f"<|im_start|>user\n{results}<|im_end|>" in prompt

    def test_without_and_with_a_parser_of_another_format_are_refused(self) -> None:
        model = answering("x", tool_parser="pythonic")
        with pytest.raises(CallRefused, match="pythonic"):
            model.bind_tools([tide_time]).invoke("Hi")

    def test_take_variables_of_the_model_and_of_the_call(self) -> None:
        model = answering("x", chat_template=TAKES_TOOLS, chat_template_kwargs={"mood": "calm"})
        model.invoke("Hi")
        assert last_prompt(model).startswith("MOOD calm")
        model.invoke("Hi", chat_template_kwargs={"mood": "wild"})
        assert last_prompt(model).startswith("MOOD wild")

    @pytest.mark.parametrize(("block", "missing"), [({"type": "text"}, "'text'"), ({"text": "x"}, "'type'")])
    def test_blocks_that_lack_something_are_told(self, block: Any, missing: str) -> None:
        with pytest.raises(CallRefused, match=f"content block of a message has no {missing}"):
            answering("x").invoke([HumanMessage([block])])

    @pytest.mark.parametrize("given", [["calm"], {"messages": []}, {"tools": []}])
    def test_take_no_other_variables(self, given: Any) -> None:
        with pytest.raises(CallRefused, match="chat_template_kwargs are"):
            answering("x", chat_template=TAKES_TOOLS).invoke("Hi", chat_template_kwargs=given)

    @pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[7].role.name }}"])
    def test_that_fail_are_told_as_templates(self, template: str) -> None:
        with pytest.raises(TemplateRefused, match="chat template"):
            answering("x", chat_template=template).invoke("Hi")

    def test_that_refuse_an_order_of_roles_are_quoted(self) -> None:
        strict = (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
        )
        model = answering("x", chat_template=strict)
        with pytest.raises(TemplateRefused, match="must alternate"):
            model.invoke([HumanMessage("a"), HumanMessage("b")])
        assert engine_of(model).requests == []


HISTORY = [
    HumanMessage("When?", name="ada"),
    AIMessage(
        "I look.",
        tool_calls=[
            {"name": "tide_time", "args": {"place": "Oslo"}, "id": "1"},
            {"name": "tide_time", "args": {"place": "Lima"}, "id": "2"},
        ],
    ),
    ToolMessage("noon", tool_call_id="1", name="tide_time"),
    ToolMessage([{"type": "text", "text": "two"}], tool_call_id="2", status="error"),
]


class TestMessages:
    def prompt(self, *messages: Any) -> str:
        model = answering("x")
        model.invoke(list(messages))
        return last_prompt(model).removesuffix("<|im_start|>assistant\n").replace("<|im_start|>", "")

    def test_blocks_of_text_are_joined_by_lines(self) -> None:
        blocks = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
        assert self.prompt(HumanMessage(blocks)) == "user\na\nb\nc<|im_end|>\n"

    def test_thoughts_of_earlier_answers_are_left_out(self) -> None:
        blocks = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a"}]
        assert self.prompt(AIMessage(blocks)) == "assistant\na<|im_end|>\n"
        assert self.prompt(AIMessage("a", additional_kwargs={"reasoning_content": "hm"})) == "assistant\na<|im_end|>\n"

    def test_in_the_v1_form_are_those_of_the_old_form(self) -> None:
        blocks = HISTORY[1].content_blocks
        assert [block["type"] for block in blocks] == ["text", "tool_call", "tool_call"]
        assert self.prompt(AIMessage(content_blocks=blocks)) == self.prompt(HISTORY[1])

    def test_of_a_model_behind_another_api_keep_their_calls(self) -> None:
        """OpenAI's Responses API: calls stand among the blocks, too."""
        made = {"name": "tide_time", "arguments": '{"place": "Oslo"}', "call_id": "1", "type": "function_call"}
        blocks = [{"type": "reasoning", "summary": []}, {"type": "text", "text": "I look."}, made]
        calls = [{"name": "tide_time", "args": {"place": "Oslo"}, "id": "1"}]
        assert self.prompt(AIMessage(blocks, tool_calls=calls)) == self.prompt(AIMessage("I look.", tool_calls=calls))

    def test_of_one_role_in_a_row_and_a_late_system_message_stay_in_order(self) -> None:
        prompt = self.prompt(HumanMessage("a", name="ada"), HumanMessage("b"), SystemMessage("c"), AIMessage("d"))
        assert prompt == "user\na<|im_end|>\nuser\nb<|im_end|>\nsystem\nc<|im_end|>\nassistant\nd<|im_end|>\n"

    def test_of_a_role_of_its_own_reach_the_template(self) -> None:
        assert self.prompt(ChatMessage("a", role="critic")) == "critic\na<|im_end|>\n"

    def test_without_content_are_empty(self) -> None:
        assert self.prompt(HumanMessage(""), AIMessage("")) == "user\n<|im_end|>\nassistant\n<|im_end|>\n"

    def test_that_hold_an_image_are_refused(self) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
        with pytest.raises(CallRefused, match="image_url"):
            self.prompt(HumanMessage([{"type": "text", "text": "a"}, image]))


class TestStructuredOutput:
    text = json.dumps(HARBOUR)

    @pytest.mark.parametrize("schema", [Harbour, HarbourDict, Harbour.model_json_schema()])
    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_is_an_object_of_the_schema(self, schema: Any, method: Any) -> None:
        text = HERMES.format(name=getattr(schema, "__name__", "Harbour"), arguments=self.text)
        model = answering(text if method == "function_calling" else self.text)
        structured = model.with_structured_output(schema, method=method)
        expected = Harbour(name="Oslo", tides=2) if schema is Harbour else HARBOUR
        assert structured.invoke("Hi") == expected
        assert asyncio.run(structured.ainvoke("Hi")) == expected
        assert list(structured.stream("Hi"))[-1] == expected
        constraint = last_sampling(model)["structured_outputs"]
        assert ("structural_tag" if method == "function_calling" else "json") in constraint
        assert "tides" in json.dumps(constraint)

    def test_in_json_mode_is_any_object(self) -> None:
        model = answering(self.text)
        assert model.with_structured_output(method="json_mode").invoke("Hi") == HARBOUR
        assert last_sampling(model)["structured_outputs"] == {"json_object": True}
        parsed = model.with_structured_output(Harbour, method="json_mode").invoke("Hi")
        assert parsed == Harbour(name="Oslo", tides=2)

    def test_can_come_with_the_message(self) -> None:
        answer = answering(self.text).with_structured_output(Harbour, include_raw=True).invoke("Hi")
        assert answer["raw"].content == self.text
        assert answer["parsed"] == Harbour(name="Oslo", tides=2)
        assert answer["parsing_error"] is None

    @pytest.mark.parametrize("schema", [Harbour, HarbourDict])
    def test_that_was_cut_off_is_not_completed_by_guess(self, schema: Any) -> None:
        model = answering('{"tides": 2, "name": "Os')
        with pytest.raises(OutputParserException, match="Os"):
            model.with_structured_output(schema).invoke("Hi")

    def test_that_does_not_parse_is_an_error_or_is_reported(self) -> None:
        model = answering('{"name": "Oslo"}')
        with pytest.raises(OutputParserException):
            model.with_structured_output(Harbour).invoke("Hi")
        answer = model.with_structured_output(Harbour, include_raw=True).invoke("Hi")
        assert answer["parsed"] is None
        assert isinstance(answer["parsing_error"], OutputParserException)

    def test_needs_a_schema_and_a_known_method(self) -> None:
        model = answering("x")
        with pytest.raises(CallRefused, match="schema"):
            model.with_structured_output()
        with pytest.raises(CallRefused, match="json_schemas"):
            model.with_structured_output(Harbour, method="json_schemas")  # type: ignore[arg-type]

    def test_as_a_response_format_binds_the_answer(self) -> None:
        model = answering(self.text)
        schema = Harbour.model_json_schema()
        model.invoke("Hi", response_format={"type": "json_schema", "json_schema": {"name": "h", "schema": schema}})
        assert last_sampling(model)["structured_outputs"] == {"json": schema}
        model.invoke("Hi", response_format={"type": "text"})
        assert "structured_outputs" not in last_sampling(model)
        model.invoke("Hi", structured_outputs={"regex": "[a-z]+"})
        assert last_sampling(model)["structured_outputs"] == {"regex": "[a-z]+"}
        with pytest.raises(CallRefused, match="yaml"):
            model.invoke("Hi", response_format={"type": "yaml"})


def thinking_tokenizer() -> Any:
    tokenizer = fake_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


THOUGHT = "<think>Crabs live there.</think>A hermit crab."


class TestReasoning:
    def check(self, model: Any) -> None:
        message = same(every_way(model))
        assert message.content == "A hermit crab."
        assert message.additional_kwargs == {"reasoning_content": "Crabs live there."}
        assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]

    @pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
    def test_is_kept_apart(self, parser: str) -> None:
        self.check(answering(THOUGHT, thinking_tokenizer(), reasoning_parser=parser))

    @pytest.mark.parametrize("size", [1, 3, 4, 11])
    def test_is_kept_apart_where_tags_are_split(self, size: int) -> None:
        self.check(answering(pieces(THOUGHT, size), reasoning_parser="qwen3"))

    @pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
    def test_is_kept_apart_where_a_stop_string_holds_text_back(self, parser: str) -> None:
        text = f"{THOUGHT}\nResult: 1"
        model = answering(text, thinking_tokenizer(), reasoning_parser=parser, stop=["\nResult:"])
        self.check(model)

    def test_that_the_prompt_began_needs_no_opening_tag(self) -> None:
        model = answering(THOUGHT.removeprefix("<think>"), thinking_tokenizer(), reasoning_parser="deepseek_r1")
        self.check(model)

    def test_comes_before_a_tool_call(self) -> None:
        text = f"<think>Where?</think>I look. {call('Oslo')}"
        model = answering(text, thinking_tokenizer(), reasoning_parser="qwen3").bind_tools([tide_time])
        message = same(every_way(model))
        assert message.additional_kwargs == {"reasoning_content": "Where?"}
        assert message.content == "I look. "
        assert [made["args"] for made in message.tool_calls] == [{"place": "Oslo"}]

    def test_without_a_parser_is_content(self) -> None:
        assert same(every_way(answering(THOUGHT))).content == THOUGHT

    def test_with_a_parser_that_cannot_read_the_model_is_refused(self) -> None:
        with pytest.raises(UnknownParser, match="deepseek_r1"):
            answering(THOUGHT, reasoning_parser="deepseek_r1").invoke("Hi")


class TestStop:
    text = "tide\nResult: 1"

    @pytest.mark.parametrize("stop", ["\nResult:", "\n", "Result", "e"])
    def test_strings_are_no_part_of_the_answer(self, stop: str) -> None:
        message = same(every_way(answering(self.text, stop=[stop])))
        assert message.content == self.text[: self.text.index(stop)]
        assert message.response_metadata["finish_reason"] == "stop"

    def test_that_is_half_said_is_text(self) -> None:
        assert same(every_way(answering("tide\nResult", stop=["\nResult:"]))).content == "tide\nResult"

    def test_of_a_call_replaces_that_of_the_model(self) -> None:
        model = answering(self.text, stop=["tide"])
        assert model.invoke("Hi", stop=["Result"]).content == "tide\n"
        assert same(every_way(model.bind(stop=["Result"]))).content == "tide\n"
        assert ChatPingPong(devices=["fake:0"], stop_sequences=["a"]).stop == ["a"]

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
    @pytest.mark.parametrize("text", ["tide\nRes\nResult: 1", "tide\n\nResult: 1", "tide\nResult:"])
    def test_strings_that_come_in_pieces_leak_no_part(self, text: str, size: int) -> None:
        """However many characters a token has; what was half of one and went on otherwise is text."""
        model = answering(text, tokenizer=in_pieces(text, size), stop=["\nResult:", "nowhere"])
        message = same(every_way(model))
        assert message.content == text[: text.index("\nResult:")]
        shown = ""
        for chunk in model.stream("Hi"):
            shown += chunk.text
            assert message.content.startswith(shown)


def in_pieces(text: str, size: int) -> Any:
    """A tokenizer that has the pieces of a text as tokens."""
    tokenizer = fake_tokenizer()
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    tokenizer.add_tokens([part for part in parts if len(part) > 1])
    assert len(tokenizer.encode(text, add_special_tokens=False)) == len(parts)
    return tokenizer


class TestSeveralAnswers:
    deltas = (
        Delta("low", (1,)),
        Delta("high", (2,), index=1),
        Delta(" tide", (3,), "stop"),
        Delta("!", (4,), "length", index=1),
    )

    def test_are_generations(self) -> None:
        model = answering(self.deltas, n=2)
        for result in (model.generate([[HumanMessage("Hi")]]), asyncio.run(model.agenerate([[HumanMessage("Hi")]]))):
            messages = [each.message for each in result.generations[0]]
            assert [message.content for message in messages] == ["low tide", "high!"]
            assert [message.response_metadata["finish_reason"] for message in messages] == ["stop", "length"]
            assert [message.usage_metadata["output_tokens"] for message in messages] == [4, 4]

    def test_of_invoke_and_batch_are_the_first(self) -> None:
        model = answering("low tide")
        assert model.invoke("Hi", n=2).content == "low tide"
        assert [message.content for message in model.batch(["a", "b"], n=3)] == ["low tide"] * 2
        assert last_sampling(model)["n"] == 3

    def test_are_read_apart(self) -> None:
        model = answering(f"I look. {call('Oslo')}").bind_tools([tide_time])
        (generations,) = model.bound.generate([[HumanMessage("Hi")]], n=2, **model.kwargs).generations
        assert [each.message.tool_calls[0]["args"]["place"] for each in generations] == ["Oslo", "Oslo"]

    def test_cannot_be_streamed(self) -> None:
        model = answering("x")
        with pytest.raises(CallRefused, match="n=2"):
            list(model.stream("Hi", n=2))
        with pytest.raises(CallRefused, match="n=2"):
            asyncio.run(anext(aiter(model.astream("Hi", n=2))))

    def test_of_a_node_that_somebody_listens_to_are_given_whole(self) -> None:
        model = answering("low tide", n=2)
        builder = StateGraph(MessagesState)
        builder.add_node("writer", lambda state: {"messages": [model.invoke(state["messages"])]})
        builder.add_edge(START, "writer")
        builder.add_edge("writer", END)
        shown = [part for part, _ in builder.compile().stream({"messages": ["Hi"]}, stream_mode="messages")]
        assert [part.content for part in shown] == ["low tide"]

    @pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
    @pytest.mark.parametrize("how", ["setting", "argument"])
    def test_are_not_streamed_to_who_listens_to_the_graph(self, how: str) -> None:
        model = answering("tide", **({"n": 2} if how == "setting" else {}))
        arguments = {"n": 2} if how == "argument" else {}
        builder = StateGraph(MessagesState)
        builder.add_node("writer", lambda state: {"messages": [model.invoke("Hi", **arguments)]})
        graph = builder.add_edge(START, "writer").compile()

        async def asynchronously() -> Any:
            return await (await graph.astream_events({"messages": []}, version="v3")).output()

        outputs = [graph.stream_events({"messages": []}, version="v3").output, asyncio.run(asynchronously())]
        assert [[message.text for message in output["messages"]] for output in outputs] == [["tide"]] * 2


class TestLogprobs:
    def test_have_one_entry_a_token(self) -> None:
        model = answering("tide\nResult: 1", logprobs=True, top_logprobs=2, stop=["\nResult:"])
        message = same(every_way(model))
        entries = message.response_metadata["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == "tide\nResult:"
        assert len(entries) == message.usage_metadata["output_tokens"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
        assert entries[0]["logprob"] == 0.0 and entries[0]["bytes"] == [ord("t")]
        assert entries[0]["top_logprobs"][0]["token"] == "t"

    def test_are_given_when_asked_for(self) -> None:
        model = answering("tide")
        assert "logprobs" not in model.invoke("Hi").response_metadata
        content = model.invoke("Hi", logprobs=True).response_metadata["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in content] == [[]] * 4
        with pytest.raises(CallRefused, match="logprobs=True"):
            model.invoke("Hi", top_logprobs=2)


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)


class TestEnding:
    def test_usage_is_on_the_last_chunk_only(self) -> None:
        chunks = list(answering("tide pool").stream("Hi"))
        assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        whole = merged(chunks)
        assert whole.usage_metadata["input_tokens"] == whole.response_metadata["pingpong"]["prompt_tokens"]
        assert whole.usage_metadata["output_tokens"] == 9
        assert whole.response_metadata["finish_reason"] == "stop"
        assert whole.response_metadata["model_name"] == "default"
        assert [chunk.chunk_position for chunk in chunks][-2:] == [None, "last"]

    def test_usage_tells_what_was_cached(self) -> None:
        model = answering("tide")
        first, second = (model.invoke("Hi " * 40) for _ in range(2))
        assert first.usage_metadata["input_token_details"] == {"cache_read": 0}
        assert second.usage_metadata["input_token_details"] == {
            "cache_read": first.usage_metadata["input_tokens"] // 16 * 16
        }

    def test_at_the_limit_is_length(self) -> None:
        message = same(every_way(answering("tide pool", max_tokens=4)))
        assert message.content == "tide"
        assert message.response_metadata["finish_reason"] == "length"
        assert message.usage_metadata["output_tokens"] == 4

    def test_at_once_is_one_chunk_that_says_stop(self) -> None:
        (chunk,) = answering("").stream("Hi")
        assert (chunk.content, chunk.response_metadata["finish_reason"]) == ("", "stop")
        assert same(every_way(answering(""))).content == ""

    def test_all_chunks_have_the_id_of_the_message(self) -> None:
        chunks = list(answering("tide").stream("Hi"))
        assert len({chunk.id for chunk in chunks}) == 1

    def test_a_message_that_a_node_returns_is_not_shown_twice(self) -> None:
        model = answering("tide")
        builder = StateGraph(MessagesState)
        builder.add_node("writer", lambda state: {"messages": [model.invoke(state["messages"])]})
        builder.add_edge(START, "writer")
        graph = builder.compile()
        shown = [part for part, _ in graph.stream({"messages": ["Hi"]}, stream_mode="messages")]
        assert "".join(part.content for part in shown) == "tide"
        assert len(shown) > 1
        assert len({part.id for part in shown}) == 1

    def test_each_token_is_heard_once(self) -> None:
        listener = Listener()
        list(answering("tide").stream("Hi", config={"callbacks": [listener]}))
        assert "".join(listener.tokens) == "tide"
        answering("pool", streaming=True).invoke("Hi", config={"callbacks": [listener]})
        assert "".join(listener.tokens) == "tidepool"


class TestSettings:
    def test_that_langchain_knows_are_accepted(self) -> None:
        model = ChatPingPong(
            devices=["fake:0"], temperature=0, max_tokens=5, timeout=60, stop=[], max_retries=2, api_key="secret"
        )
        assert len(model.invoke("Hi").content) == 5
        assert "secret" not in repr(model)
        assert "api_key" not in model._identifying_params

    @pytest.mark.parametrize("wrong", [{"timeout": 0}, {"n": 0}, {"max_tokens": 0}, {"top_logprobs": -1}])
    def test_that_make_no_sense_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            ChatPingPong(**wrong)

    def test_unknown_arguments_of_a_call_are_refused(self) -> None:
        model = answering("x")
        with pytest.raises(UnknownSetting, match="Did you mean 'temperature'"):
            model.invoke("Hi", temprature=1)
        assert engine_of(model).requests == []

    def test_of_a_call_go_before_the_models_and_none_means_the_models(self) -> None:
        model = answering("x", temperature=0.5, seed=1)
        model.invoke("Hi", temperature=0.0, seed=None, min_p=0.1)
        assert {"temperature": 0.0, "seed": 1, "min_p": 0.1}.items() <= last_sampling(model).items()

    def test_a_call_that_takes_too_long_is_ended(self) -> None:
        model = answering("tide " * 200, time_scale=1.0, timeout=0.2)
        ways: list[Callable[[], Any]] = [
            lambda: model.invoke("Hi"),
            lambda: list(model.stream("Hi")),
            lambda: asyncio.run(model.ainvoke("Hi")),
        ]
        for way in ways:
            started = time.monotonic()
            with pytest.raises(CallTimedOut, match=r"0\.2 s"):
                way()
            assert time.monotonic() - started < 5
        assert len(engine_of(model).aborted) == 3
        assert engine_of(model).num_unfinished == 0

    def test_are_traced_under_langchains_names(self) -> None:
        params = ChatPingPong(model="org/name", temperature=0.5, max_tokens=5, stop=["x"])._get_ls_params()
        assert params == {
            "ls_provider": "langgraph-pingpong",
            "ls_model_name": "org/name",
            "ls_model_type": "chat",
            "ls_temperature": 0.5,
            "ls_max_tokens": 5,
            "ls_stop": ["x"],
        }


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
class TestThirdEvents:
    """`stream_events` in its third version drives the model by another method than `stream`."""

    def both(self, model: Any) -> list[AIMessage]:
        async def asynchronously() -> AIMessage:
            return await (await model.astream_events("Hi", version="v3"))

        return [model.stream_events("Hi", version="v3").output, asyncio.run(asynchronously())]

    def check(self, model: Any) -> AIMessage:
        plain = model.invoke("Hi")
        for message in self.both(model):
            assert message.text == plain.text
            assert [(made["name"], made["args"]) for made in message.tool_calls] == [
                (made["name"], made["args"]) for made in plain.tool_calls
            ]
            assert message.invalid_tool_calls == []
            assert message.usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]
            assert message.response_metadata["finish_reason"] == plain.response_metadata["finish_reason"]
        return message

    def test_give_the_text_piece_by_piece(self) -> None:
        model = answering("tide pool")
        assert list(model.stream_events("Hi", version="v3").text) == list("tide pool")
        self.check(model)

    def test_give_tool_calls_and_keep_reasoning_apart(self) -> None:
        text = f"<think>Where?</think>I look. {call('Oslo')}\n{call('Lima')}"
        model = answering(text, thinking_tokenizer(), reasoning_parser="qwen3").bind_tools([tide_time])
        message = self.check(model)
        assert [made["args"]["place"] for made in message.tool_calls] == ["Oslo", "Lima"]
        assert message.text == "I look. "
        assert [block["reasoning"] for block in message.content_blocks if block["type"] == "reasoning"] == ["Where?"]

    def test_end_at_a_stop_string(self) -> None:
        model = answering("tide\nResult: 1").bind(stop=["\nResult:"])
        assert self.check(model).text == "tide"

    def test_that_are_left_early_end_the_request(self) -> None:
        model = answering("tide " * 200, time_scale=1.0)

        async def leave() -> None:
            stream = await model.astream_events("Hi", version="v3")
            assert await anext(aiter(stream.text)) == "t"

        asyncio.run(leave())
        deadline = time.monotonic() + 2
        while engine_of(model).num_unfinished:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(engine_of(model).aborted) == 1


class TestLangChainsSwitch:
    """`stream` says whether LangChain makes a message from chunks."""

    def chunks_heard(self, model: Any, **kwargs: Any) -> int:
        class Listener(BaseCallbackHandler):
            heard = 0

            def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
                self.heard += 1

        listener = Listener()
        assert model.invoke("Hi", {"callbacks": [listener]}, **kwargs).content == "tide"
        return listener.heard

    @pytest.mark.parametrize(("stream", "settings", "heard"), [(True, {}, 4), (False, {"streaming": True}, 0)])
    def test_is_taken_and_not_passed_to_the_engine(self, stream: bool, settings: dict[str, Any], heard: int) -> None:
        model = answering("tide", **settings)
        assert self.chunks_heard(model, stream=stream) == heard
        assert self.chunks_heard(model.bind(stream=stream)) == heard
        assert "stream" not in last_sampling(model)

    def test_lets_every_method_work(self) -> None:
        for stream in (True, False, None):
            assert same(every_way(answering("tide").bind(stream=stream))).content == "tide"


class TestCounting:
    def test_tokens_of_messages_are_those_of_their_prompt(self) -> None:
        model = answering("x")
        for messages, tools in ((HISTORY, None), ([HumanMessage("Hi")], [tide_time])):
            counted = model.get_num_tokens_from_messages(messages, tools)
            bound = model.bind_tools(tools) if tools else model
            assert counted == bound.invoke(messages).usage_metadata["input_tokens"]

    def test_a_history_is_trimmed_also_where_a_template_is_strict(self) -> None:
        says = [HumanMessage("one " * 10), AIMessage("two " * 10), HumanMessage("three " * 10)]
        model = answering("ok", chat_template=STRICT)
        whole = model.get_num_tokens_from_messages(says)
        trim: dict[str, Any] = {"token_counter": model, "strategy": "last", "start_on": "human"}
        assert trim_messages(says, max_tokens=whole + 12, **trim) == says
        assert trim_messages(says, max_tokens=whole - 12, **trim) == says[-1:]
        system = SystemMessage("Be brief.")
        assert trim_messages([system, *says], max_tokens=whole - 12, include_system=True, **trim) == [system, says[-1]]
        assert trim_messages(says, max_tokens=whole - 12, token_counter=model, strategy="first") == says[:2]

    def test_what_a_template_refuses_is_estimated_with_calls_and_tools(self) -> None:
        strict, tolerant = answering("x", chat_template=STRICT), answering("x")
        for messages, tools in ((HISTORY, None), ([HumanMessage("Hi"), HumanMessage("Ho")], [tide_time])):
            exact = tolerant.get_num_tokens_from_messages(messages, tools)
            assert abs(strict.get_num_tokens_from_messages(messages, tools) - exact) < 0.3 * exact
        with pytest.raises(TemplateRefused):
            strict.invoke([HumanMessage("Hi"), HumanMessage("Ho")])

    def test_tokens_of_a_text_are_the_tokenizers(self) -> None:
        assert answering("x").get_num_tokens("tide") == 4


class TestCopies:
    def test_share_the_engines(self) -> None:
        model = ChatPingPong(devices=["fake:0"])
        pool = model._serving().pool
        for twin in (copy.deepcopy(model), copy.copy(model), model.model_copy(update={"temperature": 0.0})):
            assert twin._serving().pool is pool
        assert copy.deepcopy(answering("tide")).invoke("Hi").content == "tide"

    def test_of_a_pickle_make_their_own(self) -> None:
        model = ChatPingPong(devices=["fake:0"], max_tokens=7, engine_args={"a": 1})
        model.trace.subscribe(lambda event: None)
        answer = model.invoke("Hi")
        twin = pickle.loads(pickle.dumps(model))
        assert dict(twin) == dict(model)
        assert twin._serving().pool is not model._serving().pool
        assert twin.invoke("Hi").content == answer.content
        assert pickle.loads(pickle.dumps(model.bind_tools([SCHEMA]))).kwargs["tools"]

    def test_of_a_pickle_of_a_model_on_a_shared_pool_are_refused(self) -> None:
        with pytest.raises(TypeError, match="pool"):
            pickle.dumps(answering("x"))


def prompt_of(state: Any) -> str:
    return f"You are the writer. {state['task']}"


class Written(TypedDict, total=False):
    task: str
    text: str


class TestHeldByOthers:
    """What holds the model pickles, copies and serializes as far as it does with another chat model."""

    WAYS: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "pickle": lambda held: pickle.loads(pickle.dumps(held)),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "langchain": dumps,
        "checkpoint": lambda held: JsonPlusSerializer(pickle_fallback=True).dumps_typed(held),
    }

    @staticmethod
    def holders(model: Any) -> dict[str, Any]:
        builder = StateGraph(Written).add_node("writer", agent_node(model, prompt=prompt_of, writes="text"))
        builder.add_edge(START, "writer")
        graph = builder.compile()
        return {
            "the model": model,
            "with bound arguments": model.bind(stop=["a"]),
            "with a config": model.with_config(tags=["a"]),
            "with retries": model.with_retry(),
            "a sequence": ChatPromptTemplate.from_messages([("human", "{task}")]) | model,
            "a state": {"model": model, "task": "x"},
            "a node": graph.nodes["writer"].bound,
            "a builder": builder,
            "a graph": graph,
        }

    @classmethod
    def outcomes(cls, model: Any) -> dict[str, str]:
        """By holder and way: the type of what came out, or of the error."""
        found: dict[str, str] = {}
        for (name, held), (way, make) in itertools.product(cls.holders(model).items(), cls.WAYS.items()):
            try:
                found[f"{way} {name}"] = type(make(held)).__name__.replace(type(model).__name__, "Model")
            except Exception as error:  # noqa: BLE001 - which one it is is compared
                found[f"{way} {name}"] = f"{type(error).__name__}: {error}"
        return found

    def test_comes_out_as_with_another_model(self) -> None:
        model = ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=9)
        model.trace.subscribe(lambda event: None)
        with model:
            assert self.outcomes(model) == self.outcomes(FakeListChatModel(responses=["x"]))

    @pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
    def test_works_as_before(self, way: str) -> None:
        with ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=9) as model:
            expected = model.invoke("You are the writer. Hi").text
            made = self.WAYS[way](self.holders(model)["a builder"])
            assert made.compile().invoke({"task": "Hi"})["text"] == expected
            if way == "copy":  # a compiled graph of LangGraph cannot be pickled, and does not work as a deep copy
                assert self.WAYS[way](self.holders(model)["a graph"]).invoke({"task": "Hi"})["text"] == expected

    def test_a_state_comes_back_from_a_checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has every setting given; that asks for no parser of vLLM's, which may not be installed."""
        monkeypatch.setattr("langgraph_pingpong.chat_model.check_parsers", lambda *names: pytest.fail(str(names)))
        serde = JsonPlusSerializer(pickle_fallback=True)
        with ChatPingPong(devices=["fake:0"], max_tokens=9) as model:
            state = serde.loads_typed(serde.dumps_typed({"model": model, "task": "x"}))
            assert state["model"].invoke("Hi").text == model.invoke("Hi").text
            state["model"].close()


class TestEdges:
    """What a node says beside content stays with it; what is bound to the next node is in its foreseen prompt."""

    def run(
        self, lab: Lab, writer: Callable[[ChatPingPong], Any], reply: str, critic: Any = None, **settings: Any
    ) -> str:
        """Run writer and critic; returns the prompt of the critic, prefilled while the writer spoke."""
        tokenizer = thinking_tokenizer()

        def answer(prompt: str) -> str:
            return reply if "You are the writer." in prompt else "fine"

        engines = [lab.engine(f"fake:{index}", tokenizer=tokenizer, reply=answer) for index in range(2)]
        model = lab.model(engines, **settings)
        record = lab.record(model)
        nodes = {"writer": writer(model), "critic": critic(model) if critic else model}
        builder = StateGraph(TypedDict("State", {"task": str, "writer": str, "critic": str}))
        for reads, node in (("task", "writer"), ("writer", "critic")):
            builder.add_node(node, agent_node(nodes[node], prompt=lab.prompt(node, reads), writes=node))
        builder.add_edge(START, "writer")
        builder.add_edge("writer", "critic")
        builder.compile().invoke({"task": "Tides."})
        certificate = record.certificate("critic")
        assert certificate["upstream"] == "writer"
        assert certificate["streamed"] > 100
        assert certificate["wasted"] == 0
        assert certificate["fallback"] is None
        (prompt,) = lab.prompts("critic")
        return str(tokenizer.decode(list(prompt)))

    text = "The tide is low. " * 12

    def test_reasoning_is_not_forwarded(self, lab: Lab) -> None:
        thought = "I think so. " * 20
        prompt = self.run(lab, lambda m: m, f"<think>{thought}</think>{self.text}", reasoning_parser="deepseek_r1")
        assert f"Text:\n{self.text}" in prompt and "think" not in prompt

    def test_tool_calls_are_not_forwarded(self, lab: Lab) -> None:
        prompt = self.run(lab, lambda m: m.bind_tools([tide_time]), f"{self.text}{call('Oslo')}")
        assert f"Text:\n{self.text}" in prompt and "tool_call" not in prompt

    def test_half_a_stop_string_is_not_forwarded(self, lab: Lab) -> None:
        prompt = self.run(lab, lambda m: m.bind(stop=["\nResult:"]), f"{self.text}\nRes. \nResult: 1")
        assert f"Text:\n{self.text}\nRes. \n\nGo on" in prompt

    def test_several_answers_forward_the_first(self, lab: Lab) -> None:
        prompt = self.run(lab, lambda m: m.bind(n=2), self.text)
        assert prompt.count("The tide is low.") == 12

    def test_the_tools_of_the_next_node_are_in_its_foreseen_prompt(self, lab: Lab) -> None:
        prompt = self.run(lab, lambda m: m, self.text, lambda m: m.bind_tools([tide_time]).bind(stop=["x"]))
        assert "<tools>" in prompt

    def test_the_template_variables_of_the_next_node_are_too(self, lab: Lab) -> None:
        template = "{{ mood }}" + fake_tokenizer().chat_template
        prompt = self.run(
            lab, lambda m: m, self.text, lambda m: m.bind(chat_template_kwargs={"mood": "calm"}), chat_template=template
        )
        assert prompt.startswith("calm")


def test_a_template_is_asked_once_whether_it_takes_tools() -> None:
    class Counting(ChatTemplate):
        renders = 0

        def render(self, *args: Any, **kwargs: Any) -> str:
            self.renders += 1
            return super().render(*args, **kwargs)

    from langgraph_pingpong.prompts import has_place_for_tools

    template = Counting(fake_tokenizer())
    assert [has_place_for_tools(template) for _ in range(3)] == [False] * 3
    assert template.renders == 2
