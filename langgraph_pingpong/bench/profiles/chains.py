"""Chains of agents, each with a long brief of its own: `long-prefill` and `sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from langgraph_pingpong.bench.profiles.work import Bench, Chain, Profile, Texts, Work
from langgraph_pingpong.edges import agent_node

_ASK = "Go on from this text, and answer the task."


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent of a chain: its brief, and how many tokens it is asked for."""

    name: str
    brief: str
    tokens: int

    def beginning(self) -> list[BaseMessage]:
        """What of its prompt is known before anything was said."""
        return [SystemMessage(self.brief), HumanMessage("Task: Explain this to a new reader.\n\nText:\n")]

    def prompt(self, read: str) -> list[BaseMessage]:
        """Its prompt on a text."""
        system, human = self.beginning()
        return [system, HumanMessage(f"{human.text}{read}\n\n{_ASK}")]


def state_of(keys: Sequence[str]) -> Any:
    """The type of a state of texts."""
    return cast(Any, TypedDict)("State", dict.fromkeys(keys, str), total=False)


def make_chain(bench: Bench, agents: Sequence[Agent], document: str) -> Chain:
    """A compiled chain with its input: each agent reads what the one before it said, the first the document."""
    builder = StateGraph(state_of(["document", *(agent.name for agent in agents)]))
    for before, agent in zip(("document", *(agent.name for agent in agents)), agents, strict=False):

        def prompt(state: Mapping[str, str], agent: Agent = agent, reads: str = before) -> list[BaseMessage]:
            return agent.prompt(state[reads])

        builder.add_node(agent.name, agent_node(bench.asking(agent.tokens), prompt=prompt, writes=agent.name))
        builder.add_edge(START if before == "document" else before, agent.name)
    builder.add_edge(agents[-1].name, END)
    graph = builder.compile()

    async def run() -> Texts:
        state = await graph.ainvoke({"document": document})
        return {agent.name: state[agent.name] for agent in agents}

    return run


def _work(bench: Bench, tokens: Sequence[int]) -> Work:
    """Chains of agents with these limits; every chain has its own document, and its own briefs where asked for."""
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(tokens)]
    made: list[Chain] = []
    agents: list[Agent] = []
    for number in range(bench.chains):
        own = number if bench.params["own_briefs"] else 0
        briefs = [bench.text(f"Handbook {own} of {name}", bench.params["static"]) for name in names]
        of_chain = [Agent(name, brief, limit) for name, brief, limit in zip(names, briefs, tokens, strict=True)]
        made.append(make_chain(bench, of_chain, bench.text("Document", bench.params["document"], number)))
        agents += of_chain
    prefixes = {agent.brief: agent.beginning() for agent in agents}
    return Work(made, len(agents), {agent.name: agent.tokens for agent in agents}, list(prefixes.values()))


def _long_prefill(bench: Bench) -> Work:
    first = [bench.params["output"]] * (bench.params["agents"] - 1)
    return _work(bench, [*first, bench.params["last_output"]])


def _sweep(bench: Bench) -> Work:
    return _work(bench, [bench.params["upstream"], bench.params["downstream"]])


LONG_PREFILL = Profile(
    "long-prefill",
    "A chain of agents. Each has a brief of `static` tokens of its own and reads the whole answer of the one before "
    "it; the first reads a document. All but the last answer with `output` tokens.",
    {
        "gpu": {
            "agents": (5,),
            "static": (4096,),
            "document": (1024,),
            "output": (256,),
            "last_output": (64,),
            "own_briefs": (1,),
        },
        "cpu": {
            "agents": (5,),
            "static": (768,),
            "document": (256,),
            "output": (64,),
            "last_output": (16,),
            "own_briefs": (1,),
        },
        "fake": {
            "agents": (3,),
            "static": (400,),
            "document": (150,),
            "output": (24,),
            "last_output": (8,),
            "own_briefs": (1,),
        },
    },
    _long_prefill,
)

SWEEP = Profile(
    "sweep",
    "Two agents: what the upstream says (`upstream` tokens) is decoded while the downstream's brief (`static` tokens) "
    "is prefilled; the downstream answers with `downstream` tokens.",
    {
        "gpu": {
            "upstream": (128, 512, 1024, 4096),
            "static": (512, 2048, 8192, 32768),
            "downstream": (1, 64, 256),
            "document": (512,),
            "own_briefs": (1,),
        },
        "cpu": {
            "upstream": (16, 64),
            "static": (256, 1024, 4096),
            "downstream": (1, 16),
            "document": (128,),
            "own_briefs": (1,),
        },
        "fake": {
            "upstream": (8, 24),
            "static": (200, 400),
            "downstream": (1, 8),
            "document": (100,),
            "own_briefs": (1,),
        },
    },
    _sweep,
)
