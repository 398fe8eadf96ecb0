"""Two real vLLM engines, started once for the whole test session: on this machine's cores, or where one says."""

import os
from collections.abc import Iterator

import pytest

from langgraph_pingpong import ChatPingPong

DEVICES = os.environ.get("PINGPONG_TEST_DEVICES", "cpu:0,cpu:1").split(",")
"""Set it to 'cuda:0,cuda:1' to try the engines on GPUs."""


@pytest.fixture(scope="session")
def real_model() -> Iterator[ChatPingPong]:
    """The default model on two engines, in float32, so that no rounding depends on the shape of a batch."""
    with ChatPingPong(devices=DEVICES, dtype="float32", temperature=0.0, max_tokens=24) as model:
        yield model
