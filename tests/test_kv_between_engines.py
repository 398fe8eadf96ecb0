"""KV between two real vLLM engines: equal answers, sooner; and right ones when a transfer goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from graphs.briefs import read_text
from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.base import KvLost, Request
from langgraph_pingpong.kv_budget import KvBudget
from langgraph_pingpong.kv_handles import HandleRefused, KvHandle
from langgraph_pingpong.kv_transfer import KvTransfer
from langgraph_pingpong.placement import block_keys
from tests.conftest import wait_until
from tests.engines_fixture import DEVICES, SETTINGS
from tests.kv_costs import fixed_costs

pytest.importorskip("nixl", reason="KV transfer needs it")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 32
BUSY = {"pulled", "too slow", "expired"}
"""What may come of a read on a busy machine, where NIXL's own threads take a core from each engine."""

BIRDS = ("heron", "gull", "curlew", "plover", "tern", "stork", "crane", "wader", "avocet", "knot")


@pytest.fixture(scope="module")
def model() -> Iterator[ChatPingPong]:
    """The default model on two engines that can read each other's KV."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with ChatPingPong(devices=DEVICES, temperature=0.0, max_tokens=12, kv_transfer=True, **SETTINGS) as model:
            model._serving().pool.start()
            yield model


@pytest.fixture(autouse=True)
def always(model: ChatPingPong, monkeypatch: pytest.MonkeyPatch) -> None:
    """On these engines a short pull takes about as long as computing; here it shall be tried whatever it costs."""

    kv_of(model).counts.clear()
    monkeypatch.setattr(kv_of(model).planner, "costs", fixed_costs(1.0, 1e-6))


def kv_of(model: ChatPingPong) -> KvTransfer:
    return model._serving().pool.kv


def on(model: ChatPingPong, what: Any) -> Any:
    return model._serving().pool.loop.run(what)


def ids_of(model: ChatPingPong, text: str, tokens: int = 0) -> tuple[int, ...]:
    ids = tuple(model._serving().template.encode(text))
    return ids[:tokens] if tokens else ids


async def answer(model: ChatPingPong, index: int, ids: tuple[int, ...], max_tokens: int = 8) -> dict[str, Any]:
    """What one engine answers, as a call of the model would ask it."""
    lease, began = model._serving().pool._reserve(index), time.monotonic()
    said: dict[str, Any] = {"ids": (), "text": "", "cached": None, "ttft": None}
    try:
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        async for delta in lease.generate(Request(ids, sampling)):
            if said["ttft"] is None:
                said.update(ttft=time.monotonic() - began, cached=delta.num_cached_tokens)
            said["ids"] += delta.token_ids
            said["text"] += delta.text
    finally:
        lease.release()
    return {**said, "pulled": lease.pulled}


def held(model: ChatPingPong, ids: tuple[int, ...]) -> list[int]:
    """How many blocks of a prompt each engine says it holds."""
    keys = block_keys(ids, BLOCK, None)
    return [seen.count(keys) for seen in kv_of(model).planner.seen if seen is not None]


def test_fifty_prompts_are_answered_as_if_computed(model: ChatPingPong) -> None:
    """In both directions. What an engine computed from nothing is compared with what the other one read from it."""
    text = ids_of(model, "\n".join(read_text(name) for name in ("documents/clinic_telephone.md", "document.md")))
    prompts = [text[start : start + 110] for start in range(0, 50 * 12, 12)]
    assert len(set(prompts)) == 50 and len(prompts[-1]) == 110

    async def both() -> list[tuple[dict[str, Any], dict[str, Any]]]:
        pairs = []
        for first in range(0, 50, 10):  # ten at a time, as from a graph
            numbers = range(first, first + 10)
            computed = await asyncio.gather(*(answer(model, n % 2, prompts[n]) for n in numbers))
            read = await asyncio.gather(*(answer(model, 1 - n % 2, prompts[n]) for n in numbers))
            pairs += zip(computed, read, strict=True)
        return pairs

    pairs = on(model, both())
    assert [read["ids"] for _, read in pairs] == [computed["ids"] for computed, _ in pairs]
    assert all(computed["cached"] == computed["pulled"] == 0 for computed, _ in pairs)
    assert {(read["cached"], read["pulled"]) for _, read in pairs} <= {(96, 96), (0, 0)}
    assert kv_of(model).counts["pulled"] >= 45
    assert set(kv_of(model).counts) <= BUSY


def test_reading_3000_tokens_is_faster_than_computing_them(model: ChatPingPong) -> None:
    ids = (ids_of(model, read_text("document.md")) * 6)[:3000]
    computed, read = on(model, answer(model, 0, ids)), on(model, answer(model, 1, ids))
    assert (read["ids"], read["pulled"]) == (computed["ids"], 2976)
    assert read["ttft"] < computed["ttft"] / 2, f"{read['ttft']:.2f} s read, {computed['ttft']:.2f} s computed"
    wait_until(lambda: held(model, ids) == [93, 93], 2.0, "word of what is cached")
    assert all(model._serving().pool.evictions.of(index).tells for index in (0, 1))
    assert [each["evicted"] for each in model.memory()] == [0, 0]  # there was room for all


def test_a_hundred_branches_at_once_keep_apart(model: ChatPingPong, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a code word of its own early in its prompt, and is read by the other engine at the same time.

    None is computed because too many are read: answers come before reads, which would be too slow on a busy machine.
    """
    monkeypatch.setattr(KvBudget, "may_pull", lambda self, tokens: True)
    words = [f"{BIRDS[n % 10]}{BIRDS[n // 10]}" for n in range(100)]
    rest = " It was given out at the harbour this morning, and nobody but the keeper of the light has been told of it."
    prompts = [ids_of(model, f"The code word is {word}.{rest * 4} Again: the code word is") for word in words]
    assert all(len(ids) > 64 + BLOCK for ids in prompts)

    async def all_of(other: int) -> list[dict[str, Any]]:
        return await asyncio.gather(*(answer(model, (n + other) % 2, ids, 5) for n, ids in enumerate(prompts)))

    computed, read = on(model, all_of(0)), on(model, all_of(1))
    assert [each["ids"] for each in read] == [each["ids"] for each in computed]
    assert len({each["text"] for each in read}) > 20
    for own, each in zip(words, read, strict=True):
        assert not [word for word in words if word != own and word in each["text"]]
    assert kv_of(model).counts["pulled"] > 30
    assert set(kv_of(model).counts) <= BUSY


def lend(model: ChatPingPong, ids: tuple[int, ...]) -> KvHandle:
    """A handle on a prompt's KV, kept by the first engine."""
    handle = on(model, kv_of(model).lend(0, Request(ids)))
    assert isinstance(handle, KvHandle)
    return handle


HERON = "The code word is heron. " * 24
CASES = itertools.count(1)


@pytest.fixture(scope="module")
def old(model: ChatPingPong) -> KvHandle:
    """On KV of the prompt that names the heron; it grows old while the tests run."""
    return lend(model, ids_of(model, HERON, 128))


@pytest.mark.usefixtures("old")
class TestAHandle:
    """Case 39: transferred KV belongs to another prompt, and nobody notices. Here it is refused, and computed."""

    @pytest.fixture
    def heron(self, model: ChatPingPong) -> KvHandle:
        """On KV of a prompt that names the heron, kept by the first engine."""
        return lend(model, ids_of(model, HERON, 128))

    @pytest.fixture
    def other(self, model: ChatPingPong) -> tuple[int, ...]:
        """A prompt that nobody has seen."""
        text = "A lighthouse keeper counts the ships that pass at night and writes them down. " * 12
        return ids_of(model, f"Case {next(CASES)}. {text}", 140)

    def refused(self, model: ChatPingPong, handle: KvHandle, ids: tuple[int, ...], why: str) -> None:
        with pytest.raises(HandleRefused, match=why):
            on(model, kv_of(model).read(1, Request(ids), handle))

    def check_right(self, model: ChatPingPong, ids: tuple[int, ...]) -> dict[str, Any]:
        """The second engine answers what the first one has computed from nothing."""
        right, given = on(model, answer(model, 0, ids)), on(model, answer(model, 1, ids))
        assert given["ids"] == right["ids"]
        assert "heron" not in given["text"]
        return dict(given)

    def test_for_another_prompt(self, model: ChatPingPong, heron: KvHandle, other: tuple[int, ...]) -> None:
        self.refused(model, heron, other[:128], "wrong prompt")
        self.check_right(model, other)

    def test_used_twice(self, model: ChatPingPong, heron: KvHandle, other: tuple[int, ...]) -> None:
        ids = ids_of(model, HERON, 128)
        on(model, kv_of(model).read(1, Request(ids), heron))
        self.refused(model, heron, ids, "used twice")
        self.check_right(model, other)

    def test_of_another_source(self, model: ChatPingPong, heron: KvHandle, other: tuple[int, ...]) -> None:
        heron.source = 1
        self.refused(model, heron, ids_of(model, HERON, 128), "wrong source")
        self.check_right(model, other)

    def test_unknown_to_its_source(self, model: ChatPingPong, other: tuple[int, ...]) -> None:
        handle = lend(model, other[:128])
        handle.export = replace(handle.export, how={**handle.export.how, "remote_engine_id": "nobody"})
        with pytest.raises(KvLost):
            on(model, kv_of(model).read(1, Request(other[:128]), handle))
        self.check_right(model, other)

    def test_whose_blocks_hold_another_prompt_is_found_out(
        self, model: ChatPingPong, heron: KvHandle, other: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As if it was read too late: what came is not that of the prompt, and nobody is served it."""
        handle = lend(model, other[:128])
        handle.export = replace(handle.export, how=heron.export.how)
        self.refused(model, handle, other[:128], "other KV")
        with monkeypatch.context() as patch:
            patch.setattr(kv_of(model), "_sources", {})
            assert self.check_right(model, other)["cached"] == 0
        again = other[::-1]
        assert self.check_right(model, again)["pulled"] == 128

    def test_too_old(self, model: ChatPingPong, old: KvHandle, other: tuple[int, ...]) -> None:
        time.sleep(max(0.0, old.expires - time.monotonic()))
        self.refused(model, old, ids_of(model, HERON, 128), "expired")
        self.check_right(model, other)


def test_a_source_killed_in_mid_transfer(model: ChatPingPong) -> None:
    """The prompt is computed; the engine comes back, and gives KV again."""
    ids = ids_of(model, read_text("document.md") * 3)[7 : 7 + 1536]  # so long that a read of 10 ms is not at its end
    right = on(model, answer(model, 0, ids))
    pool = model._serving().pool
    port, victims = pool.engines[1].kv, processes_of(pool.engines[0])
    pull = port.pull  # type: ignore[union-attr]

    async def killed(request: Request, export: Any) -> Any:
        reading = asyncio.ensure_future(pull(request, export))
        await asyncio.sleep(0.01)
        for victim in victims:
            victim.kill()
        return await reading

    port.pull = killed  # type: ignore[union-attr, method-assign]
    try:
        given = on(model, answer(model, 1, ids))
    finally:
        port.pull = pull  # type: ignore[union-attr, method-assign]
    assert given["ids"] == right["ids"]
    assert list(kv_of(model).counts) in (["lost"], ["pulled"])  # on a busy machine the read may be over by then
    lives = pool.health.lives[0]
    model.reset_prefix_cache()  # which notices the end of the engine
    wait_until(lambda: pool.health.lives[0] > lives, 240.0, "return of the engine")
    first = on(model, answer(model, 0, ids))
    back = on(model, answer(model, 1, ids))
    assert first["ids"] == back["ids"] == right["ids"]
    assert back["pulled"] == 1536 - BLOCK


def processes_of(engine: Any) -> list[psutil.Process]:
    """The engine's own process and its workers."""
    mains = [psutil.Process(each.pid) for each in engine._llm.engine_core.resources.engine_manager.processes]
    return [each for main in mains for each in (*main.children(recursive=True), main)]
