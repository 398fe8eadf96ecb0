"""Many conversations at once with an agent that has a long history and calls a tool: `tool-agents`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode

from langgraph_pingpong.bench.profiles.work import Bench, Chain, Profile, Texts, Work
from langgraph_pingpong.bench.turns import Turns

TOOL = "look_up"
CALL_TOKENS = 64
"""A call of the tool may have so many, however short answers are: one that is cut off is no call."""

Topic = Literal["tides", "crabs", "birds", "maps"]

SPREAD = 4.0
"""Of the tool's times, which are drawn from a gamma distribution: their deviation is half of their mean."""


class State(MessagesState):
    """A conversation, and which one it is."""

    conversation: int
    request: int


@dataclass(frozen=True)
class Shop:
    """What the conversations of one run share: the graph's nodes, the tool, and the notes on turns."""

    bench: Bench
    turns: Turns

    def graph(self) -> Any:
        """Model, tool, model: a graph as one writes it by hand."""
        tools = [self.tool()]
        ask = self.bench.model.bind_tools(tools, tool_choice=TOOL, max_tokens=CALL_TOKENS)
        settings = {"ignore_eos": True} if self.bench.force_tokens else {}
        answer = self.bench.model.bind_tools(tools, max_tokens=self.bench.params["output"], **settings)

        async def ask_node(state: State) -> dict[str, list[BaseMessage]]:
            said = await self.turns.of(state).ask("ask", ask, state["messages"])
            return {"messages": [AIMessage(said.text, tool_calls=[_call(said, state)])]}

        async def answer_node(state: State) -> dict[str, list[BaseMessage]]:
            said = await self.turns.of(state).ask("answer", answer, state["messages"])
            return {"messages": [AIMessage(said.text)]}

        builder = StateGraph(State).add_node("ask", ask_node).add_node("answer", answer_node)
        builder.add_node("tools", ToolNode(tools)).add_edge(START, "ask").add_edge("ask", "tools")
        return builder.add_edge("tools", "answer").add_edge("answer", END).compile()

    def tool(self) -> BaseTool:
        """Takes a while, and finds a text."""
        seed, mean_s = self.bench.seed, self.bench.params["tool_ms"] / 1000

        @tool(TOOL)
        async def look_up(topic: Topic, state: Annotated[Any, InjectedState]) -> str:
            """Look a topic up in the handbook of the shore."""
            where = state["conversation"], state["request"]
            async with self.turns.of(state).tool():
                await asyncio.sleep(random.Random(f"{seed}/tool/{where}").gammavariate(SPREAD, mean_s / SPREAD))
            return self.bench.text("Found", self.bench.params["result"], *where)

        return look_up

    def history(self, conversation: int) -> list[BaseMessage]:
        """A conversation so far: the rules that all share, and turns of its own, some with a call of the tool."""
        params = self.bench.params
        turns, calls = params["turns"], min(params["tool_calls"], params["turns"] // 4)
        words = self.bench.text("Conversation", params["history"], conversation).split(" ")
        pieces = [
            " ".join(words[turn * len(words) // turns : (turn + 1) * len(words) // turns]) for turn in range(turns)
        ]
        messages: list[BaseMessage] = [SystemMessage(self.bench.text("Rules", params["static"]))]
        while len(messages) <= turns:
            number = len(messages) - 1
            messages += _exchange(pieces[number : number + 4], number, with_tool=number < 4 * calls)
        return messages[: turns + 1]


def _exchange(pieces: Sequence[str], number: int, *, with_tool: bool) -> list[BaseMessage]:
    said = [*pieces, *("Go on.",) * (4 - len(pieces))]
    if not with_tool:
        return [HumanMessage(said[0]), AIMessage(said[1])]
    call = ToolCall(name=TOOL, args={"topic": "tides"}, id=f"call {number}")
    found = ToolMessage(said[2], tool_call_id=f"call {number}", name=TOOL)
    return [HumanMessage(said[0]), AIMessage(said[1], tool_calls=[call]), found, AIMessage(said[3])]


def _call(said: AIMessage, state: Mapping[str, Any]) -> ToolCall:
    """The call of the tool that was said, or one that is made where it is none: a modelled engine says what it says."""
    for call in said.tool_calls:
        if call["args"].get("topic") in get_args(Topic):
            return call
    return ToolCall(name=TOOL, args={"topic": "maps"}, id=f"made {state['conversation']} {state['request']}")


def _tool_agents(bench: Bench) -> Work:
    shop, conversations = Shop(bench, Turns()), bench.params["conversations"] * bench.chains
    graph = shop.graph()
    chains = [_conversation(shop, graph, number) for number in range(conversations)]
    calls = 2 * conversations * bench.params["requests"]
    prefixes = [[SystemMessage(bench.text("Rules", bench.params["static"]))]]
    return Work(chains, calls, {"answer": bench.params["output"]}, prefixes, shop.turns)


def _conversation(shop: Shop, graph: Any, number: int) -> Chain:
    """A user who asks again as soon as there is an answer."""
    history, requests = shop.history(number), range(shop.bench.params["requests"])
    questions = [HumanMessage(f"Question {request + 1} of {number}: what else is there?") for request in requests]

    async def run() -> Texts:
        messages, texts = history, dict[str, str]()
        for request, question in enumerate(questions):
            turn = shop.turns.begin(number, request)
            asked = {"messages": [*messages, question], "conversation": number, "request": request}
            messages = (await graph.ainvoke(asked))["messages"]
            turn.end()
            called, answered = messages[-3], messages[-1]
            texts |= {f"ask {request}": str(called.tool_calls[0]["args"]), f"answer {request}": answered.text}
        return texts

    return run


TOOL_AGENTS = Profile(
    "tool-agents",
    "`conversations` users at once, each with a history of `turns` messages, among them `tool_calls` calls of a tool "
    "with their results: `history` tokens of text under rules that all share (`static` tokens), beside what the chat "
    "template adds. Each asks `requests` times, without a pause: the agent calls a tool, which takes `tool_ms` on "
    "average (gamma distribution, seeded) and finds `result` tokens, and answers with `output` tokens. Those turns "
    "count that begin after the first `warmup` turns ended, and end before the first user has no more to ask.",
    {
        "gpu": {
            "conversations": (100,),
            "requests": (4,),
            "turns": (40,),
            "tool_calls": (8,),
            "static": (1500,),
            "history": (3700,),
            "result": (300,),
            "output": (64,),
            "tool_ms": (1200,),
            "warmup": (20,),
        },
        "cpu": {
            "conversations": (8,),
            "requests": (6,),
            "turns": (40,),
            "tool_calls": (8,),
            "static": (150,),
            "history": (250,),
            "result": (100,),
            "output": (16,),
            "tool_ms": (1200,),
            "warmup": (20,),
        },
        "fake": {
            "conversations": (3,),
            "requests": (3,),
            "turns": (12,),
            "tool_calls": (2,),
            "static": (100,),
            "history": (200,),
            "result": (60,),
            "output": (8,),
            "tool_ms": (20,),
            "warmup": (2,),
        },
    },
    _tool_agents,
)
