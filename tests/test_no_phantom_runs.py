"""Tracing that is switched on by the environment sees the graph's own runs and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import langsmith.utils
import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tracers.langchain import LangChainTracer
from langsmith import Client, traceable

from langgraph_pingpong.edges import langgraph_internals
from tests.conftest import Lab

Prompt = Callable[[Mapping[str, str]], Any]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the runs that LangSmith would be told of."""
    names: list[str] = []
    monkeypatch.setenv("LANGSMITH_TRACING", "true")
    monkeypatch.setenv("LANGSMITH_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(LangChainTracer, "_persist_run_single", lambda self, run: names.append(run.name))
    monkeypatch.setattr(LangChainTracer, "_update_run_single", lambda self, run: None)
    monkeypatch.setattr(Client, "create_run", lambda self, name, *args, **settings: names.append(name))
    monkeypatch.setattr(Client, "update_run", lambda self, *args, **settings: None)
    langsmith.utils.get_env_var.cache_clear()
    yield names
    monkeypatch.undo()
    langsmith.utils.get_env_var.cache_clear()


@traceable(name="make_prompt")
def traced(state: Mapping[str, str]) -> str:
    return "You are the critic. " + state["writer"]


def by_template(state: Mapping[str, str]) -> Any:
    return ChatPromptTemplate.from_messages([("human", "You are the critic. {writer}")]).invoke(state)


@pytest.mark.parametrize("prompt", [traced, by_template])
def test_a_prompt_that_is_made_ahead_is_not_traced(prompt: Prompt, lab: Lab, posted: list[str]) -> None:
    seen: dict[str, list[str]] = {}
    for overlap in ("off", "on"):
        graph = lab.chain(lab.model(overlap=overlap), prompts={"critic": prompt})
        posted.clear()
        graph.invoke({"task": "Begin."})
        seen[overlap] = sorted(posted)
    assert lab.prefills() > 0
    assert {"make_prompt", "ChatPromptTemplate"} & set(seen["off"])
    assert seen["on"] == seen["off"]


def test_nor_is_the_self_test(posted: list[str]) -> None:
    langgraph_internals.usable.cache_clear()
    assert langgraph_internals.usable()
    assert posted == []
