"""Real vLLM on this machine's cores, started once for the whole test session, where a test needs it."""

from collections.abc import Iterator

import pytest

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.config import EngineConfig, parse_devices, resolve_model
from langgraph_pingpong.engines.server_processes import LocalServers

DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture(scope="session")
def real_model() -> Iterator[ChatPingPong]:
    """The default model on two CPU engines, in float32, so that no rounding depends on the shape of a batch."""
    with ChatPingPong(devices=DEVICES, dtype="float32", temperature=0.0, max_tokens=24) as model:
        yield model


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServers]:
    """Two servers of the same, as `pingpong serve` starts them, with less KV cache: they stand beside the engines."""
    config = EngineConfig(resolve_model(None), parse_devices(DEVICES), dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        local = LocalServers(config, tmp_path_factory.mktemp("servers"))
        with local:
            local.start()
            yield local


@pytest.fixture(scope="session")
def server_model(servers: LocalServers) -> Iterator[ChatPingPong]:
    """The chat model on these servers."""
    with ChatPingPong(base_urls=servers.base_urls, temperature=0.0, max_tokens=24) as model:
        yield model
