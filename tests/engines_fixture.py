"""Two real vLLM engines on this machine's cores, started once for the whole test session."""

from collections.abc import Iterator

import pytest

from langgraph_pingpong import ChatPingPong


@pytest.fixture(scope="session")
def real_model() -> Iterator[ChatPingPong]:
    """The default model on two CPU engines, in float32, so that no rounding depends on the shape of a batch."""
    with ChatPingPong(devices=["cpu:0", "cpu:1"], dtype="float32", temperature=0.0, max_tokens=24) as model:
        yield model
