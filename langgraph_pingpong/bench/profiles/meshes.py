"""Graphs that are no chains of answers: `debate` (everybody reads everybody) and `rag` (documents come in pieces)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph

from langgraph_pingpong.bench.profiles.chains import state_of
from langgraph_pingpong.bench.profiles.work import Bench, Chain, Profile, Texts, Work
from langgraph_pingpong.edges import agent_node

State = Mapping[str, str]


# -- debate ----------------------------------------------------------------------------------------------------


def _debate(bench: Bench) -> Work:
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: bench.params["agents"]]
    rules = {name: bench.text(f"Position of {name}", bench.params["static"]) for name in names}
    nodes = [f"{name}{turn}" for turn in range(1, bench.params["rounds"] + 1) for name in names]
    chains = [_debate_chain(bench, names, rules, number) for number in range(bench.chains)]
    outputs = dict.fromkeys(nodes, bench.params["output"])
    prefixes = [[SystemMessage(rule)] for rule in rules.values()]
    return Work(chains, len(nodes) * bench.chains, outputs, prefixes)


def _debate_chain(bench: Bench, names: str, rules: Mapping[str, str], number: int) -> Chain:
    rounds = range(1, bench.params["rounds"] + 1)
    nodes = [f"{name}{turn}" for turn in rounds for name in names]
    builder = StateGraph(state_of(["question", *nodes]))
    for turn in rounds:
        for name in names:
            others = [f"{other}{turn - 1}" for other in names if other != name] if turn > 1 else []
            prompt = _debater(rules[name], others)
            node = f"{name}{turn}"
            builder.add_node(node, agent_node(bench.asking(bench.params["output"]), prompt=prompt, writes=node))
            builder.add_edge([f"{other}{turn - 1}" for other in names] if turn > 1 else START, node)
    builder.add_edge([f"{name}{rounds[-1]}" for name in names], END)
    graph = builder.compile()
    question = bench.text("Question", bench.params["document"], number)

    async def run() -> Texts:
        state = await graph.ainvoke({"question": question})
        return {node: state[node] for node in nodes}

    return run


def _debater(rules: str, others: Sequence[str]) -> Any:
    def prompt(state: State) -> list[BaseMessage]:
        said = "".join(f"\n\n{other} said:\n{state[other]}" for other in others)
        return [SystemMessage(rules), HumanMessage(f"{state['question']}{said}\n\nWhat do you say?")]

    return prompt


DEBATE = Profile(
    "debate",
    "`agents` agents answer a question (`document` tokens) at once, each under rules of its own (`static` tokens), and "
    "in every further round each reads what all others said. Many answers are decoded together.",
    {
        "gpu": {"agents": (5,), "rounds": (2,), "static": (512,), "document": (1024,), "output": (512,)},
        "cpu": {"agents": (3,), "rounds": (2,), "static": (128,), "document": (128,), "output": (32,)},
        "fake": {"agents": (3,), "rounds": (2,), "static": (100,), "document": (100,), "output": (12,)},
    },
    _debate,
)


# -- rag -------------------------------------------------------------------------------------------------------


def _rag(bench: Bench) -> Work:
    rules = {name: bench.text(f"Rules of the {name}", bench.params["static"]) for name in ("query", "answer", "check")}
    chains = [_rag_chain(bench, rules, number) for number in range(bench.chains)]
    output = bench.params["output"]
    outputs = {"query": bench.params["query_output"], "answer": output, "check": output}
    return Work(chains, 3 * bench.chains, outputs, [[SystemMessage(rule)] for rule in rules.values()])


def _rag_chain(bench: Bench, rules: Mapping[str, str], number: int) -> Chain:
    found = [f"found{piece}" for piece in range(bench.params["pieces"])]
    builder = StateGraph(state_of(["question", "query", *found, "answer", "check"]))
    reads = {"query": ["question"], "answer": ["question", *found], "check": ["question", "answer"]}
    for name, limit in (("query", "query_output"), ("answer", "output"), ("check", "output")):
        prompt = _reader(rules[name], reads[name])
        builder.add_node(name, agent_node(bench.asking(bench.params[limit]), prompt=prompt, writes=name))
    for piece in found:
        text = bench.text(f"Document {piece}", bench.params["piece"], number)
        builder.add_node(f"fetch {piece}", _fetch(piece, text, bench.params["delay_ms"] / 1000))
    order = ["query", *(f"fetch {piece}" for piece in found), "answer", "check"]
    for before, after in zip((START, *order), (*order, END), strict=True):
        builder.add_edge(before, after)
    graph = builder.compile()
    question = bench.text("Question", 40, number)

    async def run() -> Texts:
        state = await graph.ainvoke({"question": question})
        return {name: state[name] for name in ("query", "answer", "check")}

    return run


def _reader(rules: str, keys: Sequence[str]) -> Any:
    def prompt(state: State) -> list[BaseMessage]:
        return [SystemMessage(rules), HumanMessage("\n\n".join(state[key] for key in keys))]

    return prompt


def _fetch(key: str, text: str, delay_s: float) -> Any:
    async def fetch(state: State) -> dict[str, str]:
        await asyncio.sleep(delay_s)
        return {key: text}

    return fetch


RAG = Profile(
    "rag",
    "An agent words a query, `pieces` documents of `piece` tokens come one after the other, `delay_ms` apart, a second "
    "agent answers from them, a third checks the answer. Documents come from nodes that are no agents.",
    {
        "gpu": {
            "static": (1024,),
            "pieces": (4,),
            "piece": (1024,),
            "delay_ms": (50,),
            "query_output": (64,),
            "output": (256,),
        },
        "cpu": {
            "static": (256,),
            "pieces": (3,),
            "piece": (256,),
            "delay_ms": (200,),
            "query_output": (16,),
            "output": (32,),
        },
        "fake": {
            "static": (200,),
            "pieces": (2,),
            "piece": (150,),
            "delay_ms": (5,),
            "query_output": (8,),
            "output": (16,),
        },
    },
    _rag,
)
