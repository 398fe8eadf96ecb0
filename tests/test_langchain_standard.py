"""LangChain's own tests of chat models: those of the class on a modelled engine, all others on real engines.

What is skipped or expected to fail is lacking in the model they run with (SmolLM2 with 135 million parameters, text
only), or needs a recorded server:

- images, audio, PDF, and the content blocks of Anthropic's API: the model reads text;
- JSON mode and a tool call of the model's own accord: the model is too small for either, see the reasons below;
- another model by name in a call: engines serve one model;
- the speed of a stream with recorded answers of a server: there is no server;
- serialization to JSON, and settings from the environment: the class has neither.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.errors import CallRefused

LONG, SHORT = 80, 12
"""How long answers may be, in tokens: a call or an object must be complete, of other text the beginning will do."""


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPingPong]:
        return ChatPingPong

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"devices": ["fake:0"]}


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestIntegration(ChatModelIntegrationTests):
    engines: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest, real_model: ChatPingPong) -> BaseChatModel:
        serving = real_model._serving()
        type(self).engines.update(pool=serving.pool, tokenizer=serving.template.tokenizer)
        complete = any(word in request.node.name for word in ("tool", "structured", "json", "agent"))
        return real_model.model_copy(update={"max_tokens": LONG if complete else SHORT})

    @property
    def chat_model_class(self) -> type[ChatPingPong]:
        return ChatPingPong

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.engines, "temperature": 0.0, "max_tokens": SHORT}

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": [], "stream": []}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        """So small a model repeats itself until the answer is cut off."""
        return {"repetition_penalty": 1.3}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(strict=True, reason="The model does not keep to keys that are named in the prompt only.")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(strict=True, reason="The model never calls a tool of its own accord; forced, it does.")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    def test_agent_loop_with_a_forced_call(self, model: BaseChatModel) -> None:
        @tool
        def get_weather(location: str) -> str:
            """Get the weather at a location."""
            return "It's sunny."

        question = HumanMessage("What is the weather in San Francisco, CA?")
        asked = model.bind_tools([get_weather], tool_choice="any").invoke([question])
        (call,) = asked.tool_calls
        assert "San Francisco" in call["args"]["location"]
        answer = model.bind_tools([get_weather]).invoke([question, asked, get_weather.invoke(call)])
        assert answer.text and not answer.tool_calls


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestBeyond:
    """What LangChain's tests leave out."""

    def test_several_answers(self, real_model: ChatPingPong) -> None:
        settings = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 8}
        (generations,) = real_model.generate([[HumanMessage("Tell a story.")]], **settings).generations
        messages = [each.message for each in generations]
        assert len({message.text for message in messages}) > 1
        assert all(message.usage_metadata["output_tokens"] == 24 for message in messages)
        assert real_model.invoke("Tell a story.", **settings).text == messages[0].text

    def test_logprobs_have_one_entry_a_token(self, real_model: ChatPingPong) -> None:
        message = real_model.invoke("Count to nine.", logprobs=True, top_logprobs=2, stop=["3"])
        entries = message.response_metadata["logprobs"]["content"]
        assert len(entries) == message.usage_metadata["output_tokens"]
        assert "".join(entry["token"] for entry in entries).startswith(message.text)
        for entry in entries:
            assert len(entry["top_logprobs"]) == 2
            likeliest = entry["top_logprobs"][0]
            assert (likeliest["token"], likeliest["logprob"]) == (entry["token"], entry["logprob"])  # temperature is 0

    def test_reasoning_is_kept_apart(self, real_model: ChatPingPong) -> None:
        thinking = real_model.model_copy(update={"reasoning_parser": "qwen3", "max_tokens": 40})
        form = {"regex": "<think>[a-z ]{5,20}</think>[a-z ]{5,20}"}
        for stop in (None, ["#!#"]):
            message = thinking.invoke("Say something about crabs.", structured_outputs=form, stop=stop)
            reasoning = message.additional_kwargs["reasoning_content"]
            assert re.fullmatch("[a-z ]{5,20}", reasoning) and re.fullmatch("[a-z ]{5,20}", message.text)

    def test_an_impossible_grammar_is_refused_and_the_engine_lives(self, real_model: ChatPingPong) -> None:
        with pytest.raises(CallRefused, match="vLLM refused"):
            real_model.invoke("Hi", structured_outputs={"regex": "(["})
        with pytest.raises(CallRefused, match="temperature"):
            real_model.invoke("Hi", temperature=-1)
        assert real_model.invoke("Hi", structured_outputs={"choice": ["low", "high"]}).text in ("low", "high")


@pytest.mark.engine
def test_engines_know_the_reasoning_parser() -> None:
    """Otherwise a grammar would bind the reasoning."""
    model = ChatPingPong(devices=["cpu:0"], reasoning_parser="qwen3", engine_args={"seed": 1})
    (engine,) = model._serving().pool.engines
    assert {"reasoning_parser": "qwen3", "seed": 1}.items() <= engine._config.vllm_args.items()  # type: ignore[attr-defined]
    model.close()
