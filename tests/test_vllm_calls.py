"""What a call asks of vLLM is checked before it is sent, and what vLLM says against it is one clear error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams, exceptions
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from langgraph_pingpong.config import EngineConfig, parse_devices
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.engines.vllm_calls import sampling_params
from langgraph_pingpong.engines.vllm_engine import VllmEngine
from langgraph_pingpong.errors import CallRefused, EngineBusy, EngineDead, EngineError


class Failing:
    """Of vLLM's engine what a request sees, where each fails."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy="priority"))

    def __init__(self, error: Exception, errored: bool = False) -> None:
        self.error, self.errored, self.sent = error, errored, 0

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.sent += 1
        if self.sent:
            raise self.error
        yield


def engine_on(llm: Failing) -> VllmEngine:
    devices = parse_devices(["cpu:0"])
    engine = VllmEngine(EngineConfig("model", devices), devices[0])
    engine._llm = llm  # type: ignore[assignment]
    return engine


async def answer(engine: VllmEngine, **sampling: Any) -> None:
    async with aclosing(engine.generate(Request((1, 2), {"max_tokens": 4, **sampling}))) as deltas:
        async for _ in deltas:
            pass


WRONG = {
    "temperature": "0.5",
    "min_tokens": "3",
    "seed": "1",
    "top_k": 1.5,
    "ignore_eos": "yes",
    "skip_special_tokens": 0,
    "presence_penalty": True,
    "stop_token_ids": ["7"],
    "bad_words": 5,
    "structured_outputs": {"shape": "round"},
}


@pytest.mark.parametrize("name", WRONG)
async def test_arguments_of_the_wrong_type_are_refused_and_not_sent(name: str) -> None:
    llm = Failing(AssertionError("it was sent"))
    with pytest.raises(CallRefused, match="vLLM refused the call: ") as error:
        await answer(engine_on(llm), **{name: WRONG[name]})
    assert (llm.sent, error.value.__cause__ is not None) == (0, True)


async def test_a_number_that_no_message_can_hold_is_refused() -> None:
    with pytest.raises(CallRefused, match="ints"):
        await answer(engine_on(Failing(AssertionError("it was sent"))), seed=2**70)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1, "top_p": 0.5, "top_k": 5, "min_p": 0, "seed": -5, "n": 2, "logprobs": 3},
        {"stop": ["x"], "stop_token_ids": [7], "bad_words": ["y"], "logit_bias": {5: -100}, "min_tokens": 2},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
)
def test_arguments_that_vllm_takes_stay_as_they_are(sampling: dict[str, Any]) -> None:
    params = sampling_params(sampling)
    constraint = sampling.get("structured_outputs")
    kept = {name: value for name, value in sampling.items() if name != "structured_outputs"}
    assert {name: getattr(params, name) for name in kept} == {**kept}
    assert isinstance(params, SamplingParams)
    assert (params.structured_outputs is None) == (constraint is None)


def from_vllm(cause: BaseException) -> EngineGenerateError:
    """As vLLM wraps what it did not expect: without a word of its own."""
    error = EngineGenerateError()
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (from_vllm(TypeError("'<' not supported")), CallRefused, "vLLM refused the call: '<' not supported"),
        (from_vllm(ValueError("out of vocabulary")), CallRefused, "vLLM refused the call: out of vocabulary"),
        (from_vllm(KeyError("lora")), EngineError, "engine on cpu:0 failed at the call: KeyError: 'lora'"),
        (EngineGenerateError("no cause"), EngineError, "EngineGenerateError: no cause"),
        (ValueError("too long"), CallRefused, "vLLM refused the call: too long"),
        (EngineDeadError(), EngineDead, "The engine on cpu:0 died"),
    ],
)
async def test_errors_of_vllm_say_why(error: Exception, kind: type[Exception], match: str) -> None:
    engine = engine_on(Failing(error))
    for work in (answer(engine), engine.prefill(Request((1, 2)))):
        with pytest.raises(kind, match=match) as raised:
            await work
        assert type(raised.value) is kind
    assert engine.num_unfinished == 0


async def test_an_engine_that_ended_is_dead_whatever_the_error() -> None:
    with pytest.raises(EngineDead):
        await answer(engine_on(Failing(from_vllm(TypeError("closed")), errored=True)))


@pytest.mark.parametrize("name", ["QueueOverflowError", "MaxQueuedTokensError"])
async def test_an_engine_with_too_much_to_do_says_so(name: str) -> None:
    if (kind := getattr(exceptions, name, None)) is None:
        pytest.skip("this release of vLLM has no such bound")
    with pytest.raises(EngineBusy, match=r"cpu:0 takes no more requests: The engine .*\n.*max_num_queued_reqs"):
        await answer(engine_on(Failing(kind())))
