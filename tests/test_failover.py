"""Engines that die at any moment: the run finishes elsewhere, with the same prompts and the same text."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from langgraph.types import RetryPolicy

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine, health
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.errors import (
    CallRefused,
    CallTimedOut,
    EngineDead,
    EngineError,
    EngineStartFailed,
    ServerFailed,
)
from langgraph_pingpong.trace import Event
from tests.conftest import ASSISTANT, Lab, byte_tokenizer, going_on, pseudo_words, wait_until
from tests.test_token_families import qwen_3

if TYPE_CHECKING:
    from tests.conftest import Recorder

TASK = {"task": "Say what a tide pool is."}
Kill = Callable[[Event], None]


def engines_of(lab: Lab, count: int = 2, reply: Any = None, **settings: Any) -> list[FakeEngine]:
    return [lab.engine(f"fake:{index}", reply=reply or going_on(), **settings) for index in range(count)]


def started(
    lab: Lab, count: int = 2, reply: Any = None, speed: Mapping[str, Any] | None = None, **of_model: Any
) -> Any:
    """A model whose engines run, and its recorder."""
    model = lab.model(engines_of(lab, count, reply, **(speed or {})), **of_model).start()
    return model, lab.record(model)


def on(model: ChatPingPong, name: str, node: str, act: Callable[[], None], count: int = 1) -> None:
    """Act when an event comes for the `count`-th time, at that moment, on the pool's own thread."""
    left = [count]

    def sink(event: Event) -> None:
        if (event.name, event.node) == (name, node):
            left[0] -= 1
            if left[0] == 0:
                act()

    model.trace.subscribe(sink)


def baseline(nodes: Sequence[str] = ("writer", "critic")) -> dict[str, Any]:
    lab = Lab()
    return lab.chain(lab.model(engines_of(lab, time_scale=0.0), overlap="off"), nodes).invoke(TASK)


def back(record: Recorder, device: str) -> None:
    wait_until(lambda: device in [event.device for event in record.named("engine.restarted")], 3, f"return of {device}")


MOMENTS: dict[str, tuple[int, str, str, int]] = {
    "idle before the run": (0, "", "", 0),
    "the other one, idle before the run": (1, "", "", 0),
    "while the first node's prompt is computed": (0, "generate.started", "writer", 1),
    "at the first node's first token": (0, "first_token", "writer", 1),
    "while the edge's first append is computed": (1, "append.started", "critic", 1),
    "between two appends": (1, "append.complete", "critic", 1),
    "after the last append": (1, "finish", "writer", 1),
    "when the edge is claimed": (1, "finalize", "critic", 1),
    "while the second node's prompt is computed": (1, "generate.started", "critic", 1),
    "at the second node's first token": (1, "first_token", "critic", 1),
    "the first one, when it is done": (0, "generate.started", "critic", 1),
}
"""Which engine dies, and at which event."""


WITH_EDGES_ONLY = ("append.started", "append.complete", "finalize")


@pytest.mark.parametrize(
    ("moment", "overlap"),
    [
        (each, mode)
        for each in MOMENTS
        for mode in ("on", "off")
        if mode == "on" or MOMENTS[each][1] not in WITH_EDGES_ONLY
    ],
)
def test_a_run_is_the_same_whenever_an_engine_dies(lab: Lab, moment: str, overlap: str) -> None:
    index, name, node, count = MOMENTS[moment]
    expected = baseline()
    model, record = started(lab, overlap=overlap)
    if name:
        on(model, name, node, lab.engines[index].die, count)
    else:
        lab.engines[index].die()
    began = time.monotonic()
    assert lab.chain(model).invoke(TASK) == expected
    assert time.monotonic() - began < 3
    certificates = [record.certificate(each) for each in ("writer", "critic")]
    assert all(each["ids_equal"] for each in certificates)
    assert [each["output_tokens"] for each in certificates] == [len(expected["writer"]), len(expected["critic"])]
    if record.named("engine.died"):
        back(record, f"fake:{index}")
    assert lab.chain(model).invoke(TASK) == expected
    assert model.pool._placement.up() == [0, 1]


def test_prompts_are_those_of_a_run_without_a_death(lab: Lab) -> None:
    model, _ = started(lab)
    lab.chain(model).invoke(TASK)
    undisturbed = [set(lab.prompts(node)) for node in ("writer", "critic")]
    model, _ = started(lab)
    on(model, "generate.started", "writer", lab.engines[0].die)
    on(model, "generate.started", "critic", lab.engines[1].die)
    lab.chain(model).invoke(TASK)
    assert [set(lab.prompts(node)) for node in ("writer", "critic")] == undisturbed


class TestInMidAnswer:
    def test_what_was_said_stays_and_is_said_once(self, lab: Lab) -> None:
        model, record = started(lab, speed={"decode_speed": 200.0})
        pieces = []
        for number, chunk in enumerate(model.stream("Tell me.")):
            pieces.append(chunk)
            if number == 20:
                lab.engines[0].die()
        whole = baseline_answer(lab)
        message = sum(pieces[1:], pieces[0])
        assert message.text == whole
        (event,) = record.named("failover")
        assert (event.data["left"], event.device) == ("fake:0", "fake:1")
        assert 20 < event.data["said"] < len(whole)
        first, rest = lab.engines[0].requests[-1], lab.engines[1].requests[-1]
        said = tuple(byte_tokenizer().encode(whole))[: event.data["said"]]
        assert rest.prompt_token_ids == first.prompt_token_ids + said
        assert rest.sampling["max_tokens"] == first.sampling["max_tokens"] - len(said)
        assert rest.request_id != first.request_id
        assert message.usage_metadata["input_tokens"] == len(first.prompt_token_ids)
        assert message.usage_metadata["output_tokens"] == len(whole)
        certificate = message.response_metadata["pingpong"]
        assert (certificate["device"], certificate["ids_equal"]) == ("fake:1", True)
        assert certificate["fallback"] == "fake:0: The engine on fake:0 died."

    def test_before_anything_was_said_the_very_same_request_goes_elsewhere(self, lab: Lab) -> None:
        model, record = started(lab, speed={"prefill_speed": 1000.0})
        on(model, "generate.started", "writer", lab.engines[0].die)
        lab.chain(model, ("writer",)).invoke(TASK)
        (first,), (second,) = (engine.requests for engine in lab.engines)
        assert (second.prompt_token_ids, second.sampling) == (first.prompt_token_ids, first.sampling)
        assert second.request_id != first.request_id
        assert record.named("failover")[0].data["said"] == 0

    def test_the_limit_holds_for_the_whole(self, lab: Lab) -> None:
        model, _ = started(lab, max_tokens=30)
        on(model, "first_token", "writer", lab.engines[0].die)
        result = lab.chain(model, ("writer",)).invoke(TASK)
        assert len(result["writer"]) == 30

    @pytest.mark.parametrize("after", [3, 5, 8, 12, 14])
    def test_a_stop_text_that_was_half_said_still_ends_the_answer(self, lab: Lab, after: int) -> None:
        reply = going_on(lambda prompt: "The tide\nResult: nothing")
        model, record = started(lab, reply=reply, speed={"kind": DiesOnce})
        lab.engines[0].dies_after = after
        message = model.invoke("Tell me.", stop=["\nResult:"])
        assert message.text == "The tide"
        assert message.response_metadata["finish_reason"] == "stop"
        assert record.named("failover")[0].data["said"] == max(0, after - len("Result:"))
        assert message.usage_metadata["output_tokens"] == len("The tide\nResult:")

    @pytest.mark.parametrize("stop", ["\nResult:", "\nObservation:", "\n\n"])
    @pytest.mark.parametrize("after", range(5, 20, 2))
    def test_text_that_ends_within_a_token_is_said_once(self, lab: Lab, after: int, stop: str) -> None:
        """Text that may become a stop string is held back by characters, not by tokens."""
        text = "The bakery oven heats slowly, so the bread is underbaked while the crust is already rather dark."
        reply = going_on(lambda prompt: text)
        model, record = started(lab, reply=reply, speed={"kind": DiesOnce, "tokenizer": qwen_3()})
        lab.engines[0].dies_after = after
        assert "".join(chunk.text for chunk in model.stream("Tell me.", stop=[stop])) == text
        assert record.named("failover")

    def test_what_goes_on_otherwise_is_one_clear_error(self, lab: Lab) -> None:
        replies = iter(["The bakery oven heats slowly, so it is.", "other words, and so on."])
        speed = {"kind": DiesOnce, "tokenizer": qwen_3()}
        model, _ = started(lab, reply=lambda prompt: next(replies), speed=speed)
        lab.engines[0].dies_after = 6
        with pytest.raises(EngineError, match=r"fake:0 died.* fake:1 goes on with another one"):
            model.invoke("Tell me.", stop=["\nObservation:"])

    @pytest.mark.parametrize("overlap", ["on", "off"])
    @pytest.mark.parametrize("said", ["", "The oven "])
    def test_an_answer_that_was_given_up_is_not_complete(self, lab: Lab, said: str, overlap: str) -> None:
        """An engine that is told to end, or paused, ends its answers with the finish reason `abort`."""
        whole = "The oven is hot at six."
        cut = [
            Delta(said, tuple(byte_tokenizer().encode(said, add_special_tokens=False))),
            Delta(finish_reason="abort"),
        ]
        other = lab.engine("fake:1", reply=going_on(lambda prompt: whole))
        model = lab.model([lab.engine("fake:0", reply=lambda prompt: cut), other], overlap=overlap)
        record = lab.record(model)
        assert lab.chain(model, ("writer",)).invoke(TASK)["writer"] == whole
        assert [event.data["said"] for event in record.named("failover")] == [len(said)]

    @pytest.mark.parametrize("after", range(1, 8))
    def test_an_unfinished_character_is_said_whole(self, lab: Lab, after: int) -> None:
        model, _ = started(lab, reply=going_on(lambda prompt: "é潮🐚"), speed={"kind": DiesOnce})
        lab.engines[0].dies_after = after
        pieces = [chunk.text for chunk in model.stream("Tell me.")]
        assert "".join(pieces) == "é潮🐚"
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)

    def test_each_token_keeps_its_logprob(self, lab: Lab) -> None:
        model, _ = started(lab, speed={"kind": DiesOnce})
        lab.engines[0].dies_after = 10
        message = model.invoke("Tell me.", logprobs=True)
        tokens = message.response_metadata["logprobs"]["content"]
        assert "".join(each["token"] for each in tokens) == message.text

    @pytest.mark.parametrize(
        ("sampling", "why"),
        [
            ({"n": 2}, "one of several"),
            ({"presence_penalty": 0.5}, "presence_penalty depends on how far"),
            ({"min_tokens": 5}, "min_tokens"),
            ({"structured_outputs": {"regex": ".*"}}, "structured_outputs"),
            ({"stop": ["never said"], "logprobs": True}, "logprobs of more tokens"),
        ],
    )
    def test_what_depends_on_the_whole_answer_is_one_clear_error(self, lab: Lab, sampling: Any, why: str) -> None:
        model, record = started(lab, speed={"kind": DiesOnce})
        lab.engines[0].dies_after = 12
        with pytest.raises(EngineDead, match=f"fake:0 died. The answer had begun, and no other engine .* {why}"):
            model.invoke("Tell me.", **sampling)
        assert not lab.engines[1].requests
        back(record, "fake:0")

    @pytest.mark.parametrize("sampling", [{"seed": 3, "temperature": 0.7}, {"presence_penalty": 0.0}, {"n": 1}])
    def test_what_depends_on_the_ids_alone_goes_on(self, lab: Lab, sampling: Any) -> None:
        model, _ = started(lab, speed={"kind": DiesOnce})
        lab.engines[0].dies_after = 12
        assert model.invoke("Tell me.", **sampling).text == baseline_answer(lab)

    def test_text_whose_ids_do_not_make_it_is_not_gone_on_with(self, lab: Lab) -> None:
        said = [Delta(text, (token_id,)) for text, token_id in (("a", 65), ("zz", 66), ("c", 67), ("d", 68))]
        model, _ = started(lab, reply=lambda prompt: said, speed={"kind": DiesOnce})
        lab.engines[0].dies_after = 3
        with pytest.raises(EngineDead, match="ids of what was said are not known"):
            model.invoke("Tell me.")

    def test_a_node_with_a_retry_policy_is_run_again_then(self, lab: Lab) -> None:
        model, _ = started(lab, speed={"kind": DiesOnce})
        lab.engines[0].dies_after = 12
        retry = RetryPolicy(max_attempts=2, initial_interval=0.01, jitter=False, retry_on=EngineError)
        graph = lab.chain(model.bind(min_tokens=1), add={"writer": {"retry_policy": retry}})
        assert graph.invoke(TASK) == baseline()


@dataclass(eq=False)
class DiesOnce(FakeEngine):
    """Dies in its first answer, `dies_after` so many tokens."""

    dies_after: int | None = None

    async def generate(self, request: Request) -> Any:
        said = 0
        async for delta in super().generate(request):
            yield delta
            said += len(delta.token_ids)
            if self.dies_after is not None and said >= self.dies_after:
                self.dies_after = None
                self.die()


def baseline_answer(lab: Lab) -> str:
    prompt = lab.engines[0].tokenizer.decode(list(lab.engines[0].requests[0].prompt_token_ids))
    return pseudo_words(prompt.removesuffix(ASSISTANT))[:56]


class TestEdges:
    def test_on_a_device_that_failed_are_not_claimed(self, lab: Lab) -> None:
        expected = baseline()
        model, record = started(lab)
        lab.engines[1].fail_restart = OSError("no such process")
        on(model, "append.started", "critic", lab.engines[1].die, 2)
        assert lab.chain(model).invoke(TASK) == expected
        certificate = record.certificate("critic")
        assert certificate["device"] == "fake:0"
        assert certificate["static"] == certificate["streamed"] == 0
        assert certificate["wasted"] > 0
        assert certificate["fallback"] == "EngineDead: The engine on fake:1 died.\n" + EngineDead.hint
        assert not lab.engines[1].requests
        assert repr(model.pool) == "<EnginePool fake:0=0 fake:1=0(down)>"
        model.pool.close()

    def test_on_a_device_that_is_back_already_are_not_either(self, lab: Lab) -> None:
        """What was prefilled there is lost."""
        expected = baseline()
        model, record = started(lab)

        def die_and_come_back() -> None:
            lab.engines[1].die()
            model.pool.health.failed(1, EngineDead("The engine on fake:1 died."))

        on(model, "append.complete", "critic", die_and_come_back, 2)
        assert lab.chain(model).invoke(TASK) == expected
        back(record, "fake:1")
        certificate = record.certificate("critic")
        assert certificate["static"] == certificate["streamed"] == 0
        assert certificate["fallback"]

    def test_are_not_opened_on_one(self, lab: Lab) -> None:
        model, record = started(lab)
        lab.engines[1].fail_restart = OSError("no such process")
        lab.engines[1].die()
        for _ in range(2):
            assert lab.chain(model).invoke(TASK) == baseline()
        assert len(record.named("append.started")) == 1
        assert record.named("edge.quiet", "critic")
        model.pool.close()

    def test_are_opened_on_a_third_device_then(self, lab: Lab) -> None:
        model, record = started(lab, 3)
        lab.engines[1].fail_restart = OSError("no such process")
        lab.engines[1].die()
        graph = lab.chain(model)
        for _ in range(2):
            assert graph.invoke(TASK) == baseline()
        assert record.certificate("critic")["device"] == "fake:2"
        assert record.certificate("critic")["streamed"] > 0
        model.pool.close()


class TestAllDead:
    def test_is_one_error_with_every_cause(self, lab: Lab) -> None:
        model, record = started(lab, 3)
        for engine in lab.engines:
            engine.die()
        began = time.monotonic()
        with pytest.raises(EngineDead) as caught:
            lab.chain(model).invoke(TASK)
        assert time.monotonic() - began < 1
        said = str(caught.value)
        assert [said.count(f"The engine on fake:{index} died.") for index in range(3)] == [1, 1, 1]
        assert said.count(EngineDead.hint) == 1
        for index in range(3):
            back(record, f"fake:{index}")
        assert lab.chain(model).invoke(TASK) == baseline()

    def test_is_said_at_once_while_nothing_comes_back(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        model, _ = started(lab)
        for engine in lab.engines:
            engine.die()
            engine.fail_restart = OSError("no memory")
        for _ in range(2):
            with pytest.raises(EngineDead, match=r"No engine is left for this call. fake:0: .* died. fake:1: .* died."):
                model.invoke("Hello.")
        assert repr(model.pool) == "<EnginePool fake:0=0(down) fake:1=0(down)>"
        model.pool.close()

    def test_of_one_engine_is_its_own_error(self, lab: Lab) -> None:
        model, record = started(lab, 1)
        lab.engines[0].die()
        with pytest.raises(EngineDead, match=r"^The engine on fake:0 died.\n"):
            model.invoke("Hello.")
        back(record, "fake:0")
        assert model.invoke("Hello.").text

    def test_is_not_brought_about_by_one_prompt(self, lab: Lab) -> None:
        model, _ = started(lab, 5)
        for engine in lab.engines:
            engine.fail_generate = EngineDead(f"The engine on {engine.device} died.")
        with pytest.raises(EngineDead):
            model.invoke("Deadly.")
        assert sum(len(engine.requests) for engine in lab.engines) == 3


class TestOtherErrors:
    @pytest.mark.parametrize("error", [CallRefused("no"), OSError("odd"), RuntimeError("lost")])
    def test_are_not_tried_elsewhere(self, lab: Lab, error: Exception) -> None:
        model, record = started(lab)
        lab.engines[0].fail_generate = error
        with pytest.raises(type(error), match=str(error.args[0])):
            model.invoke("Hello.")
        assert not lab.engines[1].requests
        assert not record.named("engine.died")

    def test_a_call_that_took_too_long_is_not_either(self, lab: Lab) -> None:
        model, record = started(lab, timeout=0.2, speed={"decode_speed": 10.0})
        with pytest.raises(CallTimedOut):
            model.invoke("Hello.")
        assert not lab.engines[1].requests
        assert not record.named("engine.died")

    def test_closing_the_pool_is_no_death(self, lab: Lab) -> None:
        model, record = started(lab, speed={"decode_speed": 10.0})
        on(model, "first_token", "", lambda: threading.Thread(target=model.pool.close).start())
        with pytest.raises(EngineDead, match="closed while"):
            model.invoke("Hello.")
        assert not record.named("engine.died")


class TestManyRuns:
    def test_all_finish_when_an_engine_dies_under_them(self, lab: Lab) -> None:
        model, record = started(lab)
        on(model, "finish", "writer", lab.engines[1].die, 4)
        tasks = [{"task": f"Number {number}: say what a tide pool is."} for number in range(12)]
        with ThreadPoolExecutor(12) as threads:
            results = list(threads.map(lab.chain(model).invoke, tasks))
        plain = lab.chain(type(lab)().model(engines_of(lab, time_scale=0.0), overlap="off"))
        assert results == [plain.invoke(task) for task in tasks]
        assert len(record.named("engine.died")) == 1
        back(record, "fake:1")

    def test_those_on_the_other_engine_notice_nothing(self, lab: Lab) -> None:
        model, record = started(lab, speed={"decode_speed": 100.0})

        async def both() -> tuple[Any, Any]:
            one = asyncio.create_task(model.ainvoke("First."))
            other = asyncio.create_task(model.ainvoke("Second."))
            await asyncio.sleep(0.2)
            lab.engines[0].die()
            return await one, await other

        answers = asyncio.run(both())
        fallbacks = [answer.response_metadata["pingpong"]["fallback"] for answer in answers]
        assert sorted(fallback is None for fallback in fallbacks) == [False, True]
        back(record, "fake:0")


class TestRestarts:
    @pytest.fixture(autouse=True)
    def short_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health, "FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(health, "MAX_PAUSE_S", 0.02)

    def dead(self, lab: Lab, cause: Exception) -> tuple[ChatPingPong, Recorder]:
        model, record = started(lab)
        lab.engines[0].fail_restart = cause
        lab.engines[0].die()
        assert model.invoke("Hello.").text
        return model, record

    def test_that_fail_are_given_up_after_a_few_tries_with_one_warning(
        self, lab: Lab, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, record = self.dead(lab, OSError("no memory"))
        gave_up = record.wait_for("engine.gave_up")
        assert (gave_up.device, gave_up.data["error"]) == ("fake:0", "OSError: no memory")
        assert lab.engines[0].restarts == health.MAX_TRIES
        (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert "fake:0" in warning.getMessage() and "no memory" in warning.getMessage()
        assert repr(model.pool) == "<EnginePool fake:0=0(down) fake:1=0>"
        assert model.invoke("Hello.").response_metadata["pingpong"]["device"] == "fake:1"

    @pytest.mark.parametrize("count", [1, 2])
    def test_that_fail_are_the_cause_that_later_calls_tell(self, lab: Lab, count: int) -> None:
        """Not that the engine once died, and is started again."""
        model, record = started(lab, count)
        for engine in lab.engines:
            engine.fail_restart = EngineStartFailed("CUDA out of memory")
            engine.die()
        with pytest.raises(EngineDead, match="died"):
            model.invoke("Hello.")
        wait_until(lambda: len(record.named("engine.gave_up")) == count, 5, "end of the restarts")
        with pytest.raises(EngineDead) as caught:
            model.invoke("Hello.")
        said = str(caught.value)
        for engine in lab.engines:
            why = f"The engine on {engine.device} is out of use: 3 restarts failed. CUDA out of memory"
            assert said.count(why) == 1
        assert "died." not in said
        model.pool.close()

    def test_of_a_server_are_tried_for_as_long_as_it_takes(self, lab: Lab) -> None:
        _, record = self.dead(lab, ServerFailed("draining"))
        wait_until(lambda: lab.engines[0].restarts > 3 * health.MAX_TRIES, 3, "many tries")
        lab.engines[0].fail_restart = None
        back(record, "fake:0")
        assert not record.named("engine.gave_up")

    def test_end_with_the_pool(self, lab: Lab) -> None:
        model, _ = self.dead(lab, ServerFailed("draining"))
        model.pool.close()
        tries = lab.engines[0].restarts
        time.sleep(0.1)
        assert lab.engines[0].restarts == tries

    def test_do_not_keep_others_waiting(self, lab: Lab) -> None:
        model, record = started(lab, speed={"kind": SlowRestart})
        lab.engines[0].die()
        began = time.monotonic()
        assert lab.chain(model).invoke(TASK) == baseline()
        assert time.monotonic() - began < 1
        assert not record.named("engine.restarted")
        back(record, "fake:0")

    def test_are_told_to_every_model_on_the_pool(self, lab: Lab) -> None:
        model, _ = started(lab)
        other = ChatPingPong(pool=model.pool)
        others = lab.record(other)
        other.invoke("Hello.")
        lab.engines[0].die()
        model.invoke("Hello, you.")
        back(others, "fake:0")
        (died,) = others.named("engine.died")
        assert (died.device, died.data) == ("fake:0", {"error": "The engine on fake:0 died."})

    def test_forget_what_was_cached(self, lab: Lab) -> None:
        model, record = started(lab, 1)
        model.invoke("Hello.")
        lab.engines[0].die()
        with pytest.raises(EngineDead):
            model.invoke("Hello.")
        back(record, "fake:0")
        ids = lab.engines[0].requests[0].prompt_token_ids
        assert model.pool._placement.held_tokens(ids, None) == [0]
        assert model.invoke("Hello.").usage_metadata["input_token_details"]["cache_read"] == 0


@dataclass(eq=False)
class SlowRestart(FakeEngine):
    """Takes a second to come back."""

    async def restart(self) -> None:
        await asyncio.sleep(1)
        await super().restart()


def test_resetting_the_cache_leaves_out_what_is_down(lab: Lab) -> None:
    model, record = started(lab)

    async def gone() -> None:
        raise EngineDead("The engine on fake:0 died.")

    lab.engines[0].reset_prefix_cache = gone
    model.reset_prefix_cache()
    assert record.named("engine.died") == []  # nobody has called yet, so nobody is told
    wait_until(lambda: lab.engines[0].restarts == 1, 2, "restart")
    assert isinstance(model.pool, EnginePool)
    assert model.invoke("Hello.").text
