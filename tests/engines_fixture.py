"""Real vLLM, started once for the whole test session: on this machine's cores, or where one says."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.config import EngineConfig, parse_devices, resolve_model
from langgraph_pingpong.engines.server_processes import LocalServers

DEVICES = os.environ.get("PINGPONG_TEST_DEVICES", "cpu:0,cpu:1").split(",")
"""Set it to 'cuda:0,cuda:1' to try the engines on GPUs."""

SETTINGS: dict[str, Any] = {"dtype": "float32"}
"""In float32 no rounding depends on the shape of a batch."""

if DEVICES[0].startswith("cuda"):
    SETTINGS["gpu_memory_utilization"] = 0.4  # servers stand beside the engines


@pytest.fixture(scope="session")
def real_model() -> Iterator[ChatPingPong]:
    """The default model on two engines."""
    with ChatPingPong(devices=DEVICES, temperature=0.0, max_tokens=24, **SETTINGS) as model:
        yield model


SPARE_BLOCKS, SPARE_LONGEST = 72, 1152


class Spare:
    """An engine whose cache one test may flood and whose process another may kill."""

    def __init__(self) -> None:
        self._model: ChatPingPong | None = None

    def model(self) -> ChatPingPong:
        """The default model on it; it starts where it does not run."""
        if self._model is None or self._model._serving().pool.closed:
            args = {"num_gpu_blocks_override": SPARE_BLOCKS, "block_size": 32}
            settings = {**SETTINGS, "dtype": "bfloat16", "max_model_len": SPARE_LONGEST, "engine_args": args}
            if "gpu_memory_utilization" in settings:
                settings["gpu_memory_utilization"] = 0.1
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
                self._model = ChatPingPong(devices=DEVICES[:1], max_tokens=1, **settings).start()
        return self._model

    def close(self) -> None:
        """End it, if there is one."""
        if self._model is not None:
            self._model.close()


@pytest.fixture(scope="session")
def spares() -> Iterator[Spare]:
    """Keeps the spare engine from test to test."""
    spare = Spare()
    yield spare
    spare.close()


@pytest.fixture
def spare_model(spares: Spare) -> ChatPingPong:
    """A real engine whose KV cache holds 71 blocks of 32 tokens. A test may close it."""
    return spares.model()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServers]:
    """Two servers of the same, as `pingpong serve` starts them; on a CPU with less KV cache."""
    config = EngineConfig(resolve_model(None), parse_devices(DEVICES), **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with LocalServers(config, tmp_path_factory.mktemp("servers")) as local:
            local.start()
            yield local


@pytest.fixture(scope="session")
def server_model(servers: LocalServers) -> Iterator[ChatPingPong]:
    """The chat model on these servers."""
    with ChatPingPong(base_urls=servers.base_urls, temperature=0.0, max_tokens=24) as model:
        yield model
