"""Agents with tools on two real vLLM engines: equal with edges on and off, and the result is prefilled meanwhile."""

from __future__ import annotations

import pytest

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.bench.texts import Library
from langgraph_pingpong.bench.tool_loops import Scene, timed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 400


def test_what_a_tool_returns_is_prefilled_while_it_runs(real_model: ChatPingPong) -> None:
    """With a tool of a second and a text that an engine prefills within it."""
    models = {mode: real_model.model_copy(update={"overlap": mode}) for mode in ("off", "on")}
    library = Library(lambda text: len(real_model.get_token_ids(text)), seed=3)
    scenes = {mode: Scene(model, library, "streams", 1.0, TOKENS) for mode, model in models.items()}
    runs = [{mode: timed(models[mode], scenes[mode], number, mode) for mode in models} for number in range(2)]
    assert all(run["on"][what] == run["off"][what] for run in runs for what in ("answer", "prompts"))
    assert all(len(run["on"]["prompts"]) == 2 for run in runs)
    later = [run["on"]["certificate"] for run in runs[1:]]
    assert all(each["source"] == "tools" and each["ids_equal"] and each["wasted"] == 0 for each in later)
    assert min(each["static"] + each["streamed"] for each in later) > TOKENS
