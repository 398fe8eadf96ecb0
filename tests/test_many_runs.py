"""Many runs at once on few engines: each is answered from its own input only, and as it would be alone."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.fake_engine import pseudo_words
from tests.conftest import edges_on, leases_on, wait_until
from tests.engines_fixture import DEVICES

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

    from langgraph_pingpong.engines.base import Request
    from tests.conftest import Lab, Recorder

FIVE = ("writer", "critic", "editor", "planner", "reader")
THREE = FIVE[:3]
CANARY = re.compile(r"[A-Z][a-z]+-\d+")
BIRDS = ("Heron", "Gull", "Tern", "Plover", "Curlew", "Dunlin", "Knot", "Avocet")


def canary(run: int) -> str:
    """A word that is in the input of one run only. None is the beginning of another."""
    return f"{BIRDS[run % len(BIRDS)]}-{1000 + run}"


def task_of(run: int) -> dict[str, str]:
    return {"task": f"Say what {canary(run)} eats."}


def echo(prompt: str) -> str:
    """An answer that repeats the canaries of its prompt, among words that depend on all of it."""
    words = pseudo_words(prompt).split()
    return " ".join([*words[:4], *sorted(set(CANARY.findall(prompt))), *words[4:8]]) + "."


async def all_at_once(graph: CompiledStateGraph[Any], runs: int) -> list[dict[str, Any]]:
    return await asyncio.gather(*(graph.ainvoke(task_of(run)) for run in range(runs)))


def prompts_by_canary(tokenizer: Any, requests: Sequence[Request]) -> dict[str, list[tuple[int, ...]]]:
    """The prompts that hold each canary; every prompt has to hold one, and no other."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for request in requests:
        (word,) = set(CANARY.findall(tokenizer.decode(list(request.prompt_token_ids))))
        found.setdefault(word, []).append(request.prompt_token_ids)
    return found


class TestModelledEngines:
    RUNS = 100

    def test_a_hundred_chains_do_not_mix(self, lab: Lab) -> None:
        plain = type(lab)()
        serial = plain.chain(plain.model(overlap="off", speed={"time_scale": 0.0, "reply": echo}), FIVE)
        expected = [serial.invoke(task_of(run)) for run in range(self.RUNS)]
        model = lab.model(speed={"reply": echo, "decode_speed": 400.0})
        record = lab.record(model)
        states = asyncio.run(all_at_once(lab.chain(model, FIVE), self.RUNS))
        assert states == expected
        for run, state in enumerate(states):
            assert {word for node in FIVE for word in CANARY.findall(state[node])} == {canary(run)}
            assert all(canary(run) in state[node] for node in FIVE)
        tokenizer = lab.engines[0].tokenizer
        asked = prompts_by_canary(tokenizer, [request for engine in lab.engines for request in engine.requests])
        alone = prompts_by_canary(tokenizer, [request for engine in plain.engines for request in engine.requests])
        assert {word: sorted(ids) for word, ids in asked.items()} == {word: sorted(ids) for word, ids in alone.items()}
        certificates = [event.data["certificate"] for event in record.named("finish")]
        assert len(certificates) == len(FIVE) * self.RUNS
        assert all(each["ids_equal"] for each in certificates)
        assert sum(each["streamed"] > 0 for each in certificates) > self.RUNS
        self.expect_prefills_of_one_run_each(lab, asked)
        wait_until(lambda: not edges_on(model.pool), 1.0, "closed edges")
        assert leases_on(model.pool) == 0

    @staticmethod
    def expect_prefills_of_one_run_each(lab: Lab, asked: dict[str, list[tuple[int, ...]]]) -> None:
        """What was prefilled is the beginning of a prompt that was asked, in the same run where it has a canary."""
        tokenizer = lab.engines[0].tokenizer
        everything = [ids for prompts in asked.values() for ids in prompts]
        for request in (request for engine in lab.engines for request in engine.prefills):
            ids = request.prompt_token_ids
            whole = [word for word in set(CANARY.findall(tokenizer.decode(list(ids)))) if word in asked]
            assert len(whole) <= 1
            assert any(prompt[: len(ids)] == ids for prompt in (asked[whole[0]] if whole else everything))


def test_slow_tools_in_the_callers_threads_hold_no_call_up(lab: Lab) -> None:
    """LangChain runs synchronous tools in the threads of the caller's loop, of which there are few."""
    model, over = lab.model(), threading.Event()

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        tool = loop.run_in_executor(None, over.wait)
        try:
            async with asyncio.timeout(10):
                assert (await model.ainvoke("Hi")).text
                assert "".join([chunk.text async for chunk in model.astream("Hi")])
        finally:
            over.set()
            await tool

    asyncio.run(ask())


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestRealEngines:
    RUNS = 32

    def test_chains_at_once_give_what_each_gives_alone(self, lab: Lab, real_model: ChatPingPong) -> None:
        """In float32 the texts are equal, too, in batches of any size."""
        model = real_model.model_copy(update={"max_tokens": 6})
        serial = lab.chain(model.model_copy(update={"overlap": "off"}), THREE)
        record = lab.record(real_model)
        expected = [serial.invoke(task_of(run)) for run in range(self.RUNS)]
        alone = self.digests(record)
        real_model.reset_prefix_cache()
        record = lab.record(real_model)
        states = asyncio.run(all_at_once(lab.chain(model, THREE), self.RUNS))
        assert states == expected
        assert len({state["writer"] for state in states}) > 1
        assert self.digests(record) == alone
        certificates = [event.data["certificate"] for event in record.named("finish")]
        assert len(certificates) == len(THREE) * self.RUNS
        assert all(each["ids_equal"] for each in certificates)
        assert {each["device"] for each in certificates} == set(DEVICES)
        assert any(each["source"] for each in certificates), "edges were open, though on busy CPUs nothing is prefilled"
        assert [engine.num_unfinished for engine in real_model._serving().pool.engines] == [0, 0]

    @staticmethod
    def digests(record: Recorder) -> list[tuple[str, str]]:
        """Node and digest of each prompt that was answered."""
        return sorted((event.node, event.data["prompt_sha256"]) for event in record.named("generate.started"))
