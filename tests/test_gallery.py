"""The gallery of graphs: each runs by its import string, and has a docstring and a picture."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from typer.testing import CliRunner

from graphs import research_agent, review_loop, router
from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.cli import app

ROOT = Path(__file__).parent.parent
NAMES = sorted(
    path.stem for path in (ROOT / "graphs").glob("*.py") if "\ndef build(" in path.read_text(encoding="utf-8")
)


def on(reply: Any) -> Iterator[ChatPingPong]:
    """A model that answers like this."""
    with EnginePool([FakeEngine(f"fake:{index}", reply=reply) for index in range(2)]) as pool:
        yield ChatPingPong(pool=pool)


def test_the_gallery_has_the_shapes_it_promises() -> None:
    assert NAMES == ["five_agents", "panel", "research_agent", "review_loop", "router", "subgraphs"]
    assert set(json.loads((ROOT / "langgraph.json").read_text(encoding="utf-8"))["graphs"]) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_docstring_and_a_picture(name: str) -> None:
    text = importlib.import_module(f"graphs.{name}").__doc__ or ""
    assert re.fullmatch(r"[^\n]+\.\n\n([^\n]+\n)+", text), "one line, then one paragraph"
    assert (ROOT / "docs" / "img" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"(img/{name}.png)" in (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_each_runs_alike_with_edges_on_and_off(name: str) -> None:
    file = ROOT / "graphs" / "texts" / "document.md"
    arguments = ["--task", "Say it.", "--input", str(file), "--set", "brief_tokens=200", "--compare"]
    result = CliRunner().invoke(app, ["run", f"graphs.{name}", *arguments, "--devices", "fake:0,fake:1"])
    assert result.exit_code == 0, result.output
    assert "prompt ids equal: yes" in result.output
    assert "text equal: yes" in result.output


def test_a_review_ends_when_the_critic_accepts() -> None:
    drafts: list[str] = []

    def reply(prompt: str) -> str:
        if "ACCEPTED alone" not in prompt:
            drafts.append(prompt)
            return f"draft {len(drafts)}"
        return "Accepted." if "draft 2" in prompt else "Say it shorter."

    for model in on(reply):
        state = review_loop.build(model, most_drafts=9, brief_tokens=60).invoke({"task": "Explain tides."})
    assert (state["draft"], state["drafts"]) == ("draft 2", 2)
    assert "Say it shorter." in drafts[1]


def test_a_review_takes_the_last_draft_and_may_ask_a_person() -> None:
    for model in on(lambda prompt: "Too long." if "ACCEPTED alone" in prompt else f"draft {prompt.count('Remarks')}"):
        graph = review_loop.build(model, most_drafts=2, approve=True, brief_tokens=60)
        graph = graph.copy(update={"checkpointer": InMemorySaver()})
        thread: Any = {"configurable": {"thread_id": "1"}}
        asked = graph.invoke({"task": "Explain tides."}, thread)
        assert (asked["drafts"], asked["__interrupt__"][0].value["draft"]) == (2, "draft 1")
        again = graph.invoke(Command(resume="Be kind."), thread)
        assert (again["drafts"], bool(again["__interrupt__"])) == (3, True)
        done = graph.invoke(Command(resume=""), thread)
        assert "__interrupt__" not in done


@pytest.mark.parametrize(
    ("choice", "specialist"),
    [("The analyst, not the writer.", "analyst"), ("RESEARCHER", "researcher"), ("Nobody.", "writer")],
)
def test_the_router_goes_where_the_dispatcher_says(choice: str, specialist: str) -> None:
    assert router.route({"choice": choice}) == specialist
    for model in on(lambda prompt: choice if "Who should do this?" in prompt else "done"):
        steps = list(router.build(model, brief_tokens=60).stream({"task": "Do it."}, stream_mode="updates"))
    assert [next(iter(step)) for step in steps] == ["dispatcher", specialist]


def test_the_agent_reads_handbooks_with_its_tools() -> None:
    def reply(prompt: str) -> str:
        if "in the handbooks" not in prompt:
            return "A plan."
        if "<tool_response>" in prompt or "unit" in prompt.rpartition("Find out")[2]:
            return "Units matter."
        call = {"name": "read_handbook", "arguments": {"name": "numbers_and_units"}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    for model in on(reply):
        state = research_agent.build(model, brief_tokens=60).invoke({"task": "Explain units."})
    kinds = [message.type for message in state["messages"]]
    assert kinds == ["human", "ai", "tool", "ai"]
    assert len(state["messages"][2].text) > 500
    assert state["messages"][3].text == "Units matter."


def test_the_tools_say_what_there_is() -> None:
    names = research_agent.list_handbooks.invoke({})
    assert "numbers_and_units" in names
    assert all(len(research_agent.read_handbook.invoke({"name": name})) > 500 for name in names)
    assert "list_handbooks" in research_agent.read_handbook.invoke({"name": "nothing"})
