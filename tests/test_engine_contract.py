"""What every engine promises: the modelled one, vLLM in this process, and vLLM's server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.engines.base import Delta, Engine, Request, new_request_id
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.engines.server_engine import ServerEngine
from langgraph_pingpong.engines.vllm_engine import VllmEngine
from langgraph_pingpong.errors import CallRefused, EngineDead
from langgraph_pingpong.tokens import ChatTemplate

T = TypeVar("T")

QUESTION = "Name three animals of a tide pool, and say in a sentence each how they live there."
LONG = "The tide comes in, and the tide goes out, and the crab waits under its stone. " * 9


@dataclass(frozen=True)
class Subject:
    """An engine on its pool's loop."""

    pool: EnginePool
    template: ChatTemplate
    samples: bool
    grows: bool
    """Whether prompts can grow there; an API of servers has no such thing."""

    @property
    def engine(self) -> Engine:
        return self.pool.engines[0]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.pool.loop.run(work)

    def request(self, text: str = QUESTION, **sampling: Any) -> Request:
        ids = self.template.prompt_ids([{"role": "user", "content": text}])
        return Request(tuple(ids), {"temperature": 0.0, "max_tokens": 12, **sampling})

    def answer(self, text: str = QUESTION, **sampling: Any) -> list[Delta]:
        return self.run(deltas(self.engine, self.request(text, **sampling)))


@pytest.fixture(
    params=[
        "fake",
        pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.timeout(600)]),
        pytest.param("server", marks=[pytest.mark.engine, pytest.mark.timeout(600)]),
    ]
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "fake":
        tokenizer = fake_tokenizer()
        with EnginePool([FakeEngine(tokenizer=tokenizer)]) as pool:
            yield Subject(pool, ChatTemplate(tokenizer), samples=False, grows=True)
        return
    model: ChatPingPong = request.getfixturevalue("real_model" if request.param == "vllm" else "server_model")
    serving = model._serving()
    model.reset_prefix_cache()
    grows = isinstance(serving.pool.engines[0], VllmEngine)
    yield Subject(serving.pool, serving.template, samples=True, grows=grows)
    assert [each.num_unfinished for each in serving.pool.engines] == [0, 0]


async def deltas(engine: Engine, asked: Request) -> list[Delta]:
    return [delta async for delta in engine.generate(asked)]


def text(said: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in said if delta.index == index)


def ids(said: list[Delta]) -> list[int]:
    return [token_id for delta in said for token_id in delta.token_ids]


def cached(said: list[Delta]) -> list[int]:
    return [delta.num_cached_tokens for delta in said if delta.num_cached_tokens is not None]


def test_says_what_it_is(subject: Subject) -> None:
    assert subject.engine.device
    assert subject.engine.block_size > 1
    assert subject.engine.max_model_len > 1000
    assert subject.engine.num_unfinished == 0


def test_the_likeliest_answer_is_always_the_same(subject: Subject) -> None:
    first, second = subject.answer(), subject.answer()
    assert text(first)
    assert (text(first), ids(first)) == (text(second), ids(second))
    assert text(subject.answer(LONG)) != text(first)


def test_the_first_delta_has_the_prompts_ids_and_no_other(subject: Subject) -> None:
    said = subject.answer()
    assert said[0].prompt_token_ids == subject.request().prompt_token_ids
    assert {delta.prompt_token_ids for delta in said[1:]} == {None}


def test_what_was_cached_is_told_once_at_the_start_or_the_end(subject: Subject) -> None:
    said = subject.answer()
    assert cached(said) == [0]
    assert cached([said[0], said[-1]]) == [0]


def test_the_last_delta_has_the_reason_and_no_other(subject: Subject) -> None:
    said = subject.answer(max_tokens=5)
    assert [delta.finish_reason for delta in said] == [*[None] * (len(said) - 1), "length"]
    assert len(ids(said)) == 5


def test_an_answer_that_is_complete_says_stop(subject: Subject) -> None:
    said = subject.answer(structured_outputs={"choice": ["yes"]}, max_tokens=400)
    assert said[-1].finish_reason == "stop"
    if subject.samples:
        assert text(said) == "yes"


def test_a_stop_text_ends_the_answer_and_is_not_shown(subject: Subject) -> None:
    whole = text(subject.answer(max_tokens=24))
    word = whole.split()[3]
    said = subject.answer(max_tokens=24, stop=[word])
    assert text(said) == whole[: whole.index(word)]
    assert (said[-1].finish_reason, said[-1].stop_reason) == ("stop", word)


def test_several_answers_have_a_last_delta_each(subject: Subject) -> None:
    said = subject.answer(n=2, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)
    assert [delta.finish_reason for delta in said if delta.finish_reason] == ["length", "length"]
    assert said[-1].finish_reason == "length"
    assert said[0].prompt_token_ids == subject.request().prompt_token_ids
    for index in range(2):
        assert len(ids([delta for delta in said if delta.index == index])) == 4
    assert (text(said, 0) != text(said, 1)) == subject.samples


def test_a_seed_makes_sampling_repeatable(subject: Subject) -> None:
    texts = [text(subject.answer(temperature=1.0, seed=seed)) for seed in (7, 7, 8)]
    assert texts[0] == texts[1]
    if subject.samples:
        assert texts[1] != texts[2]


def test_each_token_has_its_logprob(subject: Subject) -> None:
    said = subject.answer(max_tokens=3, logprobs=2)
    tokens = [token for delta in said for token in delta.logprobs]
    assert len(tokens) == len(ids(said)) == 3
    for token in tokens:
        assert token.logprob <= 0.0
        assert token.top[0] == (token.token, token.logprob)
        assert [len(token.top), token.top[0][1] >= token.top[1][1]] == [2, True]
    assert all(not token.top for delta in subject.answer(max_tokens=2, logprobs=0) for token in delta.logprobs)


def test_a_prefill_is_found_in_whole_blocks(subject: Subject) -> None:
    asked, block = subject.request(LONG), subject.engine.block_size
    size = len(asked.prompt_token_ids)
    first = block * 3 + 5
    assert first < size
    assert subject.run(subject.engine.prefill(Request(asked.prompt_token_ids[:first]))) == 0
    assert subject.run(subject.engine.prefill(asked)) == block * 3
    warm = subject.answer(LONG)
    assert cached(warm) == [(size - 1) // block * block]
    subject.run(subject.engine.reset_prefix_cache())
    cold = subject.answer(LONG)
    assert cached(cold) == [0]
    assert ids(cold) == ids(warm)


def test_prompts_grow_on_every_engine_but_servers(subject: Subject) -> None:
    async def opens() -> bool:
        if (appends := subject.engine.open_appends()) is None:
            return False
        await appends.close()
        return True

    assert subject.run(opens()) is subject.grows


def test_a_prompt_that_grows_is_found_by_its_answer(subject: Subject) -> None:
    asked, block = subject.request(LONG), subject.engine.block_size
    prompt = asked.prompt_token_ids
    cold = subject.answer(LONG)
    subject.run(subject.engine.reset_prefix_cache())

    async def grow() -> list[int | None]:
        if (appends := subject.engine.open_appends()) is None:
            return [await subject.engine.prefill(Request(prompt[: count * block])) for count in (2, 3, 4)]
        found = []
        for count in (2, 3, 4):
            found.append(await appends.append(prompt[appends.tokens : count * block]))
            assert appends.tokens == count * block
        assert subject.engine.num_unfinished == 0
        await appends.close()
        await appends.close()
        assert await appends.append(prompt[4 * block : 5 * block]) is None
        return found

    found = subject.run(grow())
    assert found[0] == 0
    assert found[1:] in ([2 * block, 3 * block], [block, 2 * block])  # vLLM finds a whole prompt but for its last token
    warm = subject.answer(LONG)
    assert cached(warm) == [4 * block]
    assert ids(warm) == ids(cold)


def test_prompts_that_grow_side_by_side_do_not_mix(subject: Subject) -> None:
    texts = [f"{number} {LONG}" for number in range(3)]
    prompts = [subject.request(text).prompt_token_ids for text in texts]
    cold, block = [ids(subject.answer(text)) for text in texts], subject.engine.block_size
    subject.run(subject.engine.reset_prefix_cache())

    async def grow() -> None:
        opened = [subject.engine.open_appends(), subject.engine.open_appends(), subject.engine.open_appends()]
        for count in (1, 2, 4):
            for appends, prompt in zip(opened, prompts, strict=True):
                if appends is not None:
                    assert await appends.append(prompt[appends.tokens : count * block]) is not None
        for appends in opened:
            if appends is not None:
                await appends.close()

    subject.run(grow())
    warm = [subject.answer(text) for text in texts]
    assert [ids(said) for said in warm] == cold
    if subject.grows:
        assert [cached(said) for said in warm] == [[4 * block]] * 3


def test_a_prompt_that_grows_is_closed_by_a_cancelled_append(subject: Subject) -> None:
    prompt, block = subject.request(LONG * 4).prompt_token_ids, subject.engine.block_size

    async def cancel() -> int | None:
        if (appends := subject.engine.open_appends()) is None:
            return None
        await appends.append(prompt[: 2 * block])
        task = asyncio.create_task(appends.append(prompt[2 * block : 30 * block]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await appends.close()
        assert task.cancelled()
        return await appends.append(prompt[2 * block : 3 * block])

    assert subject.run(cancel()) is None
    assert subject.engine.num_unfinished == 0
    assert text(subject.answer())


def test_a_prompt_that_grows_too_long_is_refused(subject: Subject) -> None:
    async def grow() -> None:
        appends = subject.engine.open_appends()
        if appends is None:
            raise CallRefused("it cannot grow at all")
        try:
            await appends.append([7] * (subject.engine.max_model_len + 1))
        finally:
            await appends.close()

    with pytest.raises(CallRefused):
        subject.run(grow())
    assert subject.engine.num_unfinished == 0


def test_prompts_with_another_salt_share_no_cache(subject: Subject) -> None:
    asked = subject.request(LONG)
    salted, other = replace(asked, cache_salt="one"), replace(asked, cache_salt="two")
    assert [subject.run(subject.engine.prefill(each)) for each in (asked, salted, other)] == [0, 0, 0]
    block = subject.engine.block_size
    whole = (len(asked.prompt_token_ids) - 1) // block * block
    again = [replace(each, request_id=new_request_id()) for each in (asked, salted)]
    assert [cached(subject.run(deltas(subject.engine, each))) for each in again] == [[whole], [whole]]


def test_an_answer_that_is_left_is_aborted(subject: Subject) -> None:
    async def leave() -> int:
        async with aclosing(subject.engine.generate(subject.request(max_tokens=500))) as answer:
            await anext(answer)
            return subject.engine.num_unfinished

    expected = text(subject.answer())
    assert subject.run(leave()) == 1
    assert subject.engine.num_unfinished == 0
    assert text(subject.answer()) == expected


def test_a_prefill_that_is_cancelled_is_aborted(subject: Subject) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(subject.engine.prefill(subject.request(LONG * 4)))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    subject.run(cancel())
    assert subject.engine.num_unfinished == 0
    assert text(subject.answer())


def test_requests_run_side_by_side(subject: Subject) -> None:
    questions = [f"Count to {number}." for number in (3, 5, 7)]

    async def together() -> list[list[Delta]]:
        return await asyncio.gather(*(deltas(subject.engine, subject.request(each)) for each in questions))

    assert [text(said) for said in subject.run(together())] == [text(subject.answer(each)) for each in questions]
    assert subject.engine.num_unfinished == 0


def test_a_prompt_that_is_too_long_is_refused(subject: Subject) -> None:
    too_long = Request(subject.request().prompt_token_ids[:1] * (subject.engine.max_model_len + 1), {"max_tokens": 1})
    with pytest.raises(CallRefused):
        subject.run(deltas(subject.engine, too_long))
    with pytest.raises(CallRefused):
        subject.run(subject.engine.prefill(too_long))
    assert subject.engine.num_unfinished == 0
    assert text(subject.answer())


def test_a_restart_keeps_no_request_hanging_and_serves_again(subject: Subject) -> None:
    """Open requests fail, or go on where the engine is a server; what was true of the engine stays true."""
    engine = subject.engine
    expected, known = text(subject.answer()), (engine.device, engine.block_size, engine.max_model_len)

    async def restart() -> list[Delta] | BaseException:
        async def ask() -> list[Delta]:
            async with asyncio.timeout(120):
                return await deltas(engine, subject.request(max_tokens=100, ignore_eos=True))

        open_request = asyncio.create_task(ask())
        await asyncio.sleep(0)
        await engine.restart()
        (outcome,) = await asyncio.gather(open_request, return_exceptions=True)
        return outcome

    outcome = subject.run(restart())
    assert isinstance(outcome, EngineDead) or outcome[-1].finish_reason is not None
    assert (engine.device, engine.block_size, engine.max_model_len) == known
    assert engine.num_unfinished == 0
    assert text(subject.answer()) == expected


@pytest.fixture
def spare(subject: Subject) -> Engine:
    """Another engine of the kind, which may be stopped."""
    engine = subject.engine
    if isinstance(engine, FakeEngine):
        return FakeEngine(tokenizer=engine.tokenizer)
    if isinstance(engine, VllmEngine):
        return VllmEngine(engine._config, engine._device)  # to start it on these cores takes a minute
    assert isinstance(engine, ServerEngine)
    other = ServerEngine(engine._config, engine._address)
    subject.run(other.start())
    return other


def test_stopping_twice_is_safe_and_ends_the_service(subject: Subject, spare: Engine) -> None:
    subject.run(spare.stop())
    subject.run(spare.stop())
    with pytest.raises(EngineDead):
        subject.run(deltas(spare, subject.request()))
    with pytest.raises(EngineDead):
        subject.run(spare.prefill(subject.request()))
    if subject.grows:
        with pytest.raises(EngineDead):
            spare.open_appends()
