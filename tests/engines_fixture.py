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
