"""Graphs that several `Send`s led to, and functional tasks, that run at the same time: each has calls of its own."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_core.messages import HumanMessage
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node
from tests.attentive import attentive
from tests.graph_gallery.agents import call, tool_user
from tests.graph_gallery.scene import ask

if TYPE_CHECKING:
    from tests.conftest import Lab, Recorder

TOPICS = ("tides", "crabs", "kelp")
RULES = "Leave nothing out that the reader needs. " * 8


class Team(TypedDict, total=False):
    topic: str
    draft: str
    done: Annotated[list[str], operator.add]


class Done(TypedDict):
    done: Annotated[list[str], operator.add]


def sent_to(worker: Any, first: Any = lambda state: {}) -> Any:
    """A graph that gives each topic to a worker of its own."""
    builder = StateGraph(Team).add_node("first", first).add_node("worker", worker).add_edge(START, "first")
    builder.add_conditional_edges(
        "first", lambda state: [Send("worker", {"topic": each}) for each in TOPICS], ["worker"]
    )
    return builder.compile()


def of_functions(model: ChatPingPong) -> Any:
    def draft(state: Team) -> Team:
        return {"draft": model.invoke(ask("drafter", RULES + state["topic"] * 20)).text}

    def polish(state: Team) -> Team:
        return {"done": [model.invoke(ask("editor", RULES + state["draft"])).text]}

    return (
        StateGraph(Team, output_schema=Done)
        .add_sequence([("draft", draft), ("polish", polish)])
        .add_edge(START, "draft")
        .compile()
    )


def in_a_function(model: ChatPingPong) -> Any:
    graph = of_functions(model)
    return lambda state: {"done": graph.invoke(state)["done"]}


def certificates(record: Recorder, node: str) -> list[dict[str, Any]]:
    return [event.data["certificate"] for event in record.named("finish", node)]


@pytest.mark.parametrize("worker", [of_functions, in_a_function])
def test_each_is_fed_with_its_own_words(worker: Callable[[ChatPingPong], Any], lab: Lab) -> None:
    model = attentive(lab.model(2))
    record, graph = lab.record(model), sent_to(worker(model))
    first = graph.invoke({})
    record.events.clear()
    assert graph.invoke({}) == first
    polished = certificates(record, "polish")
    assert [each["upstream"] for each in polished] == ["draft"] * len(TOPICS)
    assert min(each["streamed"] for each in polished) > 0
    assert [each["wasted"] for each in polished] == [0] * len(TOPICS)


def test_the_end_of_one_leaves_the_edges_of_the_others(lab: Lab) -> None:
    """Agents that are done at different times."""

    @tool
    def look_up(topic: str) -> str:
        """Look something up."""
        time.sleep(0.1 * (1 + ["a", "b", "c"].index(topic)))
        return f"Of {topic}. " * 20

    def reply(prompt: str) -> str:
        topic = next(name for name in "abc" if f"Topic {name}." in prompt)
        return str(tool_user(call("look_up", topic=topic), role="Topic")(prompt))

    model = lab.model([lab.engine(f"fake:{index}", reply=reply) for index in range(2)])
    agent, record = create_agent(model, [look_up], system_prompt=RULES), lab.record(model)

    def worker(state: Team) -> Team:
        asked = {"messages": [HumanMessage(f"Topic {state['topic']}. " * 10)]}
        return {"done": [agent.invoke(asked)["messages"][-1].text]}

    builder = StateGraph(Team).add_node("worker", worker)
    sends = [Send("worker", {"topic": topic}) for topic in "abc"]
    graph = builder.add_conditional_edges(START, lambda state: sends, ["worker"]).compile()
    graph.invoke({})
    after_tools = [each for each in certificates(record, "model") if each["source"] == "tools"]
    assert [each["wasted"] for each in after_tools] == [0] * 3
    assert not [event for event in record.named("edge.dropped") if event.data["source"] == "tools"]


def test_what_they_declare_is_known_in_the_first_run(lab: Lab) -> None:
    model = attentive(lab.model(2))
    record = lab.record(model)
    worker = StateGraph(Team, output_schema=Done).add_node(
        "draft",
        agent_node(model, prompt=lambda s: ask("drafter", RULES + s["topic"]), writes=lambda a: {"done": [a.text]}),
    )
    sends = [Send("worker", {"topic": topic}) for topic in TOPICS]
    boss = agent_node(model, prompt=lambda s: ask("boss", RULES), writes=lambda answer: Command(goto=sends))
    builder = StateGraph(Team).add_node("boss", boss).add_node("worker", worker.add_edge(START, "draft").compile())
    builder.add_edge(START, "boss").compile().invoke({})
    drafts = certificates(record, "draft")
    assert [each["upstream"] for each in drafts] == ["boss"] * len(TOPICS)
    assert [each["wasted"] for each in drafts] == [0] * len(TOPICS)


def test_what_joins_tasks_is_fed_by_each_in_order(lab: Lab) -> None:
    model = attentive(lab.model(2))
    record = lab.record(model)

    @task
    def draft(topic: str) -> str:
        return model.invoke(ask("drafter", RULES + topic * 20)).text

    @task
    def join(drafts: list[str]) -> str:
        return model.invoke(ask("editor", RULES + "\n\n".join(drafts))).text

    @entrypoint()
    def flow(topics: list[str]) -> str:
        return join([draft.result() for draft in [draft(topic) for topic in topics]]).result()

    first = flow.invoke(list(TOPICS))
    record.events.clear()
    assert flow.invoke(list(TOPICS)) == first
    joined = record.certificate("join")
    assert joined["streamed"] > 56 * len(TOPICS) - lab.engines[0].block_size
    assert joined["wasted"] == 0
    assert [each["upstream"] for each in certificates(record, "draft")] == [None] * len(TOPICS)
