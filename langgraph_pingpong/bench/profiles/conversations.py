"""Conversations, whose prompts grow by what was said: `messages` among agents, `multiturn` with users."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from langgraph_pingpong.bench.profiles.work import Bench, Chain, Profile, Texts, Work
from langgraph_pingpong.edges import agent_node

Update = dict[str, list[BaseMessage]]


def _prompt_under(rules: str, state: MessagesState) -> list[BaseMessage]:
    return [SystemMessage(rules), *state["messages"]]


def _hand_over(following: str, answer: AIMessage) -> Update:
    """The answer, and the word to the agent that follows: all of it stays in the conversation."""
    return {"messages": [answer, HumanMessage(f"Now go on as {following}.")]}


def _messages(bench: Bench) -> Work:
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: bench.params["agents"]]
    rules = bench.text("Rules", bench.params["static"])
    chains = [_conversation(bench, names, rules, number) for number in range(bench.chains)]
    outputs = dict.fromkeys(names, bench.params["output"])
    return Work(chains, len(names) * bench.chains, outputs, [[SystemMessage(rules)]])


def _conversation(bench: Bench, names: str, rules: str, number: int) -> Chain:
    builder = StateGraph(MessagesState)
    for before, name, following in zip((START, *names), names, (*names[1:], "an editor"), strict=False):
        node = agent_node(
            bench.asking(bench.params["output"]),
            prompt=partial(_prompt_under, rules),
            writes=partial(_hand_over, following),
        )
        builder.add_node(name, node)
        builder.add_edge(before, name)
    builder.add_edge(names[-1], END)
    graph = builder.compile()
    opening = HumanMessage(bench.text("Question", bench.params["document"], number))

    async def run() -> Texts:
        state = await graph.ainvoke({"messages": [opening]})
        return dict(zip(names, _answers(state), strict=True))

    return run


def _answers(state: Any) -> list[str]:
    return [message.text for message in state["messages"] if isinstance(message, AIMessage)]


def _multiturn(bench: Bench) -> Work:
    users, turns = bench.params["users"] * bench.chains, bench.params["turns"]
    rules = bench.text("Rules", bench.params["static"])
    node = agent_node(
        bench.asking(bench.params["output"]),
        prompt=partial(_prompt_under, rules),
        writes=lambda answer: {"messages": [answer]},
    )
    graph = StateGraph(MessagesState).add_node("assistant", node).add_edge(START, "assistant").compile()
    chains = [_user(bench, graph, user) for user in range(users)]
    return Work(chains, users * turns, {"assistant": bench.params["output"]}, [[SystemMessage(rules)]])


def _user(bench: Bench, graph: Any, user: int) -> Chain:
    """A user who thinks, writes, and waits for the answer, turn after turn."""
    draw = random.Random(f"{bench.seed}/think/{user}")
    turns = range(bench.params["turns"])
    pauses = [draw.expovariate(1.0) * bench.params["think_ms"] / 1000 for _ in turns]
    says = [HumanMessage(bench.text(f"Question {turn + 1}", bench.params["question"], user)) for turn in turns]

    async def run() -> Texts:
        messages: list[BaseMessage] = []
        for pause, question in zip(pauses, says, strict=True):
            await asyncio.sleep(pause)
            messages = (await graph.ainvoke({"messages": [*messages, question]}))["messages"]
        return {f"assistant {turn + 1}": text for turn, text in enumerate(_answers({"messages": messages}))}

    return run


MESSAGES = Profile(
    "messages",
    "Agents share one growing conversation under the same rules (`static` tokens): one engine's cache already holds "
    "all of the next prompt but the last words. Ping-pong has next to nothing to hide here, and should stay quiet.",
    {
        "gpu": {"agents": (8,), "static": (2048,), "document": (1024,), "output": (256,)},
        "cpu": {"agents": (5,), "static": (256,), "document": (128,), "output": (32,)},
        "fake": {"agents": (3,), "static": (200,), "document": (100,), "output": (16,)},
    },
    _messages,
)

MULTITURN = Profile(
    "multiturn",
    "`users` users at once talk to one agent for `turns` turns, each with a question of `question` tokens and an "
    "answer of `output` tokens; between turns they think, `think_ms` on average, exponentially distributed. The next "
    "prompt depends on the user, so nothing can be foreseen.",
    {
        "gpu": {
            "users": (10,),
            "turns": (5,),
            "static": (512,),
            "question": (128,),
            "output": (256,),
            "think_ms": (5000,),
        },
        "cpu": {
            "users": (3,),
            "turns": (3,),
            "static": (128,),
            "question": (64,),
            "output": (16,),
            "think_ms": (1000,),
        },
        "fake": {
            "users": (3,),
            "turns": (2,),
            "static": (100,),
            "question": (50,),
            "output": (12,),
            "think_ms": (20,),
        },
    },
    _multiturn,
)
