"""Nodes one after the other: functions, sequences and declared nodes, and what they do with the answer."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.pregel import Pregel

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.scene import ASYNC_WAYS, Scene, Texts, ask, scenario, tasks


def chain(*nodes: tuple[str, Any]) -> Pregel[Any, Any, Any, Any]:
    """A compiled graph of nodes over `Texts`, one after the other."""
    builder = StateGraph(Texts).add_sequence(nodes)
    return builder.add_edge(START, nodes[0][0]).add_edge(nodes[-1][0], END).compile()


@scenario("writer -> critic -> editor")
def sync_functions(model: ChatPingPong) -> Scene:
    """Plain functions, each calling the model once."""
    effects: list[str] = []

    def writer(state: Texts) -> Texts:
        effects.append("writer")
        return {"draft": model.invoke(ask("writer", state["task"])).text}

    def critic(state: Texts) -> Texts:
        effects.append("critic")
        return {"notes": model.invoke(ask("critic", state["draft"])).text}

    def editor(state: Texts) -> Texts:
        effects.append("editor")
        return {"final": model.invoke(ask("editor", f"{state['draft']}\n\nNotes:\n{state['notes']}")).text}

    return Scene(chain(("writer", writer), ("critic", critic), ("editor", editor)), tasks(), effects)


@scenario("writer -> critic -> editor")
def async_functions(model: ChatPingPong) -> Scene:
    """Async functions that await the model."""
    effects: list[str] = []

    async def writer(state: Texts) -> Texts:
        effects.append("writer")
        return {"draft": (await model.ainvoke(ask("writer", state["task"]))).text}

    async def critic(state: Texts) -> Texts:
        effects.append("critic")
        return {"notes": (await model.ainvoke(ask("critic", state["draft"]))).text}

    async def editor(state: Texts) -> Texts:
        effects.append("editor")
        return {"final": (await model.ainvoke(ask("editor", state["notes"]))).text}

    graph = chain(("writer", writer), ("critic", critic), ("editor", editor))
    return Scene(graph, tasks(), effects, ways=ASYNC_WAYS)


@scenario("writer (sync) -> critic (async) -> editor (sync)")
def mixed_functions(model: ChatPingPong) -> Scene:
    """Sync and async functions in one graph."""

    def writer(state: Texts) -> Texts:
        return {"draft": model.invoke(ask("writer", state["task"])).text}

    async def critic(state: Texts) -> Texts:
        await asyncio.sleep(0)
        return {"notes": (await model.ainvoke(ask("critic", state["draft"]))).text}

    def editor(state: Texts) -> Texts:
        return {"final": model.invoke(ask("editor", state["notes"])).text}

    return Scene(chain(("writer", writer), ("critic", critic), ("editor", editor)), tasks(), ways=ASYNC_WAYS)


@scenario("writer -> critic")
def lcel_as_nodes(model: ChatPingPong) -> Scene:
    """`prompt | model | parser | dict` as the node itself."""

    def node(role: str, reads: str, writes: str) -> Any:
        prompt = ChatPromptTemplate.from_messages([("system", f"You are the {role}."), ("human", f"Text: {{{reads}}}")])
        return prompt | model | StrOutputParser() | RunnableLambda(lambda text: {writes: text})

    return Scene(
        chain(("writer", node("writer", "task", "draft")), ("critic", node("critic", "draft", "notes"))), tasks()
    )


@scenario("writer -> critic -> editor, sequences of library steps", declared=("critic", "editor"))
def sequences_of_library_steps(model: ChatPingPong) -> Scene:
    """`prompt | model | parsers` as the node itself, without a function of the user's: declared as it is."""

    def node(role: str, reads: str, writes: str) -> Any:
        head = [("system", f"You are the {role}. Answer in short sentences."), ("human", f"Text: {{{reads}}} Go on.")]
        return ChatPromptTemplate.from_messages(head) | model | {writes: StrOutputParser()}

    nodes = ("writer", node("writer", "task", "draft")), ("critic", node("critic", "draft", "notes"))
    return Scene(chain(*nodes, ("editor", node("editor", "notes", "final").with_config(tags=["last"]))), tasks())


@scenario("writer -> critic")
def lcel_assign_as_nodes(model: ChatPingPong) -> Scene:
    """`RunnablePassthrough.assign` as the node, which returns the whole state."""
    write = ChatPromptTemplate.from_template("Write about this: {task}") | model | StrOutputParser()
    judge = ChatPromptTemplate.from_template("Task: {task}\nDraft: {draft}\nJudge it.") | model | StrOutputParser()
    nodes = ("writer", RunnablePassthrough.assign(draft=write)), ("critic", RunnablePassthrough.assign(notes=judge))
    return Scene(chain(*nodes), tasks())


@scenario("writer -> critic")
def lcel_inside_functions(model: ChatPingPong) -> Scene:
    """Functions that invoke a sequence without passing the config on."""
    effects: list[str] = []
    prompt = ChatPromptTemplate.from_messages([("system", "You are the {role}."), ("human", "Text: {text}")])
    talk = prompt | model | StrOutputParser()

    def writer(state: Texts) -> Texts:
        effects.append("writer")
        return {"draft": talk.invoke({"role": "writer", "text": state["task"]})}

    def critic(state: Texts) -> Texts:
        effects.append("critic")
        return {"notes": talk.invoke({"role": "critic", "text": state["draft"]})}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks(), effects)


def talk_inputs() -> list[dict[str, Any]]:
    """Message histories for three rounds. The ids are given, since LangGraph would add them to the messages later."""
    return [{"messages": [HumanMessage(task["task"], id="asked")]} for task in tasks()]


@scenario("writer -> critic -> editor")
def message_history(model: ChatPingPong) -> Scene:
    """`add_messages`: each node sees all messages so far, behind a system message of its own."""

    def node(role: str) -> Any:
        def speak(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke([SystemMessage(f"You are the {role}."), *state["messages"]])]}

        return speak

    roles = ("writer", "critic", "editor")
    builder = StateGraph(MessagesState).add_sequence([(role, node(role)) for role in roles]).add_edge(START, "writer")
    return Scene(builder.compile(), talk_inputs())


@scenario("writer -> critic")
def message_placeholder(model: ChatPingPong) -> Scene:
    """A prompt with a placeholder for the message history, piped into the model, as the node."""

    def node(role: str) -> Any:
        head = [("system", f"You are the {role}. Go on."), MessagesPlaceholder("messages")]
        return ChatPromptTemplate.from_messages(head) | model | (lambda message: {"messages": [message]})

    builder = StateGraph(MessagesState).add_sequence([(role, node(role)) for role in ("writer", "critic")])
    return Scene(builder.add_edge(START, "writer").compile(), talk_inputs())


@scenario("writer -> critic (calls or not) -> editor (never calls)")
def calls_only_sometimes(model: ChatPingPong) -> Scene:
    """A node that calls the model only for some drafts, and one that never does."""
    effects: list[str] = []

    def writer(state: Texts) -> Texts:
        return {"draft": model.invoke(ask("writer", state["task"])).text}

    def critic(state: Texts) -> Texts:
        effects.append("critic")
        if len(state["task"]) > 40:
            return {"notes": "nothing to say"}
        return {"notes": model.invoke(ask("critic", state["draft"])).text}

    def editor(state: Texts) -> Texts:
        effects.append("editor")
        return {"final": f"{state['draft']} ({state['notes']})"}

    return Scene(chain(("writer", writer), ("critic", critic), ("editor", editor)), tasks(), effects)


@scenario("writer -> layout -> critic -> layout again -> editor")
def formatters_between(model: ChatPingPong) -> Scene:
    """Nodes without a model between the agents, which lay the text out."""
    effects: list[str] = []

    def speak(role: str, reads: str, writes: str) -> Any:
        return lambda state: {writes: model.invoke(ask(role, state[reads])).text}

    def layout(state: Texts) -> Texts:
        effects.append("layout")
        return {"plan": f"# Draft\n\n{state['draft'].strip()}\n"}

    def layout_again(state: Texts) -> Texts:
        effects.append("layout again")
        return {"notes": "\n".join(f"- {word}" for word in state["notes"].split())}

    nodes = (
        ("writer", speak("writer", "task", "draft")),
        ("layout", layout),
        ("critic", speak("critic", "plan", "notes")),
    )
    more = ("layout again", layout_again), ("editor", speak("editor", "notes", "final"))
    return Scene(chain(*nodes, *more), tasks(), effects)


@scenario(
    "writer -> critic -> editor", replies={"the writer": "tide and POOL\nsecond line  \n", "the critic": " Crab. "}
)
def transformed_answers(model: ChatPingPong) -> Scene:
    """Nodes that store their answer in capitals, its first line, or stripped and framed."""

    def writer(state: Texts) -> Texts:
        text = model.invoke(ask("writer", state["task"])).text
        return {"plan": text.upper(), "draft": text.splitlines()[0]}

    def critic(state: Texts) -> Texts:
        text = model.invoke(ask("critic", f"{state['plan']}\n{state['draft']}")).text
        return {"notes": f"<notes>{text.strip()}</notes>"}

    def editor(state: Texts) -> Texts:
        return {"final": model.invoke(ask("editor", state["notes"])).text[::-1]}

    return Scene(chain(("writer", writer), ("critic", critic), ("editor", editor)), tasks())


@scenario(
    "writer (json) -> critic -> editor (json.dumps)", replies={"the writer": '{"title": "Tide", "points": ["a", "b"]}'}
)
def json_answers(model: ChatPingPong) -> Scene:
    """A node that parses the answer as JSON, and one that quotes the next answer as JSON."""

    def writer(state: Texts) -> Texts:
        parsed = json.loads(model.invoke(ask("writer", state["task"])).text)
        return {"draft": f"{parsed['title']}: {', '.join(parsed['points'])}"}

    def critic(state: Texts) -> Texts:
        return {"notes": model.invoke(ask("critic", state["draft"])).text}

    def editor(state: Texts) -> Texts:
        return {"final": model.invoke(ask("editor", json.dumps({"notes": state["notes"]}))).text}

    return Scene(chain(("writer", writer), ("critic", critic), ("editor", editor)), tasks())


@scenario("writer (says one thing, returns another) -> critic")
def not_what_was_streamed(model: ChatPingPong) -> Scene:
    """A node that throws its answer away and stores a fixed text."""
    effects: list[str] = []

    def writer(state: Texts) -> Texts:
        effects.append(model.invoke(ask("writer", state["task"])).text)
        return {"draft": "Low tide."}

    def critic(state: Texts) -> Texts:
        return {"notes": model.invoke(ask("critic", state["draft"])).text}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks(), effects)


@scenario("planner -> writer -> critic", declared=("writer", "critic"))
def declared_nodes(model: ChatPingPong) -> Scene:
    """`agent_node` three times, over a prompt template, a function, and the answer's message."""

    def critic_prompt(state: Texts) -> Any:
        return ask("critic", state["draft"])

    plan = ChatPromptTemplate.from_messages([("system", "You are the planner."), ("human", "{task}")])
    write = ChatPromptTemplate.from_messages(
        [("system", "You are the writer."), ("human", "Plan: {plan}\nTask: {task}")]
    )
    planner = agent_node(model, prompt=plan, writes="plan")
    writer = agent_node(model, prompt=write, writes=lambda answer: {"draft": answer.text.strip()})
    critic = agent_node(model, prompt=critic_prompt, writes="notes")
    return Scene(chain(("planner", planner), ("writer", writer), ("critic", critic)), tasks())


@scenario("planner (declared) -> writer (function) -> critic (declared) -> editor (declared)", declared=("editor",))
def declared_and_plain_nodes(model: ChatPingPong) -> Scene:
    """Declared nodes and plain functions in one chain."""

    def node(role: str, reads: str, writes: str) -> Any:
        return agent_node(model, prompt=lambda state: ask(role, state[reads]), writes=writes)

    def writer(state: Texts) -> Texts:
        return {"draft": model.invoke(ask("writer", state["plan"])).text}

    nodes = (
        ("planner", node("planner", "task", "plan")),
        ("writer", writer),
        ("critic", node("critic", "draft", "notes")),
    )
    return Scene(chain(*nodes, ("editor", node("editor", "notes", "final"))), tasks())


@scenario("writer -> critic -> editor")
def partials_and_objects(model: ChatPingPong) -> Scene:
    """A partial, an object with `__call__` and a bound method as nodes; prompts as plain strings and tuples."""
    effects: list[str] = []

    class Critic:
        def __call__(self, state: Texts) -> dict[str, str]:
            effects.append("critic")
            return {"notes": model.invoke([("system", "You are the critic."), ("human", state["draft"])]).text}

        def edit(self, state: Texts) -> dict[str, str]:
            effects.append("editor")
            return {"final": model.invoke(f"Rewrite: {state['notes']}").text}

    def write(style: str, state: Texts) -> dict[str, str]:
        effects.append("writer")
        return {"draft": model.invoke(f"Write in {style} style: {state['task']}").text}

    critic = Critic()
    nodes = ("writer", functools.partial(write, "plain")), ("critic", critic), ("editor", critic.edit)
    return Scene(chain(*nodes), tasks(), effects)
