"""The modelled engine behaves as an engine does: prefix cache, time, limits, aborts and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_pingpong import FakeEngine
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.errors import EngineDead

TOKENIZER = fake_tokenizer()


def engine(**settings: Any) -> FakeEngine:
    return FakeEngine(tokenizer=TOKENIZER, **settings)


def request(prompt: str | Sequence[int] = "Hello.", **sampling: Any) -> Request:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    return Request(tuple(ids), sampling)


async def deltas(fake: FakeEngine, asked: Request) -> list[Delta]:
    return [delta async for delta in fake.generate(asked)]


async def text(fake: FakeEngine, asked: Request) -> str:
    return "".join(delta.text for delta in await deltas(fake, asked))


class TestAnswers:
    async def test_depend_on_the_whole_prompt_and_nothing_else(self) -> None:
        first = await text(engine(), request("What lives here?"))
        assert await text(engine(device="fake:7"), request("What lives here?")) == first
        assert await text(engine(), request("What lives here!")) != first

    async def test_have_the_prompt_in_the_first_delta_and_the_reason_in_the_last(self) -> None:
        asked = request("Hello.")
        said = await deltas(engine(reply=lambda _: "abc"), asked)
        assert [delta.text for delta in said] == ["a", "b", "c"]
        assert [delta.prompt_token_ids for delta in said] == [asked.prompt_token_ids, None, None]
        assert [delta.num_cached_tokens for delta in said] == [0, None, None]
        assert [delta.finish_reason for delta in said] == [None, None, "stop"]

    async def test_may_be_empty(self) -> None:
        (only,) = await deltas(engine(reply=lambda _: ""), request())
        assert (only.text, only.token_ids, only.finish_reason) == ("", (), "stop")
        assert only.prompt_token_ids == request().prompt_token_ids

    @pytest.mark.parametrize(("limit", "said", "reason"), [(2, "ab", "length"), (3, "abc", "stop"), (9, "abc", "stop")])
    async def test_end_at_the_limit(self, limit: int, said: str, reason: str) -> None:
        answer = await deltas(engine(reply=lambda _: "abc"), request(max_tokens=limit))
        assert ("".join(delta.text for delta in answer), answer[-1].finish_reason) == (said, reason)

    @pytest.mark.parametrize(
        ("stop", "said"),
        [
            (["\nResult:"], "tide"),
            (["R", "\n"], "tide"),
            (["tide"], ""),
            (["Result: 2"], "tide\nResult: 1"),
            ([], "tide\nResult: 1"),
        ],
    )
    async def test_end_before_a_stop_text_and_show_none_of_it(self, stop: list[str], said: str) -> None:
        answer = await deltas(engine(reply=lambda _: "tide\nResult: 1"), request(stop=stop))
        shown = ""
        for delta in answer:
            shown += delta.text
            assert said.startswith(shown)
        assert (shown, answer[-1].finish_reason) == (said, "stop")

    async def test_may_be_given_as_exact_deltas(self) -> None:
        given_deltas = [Delta("x", (1, 2)), Delta("y", (3,), "stop")]
        said = await deltas(engine(reply=lambda _: given_deltas), request())
        assert [(delta.text, delta.token_ids) for delta in said] == [("x", (1, 2)), ("y", (3,))]

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.text(max_size=30).filter(lambda reply: "\ufffd" not in reply))
    def test_are_whole_and_cut_at_characters(self, reply: str) -> None:
        said = asyncio.run(deltas(engine(reply=lambda _: reply), request()))
        assert "".join(delta.text for delta in said) == reply
        assert [i for delta in said for i in delta.token_ids] == TOKENIZER.encode(reply, add_special_tokens=False)


class TestPrefixCache:
    async def hit(self, block: int, warmed: Sequence[int], asked: Sequence[int]) -> int | None:
        fake = engine(block_size=block, reply=lambda _: "a")
        await fake.prefill(request(warmed))
        return (await deltas(fake, request(asked)))[0].num_cached_tokens

    async def test_serves_whole_blocks_and_never_the_last_token(self) -> None:
        ids = list(range(200))
        assert await self.hit(16, ids[:100], ids[:160]) == 96
        assert await self.hit(16, ids[:96], ids[:96]) == 80
        assert await self.hit(16, ids[:97], ids[:97]) == 96
        assert await self.hit(16, ids[:15], ids[:160]) == 0
        assert await self.hit(32, ids[:33], [0]) == 0

    async def test_a_block_counts_only_with_all_before_it(self) -> None:
        ids = list(range(64))
        assert await self.hit(16, ids, [99, *ids[1:]]) == 0
        assert await self.hit(16, ids, [*ids[:20], 99, *ids[21:]]) == 16
        assert await self.hit(16, ids[:32], [*ids[16:32], *ids[:16], 99]) == 0

    async def test_an_answer_fills_it_too(self) -> None:
        fake = engine(block_size=4)
        ids = list(range(40))
        await deltas(fake, request(ids))
        assert await fake.prefill(request(ids)) == 36
        await fake.reset_prefix_cache()
        assert await fake.prefill(request(ids)) == 0

    async def test_is_what_a_prefill_tells(self) -> None:
        fake = engine(block_size=4)
        assert [await fake.prefill(request(range(size))) for size in (8, 17, 17)] == [0, 8, 16]


class TestTime:
    async def test_is_what_the_speeds_say(self) -> None:
        fake = engine(prefill_speed=1000.0, decode_speed=100.0, reply=lambda _: "abcde")
        await deltas(fake, request(range(40)))
        assert fake.clock_ms == pytest.approx(40 + 5 * 10)

    async def test_is_saved_by_the_prefix_cache(self) -> None:
        fake = engine(prefill_speed=1000.0, block_size=4)
        await fake.prefill(request(range(40)))
        await fake.prefill(request(range(44)))
        assert fake.clock_ms == pytest.approx(40 + 4)

    async def test_passes_at_the_given_scale(self) -> None:
        loop = asyncio.get_running_loop()
        fake = engine(prefill_speed=1000.0, time_scale=2.0)
        started = loop.time()
        await fake.prefill(request(range(50)))
        assert loop.time() - started >= 0.1


class TestAborts:
    async def test_closing_an_answer_early_aborts_it(self) -> None:
        fake, asked = engine(), request()
        async with aclosing(fake.generate(asked)) as answer:
            await anext(answer)
            assert fake.num_unfinished == 1
        assert (fake.num_unfinished, fake.aborted) == (0, [asked.request_id])

    async def test_a_finished_answer_is_not_aborted(self) -> None:
        fake = engine()
        async with aclosing(fake.generate(request())) as answer:
            async for _ in answer:
                pass
        assert (fake.num_unfinished, fake.aborted) == (0, [])

    async def test_cancelling_a_prefill_aborts_it_and_caches_nothing(self) -> None:
        fake, asked = engine(prefill_gate=asyncio.Event()), request(range(64))
        task = asyncio.create_task(fake.prefill(asked))
        await asyncio.sleep(0)
        assert fake.running == {asked.request_id}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (fake.num_unfinished, fake.aborted) == (0, [asked.request_id])
        assert fake.cached_tokens(range(64)) == 0

    async def test_an_open_gate_lets_prefills_pass(self) -> None:
        gate = asyncio.Event()
        fake = engine(prefill_gate=gate)
        task = asyncio.create_task(fake.prefill(request(range(64))))
        await asyncio.sleep(0)
        gate.set()
        assert await task == 0
        assert fake.cached_tokens(range(64)) == 48


class TestFaults:
    async def test_in_a_prefill_cache_nothing(self) -> None:
        fake = engine(fail_prefill=OSError("no blocks left"))
        with pytest.raises(OSError, match="no blocks left"):
            await fake.prefill(request(range(64)))
        assert (fake.num_unfinished, fake.cached_tokens(range(64))) == (0, 0)

    @pytest.mark.parametrize("after", [0, 2])
    async def test_in_an_answer_come_after_so_many_tokens(self, after: int) -> None:
        fake = engine(fail_generate=OSError("lost"), fail_after_tokens=after, reply=lambda _: "abcd")
        said = []
        with pytest.raises(OSError, match="lost"):
            async for delta in fake.generate(request()):
                said.append(delta.text)
        assert said == ["a", "b", "c", "d"][:after]
        assert fake.num_unfinished == 0


class TestDeath:
    @pytest.mark.parametrize("when", [0.0, 0.03])
    async def test_ends_what_runs_and_what_comes_until_a_restart(self, when: float) -> None:
        fake = engine(time_scale=1.0, prefill_speed=400.0, decode_speed=20.0, prefill_gate=asyncio.Event())
        running = [asyncio.create_task(text(fake, request())), asyncio.create_task(fake.prefill(request()))]
        await asyncio.sleep(when)
        fake.die()
        async with asyncio.timeout(0.1):
            outcomes = await asyncio.gather(*running, fake.prefill(request()), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineDead] * 3
        assert fake.num_unfinished == 0
        await fake.restart()
        fake.prefill_gate, fake.time_scale = None, 0.0
        assert await text(fake, request())
        assert fake.restarts == 1

    async def test_takes_the_cache_with_it(self) -> None:
        fake = engine()
        await fake.prefill(request(range(64)))
        fake.die()
        await fake.restart()
        assert await fake.prefill(request(range(64))) == 0

    async def test_may_be_for_good(self) -> None:
        fake = engine(fail_restart=OSError("no memory"))
        fake.die()
        with pytest.raises(OSError, match="no memory"):
            await fake.restart()
        with pytest.raises(EngineDead):
            await text(fake, request())

    async def test_ends_a_request_that_was_open_over_a_restart(self) -> None:
        fake = engine(time_scale=1.0, decode_speed=20.0)
        running = asyncio.create_task(text(fake, request()))
        await asyncio.sleep(0.03)
        await fake.restart()
        with pytest.raises(EngineDead):
            await running


def test_the_tokenizer_has_one_token_a_byte_and_words_as_pretokens() -> None:
    text = "a caf\u00e9 \N{ROCKET}"
    encoding = TOKENIZER(text)
    assert len(encoding["input_ids"]) == len(text.encode())
    assert TOKENIZER.decode(encoding["input_ids"]) == text
    assert sorted(set(encoding.word_ids())) == [0, 1, 2]


def test_the_tokenizer_has_a_chat_template_with_markers() -> None:
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(TOKENIZER.encode("<|im_end|>", add_special_tokens=False)) == 1
