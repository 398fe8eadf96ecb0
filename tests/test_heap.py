"""What exists when an engine is up is left out of full collections, and is not lost for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from langgraph_pingpong import EnginePool, heap
from tests.conftest import Lab, wait_until


class Circle:
    """Only a full collection finds it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    yield
    if frozen:
        heap.set_apart()
    else:
        heap.take_back()


def dropped() -> weakref.ref[Circle]:
    circle = Circle()
    heap.set_apart()
    return weakref.ref(circle)


def test_what_is_garbage_already_goes_first() -> None:
    gone = weakref.ref(Circle())
    heap.set_apart()
    assert gone() is None


def test_what_turns_into_garbage_is_found_before_the_next_engine_takes_memory() -> None:
    gone = dropped()
    gc.collect()
    assert gone() is not None
    heap.collect()
    assert gone() is None
    assert gc.get_freeze_count() == 0


def test_what_turns_into_garbage_is_found_once_an_engine_stopped() -> None:
    gone = dropped()
    heap.take_back()
    gc.collect()
    assert gone() is None


def test_what_was_set_apart_before_is_not_looked_at_again() -> None:
    gone = dropped()
    heap.set_apart()
    assert gone() is not None


def test_nothing_is_collected_where_nothing_was_set_apart() -> None:
    heap.take_back()
    collected: list[object] = []
    gc.callbacks.append(lambda *told: collected.append(told))
    try:
        heap.collect()
    finally:
        gc.callbacks.pop()
    assert not collected


def test_a_model_of_a_graph_that_is_dropped_ends_its_engines_all_the_same(lab: Lab) -> None:
    def used() -> weakref.ref[EnginePool]:
        model = lab.model()
        graph = lab.chain(model)
        heap.set_apart()
        graph.invoke({"task": "Say what a tide pool is."})
        return weakref.ref(model._serving().pool)

    def gone() -> bool:
        gc.collect()
        return pool() is None

    pool = used()
    wait_until(gone, 5.0, "end of the pool, which was set apart")
