"""`exact`: what it asks of engines, what contradicts it, and that answers are equal to the bit on real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from graphs.briefs import read_text
from graphs.five_agents import CHAIN, build
from langgraph_pingpong import ChatPingPong, exact
from langgraph_pingpong.bench.exact import _Answers
from langgraph_pingpong.config import EngineConfig, cores_for, parse_devices, usable_cores
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.engines.server_processes import server_command
from langgraph_pingpong.engines.vllm_setup import engine_environment
from langgraph_pingpong.errors import NotExact, SettingOfServers
from langgraph_pingpong.pool import EnginePool
from tests.engines_fixture import DEVICES

CPU = ("cpu:0", "cpu:1")
CUDA = ("cuda:0", "cuda:1")


def config(devices: tuple[str, ...] = CPU, **settings: Any) -> EngineConfig:
    return EngineConfig("m", parse_devices(devices), **{"exact": "bits", **settings})


class TestEngineArguments:
    def test_one_block_is_one_step_and_one_request_runs(self) -> None:
        args = config().vllm_args
        assert args["block_size"] == args["max_num_batched_tokens"] == exact.CHUNK
        assert args["max_num_seqs"] == 1
        assert args["enable_chunked_prefill"] and args["enable_prefix_caching"]

    def test_ids_is_the_default_and_asks_for_nothing(self) -> None:
        assert config(exact="ids").vllm_args == EngineConfig("m", parse_devices(CPU)).vllm_args
        assert "max_num_seqs" not in config(exact="ids").vllm_args

    def test_gpus_get_the_same_shapes_too(self) -> None:
        assert config(CUDA).vllm_args["max_num_seqs"] == 1

    def test_a_block_size_is_that_of_a_step_too(self) -> None:
        args = config(engine_args={"block_size": 64}).vllm_args
        assert (args["block_size"], args["max_num_batched_tokens"]) == (64, 64)
        args = config(engine_args={"max_num_batched_tokens": 256}).vllm_args
        assert (args["block_size"], args["max_num_batched_tokens"]) == (256, 256)

    @pytest.mark.parametrize(
        "given",
        [
            {"max_num_seqs": 4},
            {"block_size": 32, "max_num_batched_tokens": 128},
            {"enable_prefix_caching": False},
            {"enable_chunked_prefill": False},
            {"long_prefill_token_threshold": 64},
            {"async_scheduling": True},
            {"speculative_config": {"method": "ngram"}},
            {"scheduler_cls": "mine.Scheduler"},
        ],
    )
    def test_what_contradicts_is_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(NotExact, match=f"{list(given)[-1]}=.* contradicts exact='bits'"):
            config(engine_args=given)
        assert config(exact="ids", engine_args=given).vllm_args[list(given)[-1]] == list(given.values())[-1]

    def test_what_agrees_is_not(self) -> None:
        assert config(engine_args={"max_num_seqs": 1, "speculative_config": None, "seed": 3}).vllm_args["seed"] == 3

    def test_there_are_two_guarantees(self) -> None:
        with pytest.raises(NotExact, match="not 'bit'"):
            config(exact="bit")
        with pytest.raises(ValidationError, match="exact"):
            ChatPingPong(exact="bit")  # type: ignore[arg-type]

    def test_what_vllm_settled_on_is_compared(self) -> None:
        cache = SimpleNamespace(block_size=128, enable_prefix_caching=True)
        settled = SimpleNamespace(
            cache_config=cache, scheduler_config=SimpleNamespace(max_num_batched_tokens=128, max_num_seqs=1)
        )
        exact.check_settled(config().vllm_args, settled)
        cache.block_size = 544  # hybrid models get blocks as large as their other layers' states
        with pytest.raises(NotExact, match="vLLM uses block_size=544 for this model"):
            exact.check_settled(config().vllm_args, settled)
        exact.check_settled({}, settled)

    def test_every_cpu_engine_has_as_many_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("langgraph_pingpong.config.usable_cores", lambda: [1, 3, 5, 7, 9])
        devices = parse_devices(CPU)
        assert [cores_for(device, devices, "bits") for device in devices] == [[1, 3], [5, 7]]
        assert [cores_for(device, devices) for device in devices] == [[1, 3], [5, 7, 9]]

    def test_engines_are_told_of_their_cores(self) -> None:
        settings = config(("cpu:0",))
        cores = engine_environment(settings, settings.devices[0])["VLLM_CPU_OMP_THREADS_BIND"]
        assert cores == ",".join(map(str, usable_cores()))


class TestServers:
    def test_a_server_gets_the_flags(self) -> None:
        command = " ".join(server_command(config()))
        for option in (
            "--block-size 128",
            "--max-num-batched-tokens 128",
            "--max-num-seqs 1",
            "--no-async-scheduling",
            "--scheduler-cls langgraph_pingpong.engines.prompt_scheduler.PromptScheduler",
        ):
            assert f" {option} " in f"{command} "

    def test_a_client_cannot_set_it(self) -> None:
        with pytest.raises(SettingOfServers, match=r"start them with `pingpong serve --exact bits`"):
            ChatPingPong(model="m", base_urls=["http://a:8000/v1"], exact="bits")
        ChatPingPong(model="m", base_urls=["http://a:8000/v1"], exact="ids")

    def test_a_pool_cannot_be_made_exact_later(self) -> None:
        pool = ChatPingPong(devices=["fake:0"])._serving().pool
        with pytest.raises(NotExact, match=r"engine_pool\(exact='bits'\)"):
            ChatPingPong(pool=pool, exact="bits")
        assert isinstance(pool, EnginePool)


def test_modelled_engines_are_exact_anyway() -> None:
    with ChatPingPong(devices=["fake:0", "fake:1"], exact="bits", max_tokens=4) as model:
        assert model.invoke("Hello").text


# -- real engines ------------------------------------------------------------------------------------------

engine = [pytest.mark.engine, pytest.mark.timeout(900)]
NODES = [node for node, *_ in CHAIN]
DOCUMENTS = ("bakery_oven", "river_gauge")


@pytest.fixture(scope="module")
def bits_model() -> Iterator[ChatPingPong]:
    """Two engines in bfloat16, where a rounding often tips a near tie."""
    settings: dict[str, Any] = {"devices": DEVICES, "dtype": "bfloat16", "max_model_len": 2048}
    if DEVICES[0].startswith("cuda"):
        settings["gpu_memory_utilization"] = 0.2  # other engines and servers stand beside these
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with ChatPingPong(**settings, exact="bits", temperature=0.0, max_tokens=24) as model:
            yield model


def run(model: ChatPingPong, overlap: str, document: str) -> list[dict[str, Any]]:
    """Each agent's text, tokens and log-probabilities."""
    told = model.model_copy(update={"overlap": overlap, "logprobs": True, "top_logprobs": 2})
    graph, heard = build(told, brief_tokens=225, max_tokens=24, last_max_tokens=12), _Answers()
    given = {"task": "Explain this document.", "document": read_text(f"documents/{document}.md")}
    graph.invoke(given, {"callbacks": [heard]})
    assert len(heard.said) == len(NODES)
    return heard.said


@pytest.fixture(scope="module")
def serial(bits_model: ChatPingPong) -> dict[str, list[dict[str, Any]]]:
    """Each document with edges off, from empty caches."""
    said = {}
    for document in DOCUMENTS:
        bits_model.reset_prefix_cache()
        said[document] = run(bits_model, "off", document)
    return said


class TestOnRealEngines:
    pytestmark = engine

    def test_answers_are_equal_to_the_bit(
        self, bits_model: ChatPingPong, serial: dict[str, list[dict[str, Any]]]
    ) -> None:
        """From empty caches, then from what the runs of other documents left."""
        certificates: list[dict[str, Any]] = []
        with bits_model.trace.subscribed(
            lambda event: certificates.append(event.data["certificate"]) if event.name == "finish" else None
        ):
            for document in DOCUMENTS:
                bits_model.reset_prefix_cache()
                assert run(bits_model, "on", document) == serial[document]
            for document in reversed(DOCUMENTS):
                assert run(bits_model, "on", document) == serial[document]
        downstream = [each for each in certificates if each["node"] != NODES[0]]
        ahead = [each["static"] >= exact.CHUNK for each in downstream]
        assert sum(ahead) > len(ahead) / 2  # a starved machine may have had no time for one
        assert sum(each["streamed"] for each in downstream) > 0
        assert all(each["cached"] % exact.CHUNK == 0 for each in certificates)

    def test_so_are_those_of_two_runs_at_once(
        self, bits_model: ChatPingPong, serial: dict[str, list[dict[str, Any]]]
    ) -> None:
        bits_model.reset_prefix_cache()
        said: dict[str, Any] = {}
        threads = [
            threading.Thread(target=lambda name=name: said.update({name: run(bits_model, "on", name)}))
            for name in DOCUMENTS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert said == serial

    def test_blocks_of_an_answer_are_not_reused(self, bits_model: ChatPingPong) -> None:
        """The next turn's prompt holds this one's answer. Decoding rounds it as no prefill does."""
        serving = bits_model._serving()
        one = serving.pool.engines[0]
        prompt = serving.template.prompt_ids([{"role": "user", "content": read_text("document.md")}])[:200]

        async def answer(ids: tuple[int, ...], tokens: int) -> tuple[list[int], list[float], int | None]:
            said: list[int] = []
            scores: list[float] = []
            cached = None
            sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
            async for delta in one.generate(Request(ids, sampling)):
                said += delta.token_ids
                scores += [each.logprob for each in delta.logprobs]
                cached = delta.num_cached_tokens if cached is None else cached
            return said, scores, cached

        async def turns() -> tuple[Any, Any]:
            await one.reset_prefix_cache()
            first, _, _ = await answer(prompt, 80)
            longer = (*prompt, *first, *prompt[:40])
            warm = await answer(longer, 8)
            await one.reset_prefix_cache()
            return warm, await answer(longer, 8)

        warm, cold = serving.pool.loop.run(turns())
        assert (warm[2], cold[2]) == (128, 0)
        assert warm[:2] == cold[:2]
