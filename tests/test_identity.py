"""Whose answers are whose: for LangChain's cache, and in what tracers are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.engines.fake_engine import fake_tokenizer

OTHER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"


def answering(reply: str, kind: type[FakeEngine] = FakeEngine) -> ChatPingPong:
    return ChatPingPong(pool=EnginePool([kind(reply=lambda _: reply)]))


class Named(FakeEngine):
    model = "org/name"


class TestTheCacheOfLangChain:
    @pytest.fixture(autouse=True)
    def cache(self) -> Iterator[None]:
        set_llm_cache(InMemoryCache())
        yield
        set_llm_cache(None)

    def test_keeps_pools_apart(self) -> None:
        low, high = answering("low water"), answering("high water")
        assert [model.invoke("Hi").content for model in (low, high, low)] == ["low water", "high water", "low water"]
        assert len(low._serving().pool.engines[0].requests) == 1

    def test_knows_a_model_by_its_name(self) -> None:
        first, second = answering("low water", Named), answering("not asked", Named)
        assert [model.invoke("Hi").content for model in (first, second)] == ["low water"] * 2

    @pytest.mark.parametrize(
        "changed",
        [
            {"chat_template": OTHER},
            {"escape_markers": True},
            {"tool_parser": "qwen3_json"},
            {"dtype": "float32"},
            {"max_model_len": 512},
            {"exact": "bits"},
            {"engine_args": {"quantization": "fp8"}},
            {"chat_template_kwargs": {"mood": "calm"}},
            {"output_version": "v1"},
            {"tokenizer": fake_tokenizer()},
        ],
    )
    def test_tells_settings_apart_that_answers_depend_on(self, changed: dict[str, Any]) -> None:
        model = ChatPingPong(devices=["fake:0"])
        changed_model = ChatPingPong(devices=["fake:0"], **changed)
        assert changed_model._get_llm_string() != model._get_llm_string()
        assert ChatPingPong(devices=["fake:1"], **changed)._get_llm_string() == changed_model._get_llm_string()

    def test_shows_no_key_to_traces(self) -> None:
        model = ChatPingPong(devices=["fake:0"], engine_args={"hf_token": "secret"})
        assert "secret" not in repr(model._identifying_params)


class TestTheNameOfTheModel:
    def test_is_that_of_the_engines(self) -> None:
        model = answering("tide", Named)
        assert model.invoke("Hi").response_metadata["model_name"] == "org/name"
        assert asyncio.run(model.ainvoke("Hi")).response_metadata["model_name"] == "org/name"
        assert model._get_ls_params()["ls_model_name"] == "org/name"

    def test_is_default_where_nobody_tells_it(self) -> None:
        assert [answering("tide").model_name, ChatPingPong(devices=["fake:0"]).model_name] == ["default"] * 2
