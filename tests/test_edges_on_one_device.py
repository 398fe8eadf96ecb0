"""Edges on the device that answers: asked for, never by default, in pieces beside the decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

TASK = {"task": "Say what a tide pool is."}
NODES = ("writer", "critic", "editor")


@pytest.mark.parametrize("engines", [1, 3])
def test_a_run_stays_on_one_device_and_streams(lab: Lab, engines: int) -> None:
    expected = lab.chain(lab.model(engines, overlap="off"), NODES).invoke(TASK)
    model = lab.model(engines, overlap="same-device")
    record = lab.record(model)
    graph = lab.chain(model, NODES)
    for _ in range(3):
        assert graph.invoke(TASK) == expected
    certificates = [event.data["certificate"] for event in record.named("finish")]
    for run in (certificates[:3], certificates[3:6], certificates[6:]):
        assert len({each["device"] for each in run}) == 1
        assert all(each["static"] + each["streamed"] > each["prompt_tokens"] * 0.7 for each in run[1:])
        assert all((each["ids_equal"], each["wasted"], each["fallback"]) == (True, 0, None) for each in run)
    assert len(record.named("append.started")) > 6


def test_pieces_are_as_large_as_the_engine_takes_beside_a_decode(lab: Lab) -> None:
    engine = lab.engine("fake:0", piece_tokens=32)
    model = lab.model([engine], overlap="same-device")
    record = lab.record(model)
    lab.chain(model, NODES).invoke(TASK)
    ends: dict[str, int] = {}
    sizes = []
    for event in record.named("append.complete"):  # what is cached costs nothing, and comes with the first
        sizes.append(event.data["tokens"] - max(ends.get(event.node, 0), event.data["cached"] or 0))
        ends[event.node] = event.data["tokens"]
    assert max(sizes) == 32


def test_one_device_stays_quiet_without_it(lab: Lab) -> None:
    model = lab.model(1)
    record = lab.record(model)
    lab.chain(model, NODES).invoke(TASK)
    assert not record.named("append.started")
    assert lab.prefills() == 0
