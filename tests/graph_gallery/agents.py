"""Agents with tools: `create_agent`, hand-made loops, handoffs and supervisors."""

from __future__ import annotations

import json
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware, ModelRequest, wrap_tool_call
from langchain.agents.structured_output import ToolStrategy
from langchain.tools import InjectedToolCallId, ToolRuntime, tool
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, tools_condition
from langgraph.types import Command
from pydantic import BaseModel

from langgraph_pingpong import ChatPingPong, agent_node
from langgraph_pingpong.engines.fake_engine import pseudo_words
from tests.graph_gallery.chains import talk_inputs
from tests.graph_gallery.scene import ASYNC_WAYS, REPLY_LENGTH, Doing, Scene, Texts, ask, scenario, tasks


def call(name: str, **arguments: Any) -> str:
    """What a model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool_user(*says: str, role: str = "You are the researcher") -> Any:
    """Replies: the role calls tools, one answer after the other, until it has as many results as it made calls.

    Whoever else is asked, or has all results, answers with words that depend on the whole prompt.
    """

    def reply(prompt: str) -> str:
        turn = prompt.count("<tool_response>")
        return says[turn] if role in prompt and turn < len(says) else pseudo_words(prompt)[:REPLY_LENGTH]

    return reply


def tide_tool(effects: list[str]) -> Any:
    """A tool that counts its calls."""

    @tool
    def tide_time(place: str) -> str:
        """Say when low tide is at a place."""
        effects.append(f"tide_time {place}")
        return f"Low tide at {place} is at {len(place)} o'clock."

    return tide_time


def critic_of_messages(model: ChatPingPong, effects: list[str]) -> Any:
    """A plain node that judges the last message."""

    def critic(state: MessagesState) -> dict[str, Any]:
        effects.append("critic")
        return {"messages": [model.invoke(ask("critic", state["messages"][-1].text))]}

    return critic


def in_a_row(*nodes: tuple[str, Any]) -> Any:
    """A graph of nodes over messages, one after the other, not yet compiled."""
    return StateGraph(MessagesState).add_sequence(nodes).add_edge(START, nodes[0][0])


@scenario("agent")
def agent_without_tools(model: ChatPingPong) -> Scene:
    """`create_agent` with a system prompt only."""
    return Scene(create_agent(model, [], system_prompt="You are the researcher."), talk_inputs())


@scenario("agent <-> tool", replies=tool_user(call("tide_time", place="Oslo")))
def agent_with_a_tool(model: ChatPingPong) -> Scene:
    """`create_agent`: one tool call, then the answer."""
    effects: list[str] = []
    return Scene(
        create_agent(model, [tide_tool(effects)], system_prompt="You are the researcher."), talk_inputs(), effects
    )


@scenario(
    "agent <-> tools",
    parallel=True,
    replies=tool_user(f"I will look.\n{call('tide_time', place='Oslo')}\n{call('tide_time', place='Lima')}"),
)
def agent_with_parallel_calls(model: ChatPingPong) -> Scene:
    """Two tool calls in one answer, behind some words."""
    effects: list[str] = []
    agent = create_agent(model, [tide_tool(effects)], system_prompt="You are the researcher.")
    return Scene(agent, talk_inputs(), effects)


@scenario(
    "agent <-> tool, three times -> critic",
    replies=tool_user(*(call("tide_time", place=place) for place in ("Oslo", "Lima", "Sète"))),
)
def agent_with_many_calls(model: ChatPingPong) -> Scene:
    """Three tool calls one after the other, then a critic that reads the answer."""
    effects: list[str] = []
    agent = create_agent(model, [tide_tool(effects)], system_prompt="You are the researcher.")
    graph = in_a_row(("agent", agent), ("critic", critic_of_messages(model, effects))).compile()
    return Scene(graph, talk_inputs(), effects)


@scenario("agent (async tool)", replies=tool_user(call("tide_time", place="Oslo")))
def agent_with_an_async_tool(model: ChatPingPong) -> Scene:
    """A tool that is a coroutine."""
    effects: list[str] = []

    @tool
    async def tide_time(place: str) -> str:
        """Say when low tide is at a place."""
        effects.append(place)
        return f"Low tide at {place}: now."

    agent = create_agent(model, [tide_time], system_prompt="You are the researcher.")
    return Scene(agent, talk_inputs(), effects, ways=ASYNC_WAYS)


@scenario("researcher agent -> writer agent", replies=tool_user(call("tide_time", place="Lima")))
def two_agents(model: ChatPingPong) -> Scene:
    """Two `create_agent` graphs as nodes over one message history."""
    effects: list[str] = []
    researcher = create_agent(model, [tide_tool(effects)], system_prompt="You are the researcher.", name="researcher")
    writer = create_agent(model, [], system_prompt="You are the writer.", name="writer")
    return Scene(in_a_row(("researcher", researcher), ("writer", writer)).compile(), talk_inputs(), effects)


@scenario(
    "writer (declared) -> [model <-> tool] -> critic (declared)",
    declared=("model",),
    replies=tool_user(call("tide_time", place="Lima")),
)
def agent_after_a_declared_node(model: ChatPingPong) -> Scene:
    """An agent between two declared nodes: its first prompt is known from the writer on."""
    effects: list[str] = []

    def speaker(role: str) -> Any:
        prompt = [("system", f"You are the {role}. Answer in short sentences."), ("placeholder", "{messages}")]
        return agent_node(
            model, prompt=ChatPromptTemplate.from_messages(prompt), writes=lambda answer: {"messages": [answer]}
        )

    agent = create_agent(model, [tide_tool(effects)], system_prompt="You are the researcher. Look it up.")
    graph = in_a_row(("writer", speaker("writer")), ("agent", agent), ("critic", speaker("critic"))).compile()
    return Scene(graph, talk_inputs(), effects)


@scenario("function (agent) -> critic", replies=tool_user(call("tide_time", place="Lima")))
def agent_in_a_function(model: ChatPingPong) -> Scene:
    """A function that invokes an agent and passes its last message on."""
    effects: list[str] = []
    agent = create_agent(model, [tide_tool(effects)], system_prompt="You are the researcher.")

    def research(state: Texts) -> dict[str, str]:
        return {"draft": agent.invoke({"messages": [("human", state["task"])]})["messages"][-1].text}

    def critic(state: Texts) -> dict[str, str]:
        return {"notes": model.invoke(ask("critic", state["draft"])).text}

    builder = StateGraph(Texts).add_sequence([("research", research), ("critic", critic)]).add_edge(START, "research")
    return Scene(builder.compile(), tasks(), effects)


@scenario("model <-> ToolNode", replies=tool_user(call("tide_time", place="Oslo"), role="tide"))
def hand_made_agent(model: ChatPingPong) -> Scene:
    """`bind_tools`, `ToolNode` and `tools_condition`, as in LangGraph's first tutorial."""
    effects: list[str] = []
    tools = [tide_tool(effects)]
    with_tools = model.bind_tools(tools)

    def chatbot(state: MessagesState) -> dict[str, Any]:
        effects.append("chatbot")
        return {"messages": [with_tools.invoke(state["messages"])]}

    builder = StateGraph(MessagesState).add_node("chatbot", chatbot).add_node("tools", ToolNode(tools))
    builder.add_edge(START, "chatbot").add_conditional_edges("chatbot", tools_condition).add_edge("tools", "chatbot")
    return Scene(builder.compile(), talk_inputs(), effects)


@scenario(
    "agent <-> tool that fails", replies=tool_user(call("tide_time", place="Atlantis"), call("tide_time", place="Oslo"))
)
def agent_with_a_failing_tool(model: ChatPingPong) -> Scene:
    """The first call's tool fails, its error goes to the model, and the second call works."""
    effects: list[str] = []
    tide_time = tide_tool(effects)

    @tool(tide_time.name)
    def picky(place: str) -> str:
        """Say when low tide is at a place."""
        if place == "Atlantis":
            raise ValueError("no such place")
        return str(tide_time.invoke({"place": place}))

    @wrap_tool_call
    def as_message(request: Any, handler: Any) -> Any:
        try:
            return handler(request)
        except ValueError as error:
            return ToolMessage(f"failed: {error}", tool_call_id=request.tool_call["id"])

    agent = create_agent(model, [picky], system_prompt="You are the researcher.", middleware=[as_message])
    return Scene(agent, talk_inputs(), effects, ways=("invoke", "stream", "invoke"))


@scenario("agent <-> tool that updates the state", replies=tool_user(call("remember", note="kelp is brown")))
def tool_with_a_command(model: ChatPingPong) -> Scene:
    """A tool that reads the state and returns a `Command` with an update."""

    @tool
    def remember(note: str, runtime: ToolRuntime) -> Command[Any]:
        """Keep a note."""
        seen = len(runtime.state["messages"])
        return Command(
            update={"messages": [ToolMessage(f"kept after {seen}: {note}", tool_call_id=runtime.tool_call_id)]}
        )

    return Scene(create_agent(model, [remember], system_prompt="You are the researcher."), talk_inputs())


@scenario(
    "model <-> ToolNode -Command-> critic | poet", replies=tool_user(call("pass_on", to="critic"), role="who passes on")
)
def command_goto_from_a_tool(model: ChatPingPong) -> Scene:
    """A tool of a hand-made agent that returns `Command(goto, update)`: it decides which node comes next."""
    effects: list[str] = []

    @tool
    def pass_on(to: str, runtime: ToolRuntime) -> Command[Any]:
        """Let someone else go on."""
        effects.append(to)
        goto = to if len(runtime.state["messages"][0].text) % 2 else "poet"
        done = ToolMessage(f"over to the {to}", tool_call_id=runtime.tool_call_id)
        return Command(goto=goto, update={"messages": [done]})

    with_tools = model.bind_tools([pass_on])

    def chatbot(state: MessagesState) -> dict[str, Any]:
        prompt = [SystemMessage("You are the one who passes on."), *state["messages"]]
        return {"messages": [with_tools.invoke(prompt)]}

    builder = StateGraph(MessagesState).add_node("chatbot", chatbot).add_edge(START, "chatbot")
    builder.add_node("tools", ToolNode([pass_on]), destinations=("critic", "poet"))
    builder.add_conditional_edges("chatbot", tools_condition)
    builder.add_node("critic", critic_of_messages(model, effects)).add_node("poet", critic_of_messages(model, effects))
    return Scene(builder.compile(), talk_inputs(), effects)


def handoff_to(name: str) -> Any:
    """A tool that hands the conversation to another agent of the parent graph."""

    @tool(f"ask_{name}")
    def handoff(state: Annotated[Any, InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Let another agent go on."""
        done = ToolMessage(f"over to the {name}", tool_call_id=tool_call_id)
        return Command(goto=name, graph=Command.PARENT, update={"messages": [*state["messages"], done]})

    return handoff


@scenario("researcher agent -handoff-> writer agent", replies=tool_user(call("ask_writer")))
def handoff_between_agents(model: ChatPingPong) -> Scene:
    """A swarm: a tool of the first agent goes to the second by `Command(PARENT)`."""
    researcher = create_agent(model, [handoff_to("writer")], system_prompt="You are the researcher.", name="researcher")
    writer = create_agent(model, [handoff_to("researcher")], system_prompt="You are the writer.", name="writer")
    builder = StateGraph(MessagesState).add_node("researcher", researcher, destinations=("writer",))
    builder.add_node("writer", writer, destinations=("researcher",)).add_edge(START, "researcher")
    return Scene(builder.compile(), talk_inputs())


@scenario(
    "supervisor <-> agents as tools", replies=tool_user(call("ask_an_expert", text="kelp"), role="You are the boss")
)
def agents_as_tools(model: ChatPingPong) -> Scene:
    """A supervisor whose tool is another agent."""
    effects: list[str] = []
    expert = create_agent(model, [], system_prompt="You are the expert.", name="expert")

    @tool
    def ask_an_expert(text: str) -> str:
        """Ask an expert."""
        effects.append(text)
        return str(expert.invoke({"messages": [HumanMessage(text, id="for the expert")]})["messages"][-1].text)

    return Scene(create_agent(model, [ask_an_expert], system_prompt="You are the boss."), talk_inputs(), effects)


class Watching(AgentMiddleware[Any, Any]):
    """Adds to the system prompt, and counts what passes."""

    def __init__(self, effects: list[str]) -> None:
        self.effects = effects

    def before_model(self, state: Any, runtime: Any) -> None:
        self.effects.append("before model")

    def wrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        self.effects.append("wrap")
        prompt = f"{request.system_prompt} So far {len(request.messages)} messages."
        return handler(request.override(system_prompt=prompt))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        self.effects.append("wrap")
        prompt = f"{request.system_prompt} So far {len(request.messages)} messages."
        return await handler(request.override(system_prompt=prompt))


@scenario("agent <-> tool, middleware", replies=tool_user(call("tide_time", place="Oslo")))
def agent_with_middleware(model: ChatPingPong) -> Scene:
    """Middleware around the model call changes the system prompt on every turn."""
    effects: list[str] = []
    middleware = [Watching(effects)]
    system_prompt = "You are the researcher."
    agent = create_agent(model, [tide_tool(effects)], system_prompt=system_prompt, middleware=middleware)
    return Scene(agent, talk_inputs(), effects)


@scenario("agent -> a human approves -> tool -> agent", replies=tool_user(call("tide_time", place="Oslo")))
def agent_with_a_human(model: ChatPingPong) -> Scene:
    """A tool call that a human must approve."""
    effects: list[str] = []
    middleware = [HumanInTheLoopMiddleware(interrupt_on={"tide_time": True})]
    agent = create_agent(
        model,
        [tide_tool(effects)],
        system_prompt="You are the researcher.",
        middleware=middleware,
        checkpointer=InMemorySaver(),
    )

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run(Command(resume={"decisions": [{"type": "approve"}]}))

    return Scene(agent, talk_inputs(), effects, story)


class Verdict(BaseModel):
    """A structured answer."""

    good: bool
    why: str


@scenario("agent, structured answer", replies=tool_user(call("Verdict", good=True, why="it is short")))
def agent_with_structured_answer(model: ChatPingPong) -> Scene:
    """`response_format`: the answer is a tool call."""
    agent = create_agent(model, [], system_prompt="You are the researcher.", response_format=ToolStrategy(Verdict))
    return Scene(agent, talk_inputs())


@scenario("writer -> judge (structured) -> editor", replies={"the judge": '{"good": false, "why": "too long"}'})
def structured_output(model: ChatPingPong) -> Scene:
    """`with_structured_output` in a node."""
    judge = model.with_structured_output(Verdict)

    def writer(state: Texts) -> dict[str, str]:
        return {"draft": model.invoke(ask("writer", state["task"])).text}

    def judging(state: Texts) -> dict[str, str]:
        verdict = judge.invoke(ask("judge", state["draft"]))
        assert isinstance(verdict, Verdict)
        return {"notes": f"good: {verdict.good}, since {verdict.why}"}

    def editor(state: Texts) -> dict[str, str]:
        return {"final": model.invoke(ask("editor", f"{state['draft']}\n{state['notes']}")).text}

    builder = StateGraph(Texts).add_sequence([("writer", writer), ("judge", judging), ("editor", editor)])
    return Scene(builder.add_edge(START, "writer").compile(), tasks())


@scenario("agent, three turns on one thread", replies=tool_user(call("tide_time", place="Oslo")))
def agent_with_memory(model: ChatPingPong) -> Scene:
    """A conversation with an agent: the second turn sees the tool call of the first."""
    effects: list[str] = []
    system_prompt = "You are the researcher."
    agent = create_agent(model, [tide_tool(effects)], system_prompt=system_prompt, checkpointer=InMemorySaver())

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run({"messages": [AIMessage("Anything else?", id="more"), HumanMessage("In one word?", id="second")]})
        round_.run({"messages": [HumanMessage("And Lima?", id="third")]})

    return Scene(agent, talk_inputs(), effects, story)
