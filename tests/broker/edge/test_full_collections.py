"""Full garbage collections are rare while streams are live, and free all cycles eventually."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mlxpool.broker.edge import full_collections
from mlxpool.broker.edge.full_collections import (
    GROWTH_INTERVAL,
    INTERVAL,
    LOOK_INTERVAL,
    FullCollections,
)


@pytest.fixture
def collector() -> Iterator[None]:
    """Restores the garbage collector's settings after the test."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.collect()
    gc.freeze()  # as in tests/conftest.py


class Cyclic:
    """An object in a reference cycle, which only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def old_cycle() -> weakref.ref[Cyclic]:
    """Makes an unreachable cycle in the oldest generation, which only full collections check."""
    cycle = Cyclic()
    gc.collect()
    return weakref.ref(cycle)


@pytest.mark.usefixtures("collector")
def test_cycles_are_freed_when_no_stream_is_live() -> None:
    live = [1]
    collections = FullCollections(lambda: bool(live), lambda: 0)
    collections.start(100.0)
    cycle = old_cycle()
    collections.on_turn(100.0 + 2 * INTERVAL)
    assert cycle() is not None, "a stream would wait for it"
    live.clear()
    collections.on_turn(100.0 + 2 * INTERVAL)
    assert cycle() is None


@pytest.mark.usefixtures("collector")
def test_an_idle_pool_collects_no_more_often_than_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collections = FullCollections(lambda: False, lambda: 0)
    collections.start(100.0)
    times: list[float] = []
    monkeypatch.setattr(gc, "collect", lambda: times.append(now))
    now: float = 100.0
    for step in range(4 * 60):
        now = 100.0 + step
        collections.on_turn(now)
    assert times == [100.0 + n * INTERVAL for n in (1, 2, 3)]


@pytest.mark.usefixtures("collector")
def test_memory_is_bounded_though_streams_are_always_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pool is busy, Python's own full collections still free old cycles, only later."""
    monkeypatch.setattr(full_collections, "MIDDLE_COLLECTIONS", 3)
    collections = FullCollections(lambda: True, lambda: 0)
    collections.start(100.0)
    young, middle, full = gc.get_threshold()
    cycles = [old_cycle()]
    # The loop is long enough for a full collection: Python also waits until a quarter of the
    # objects is new.
    held: list[list[int]] = [[] for _ in range(young)]
    for _ in range(40 * middle * full):
        held += [[] for _ in range(young)]
        collections.on_turn(100.0 + INTERVAL)
        if cycles[0]() is None:
            break
    assert cycles[0]() is None


@pytest.mark.usefixtures("collector")
def test_what_is_there_at_the_start_is_not_looked_at_again() -> None:
    kept = Cyclic()
    FullCollections(lambda: False, lambda: 0).start(100.0)
    assert gc.get_freeze_count() > 0
    assert not any(item is kept for item in gc.get_objects())


@pytest.mark.usefixtures("collector")
def test_a_process_that_grows_though_streams_are_live_is_collected() -> None:
    """A full collection is forced when the process has grown by half.

    Python counts objects, not bytes, so it may not notice that few cycles hold large buffers.
    """
    memory = 200 * 2**20
    collections = FullCollections(lambda: True, lambda: memory)
    collections.start(100.0)
    cycle = old_cycle()
    memory += 99 * 2**20
    collections.on_turn(100.0 + GROWTH_INTERVAL)
    assert cycle() is not None, "a stream would wait for it"
    memory += 2 * 2**20
    collections.on_turn(100.0 + GROWTH_INTERVAL + LOOK_INTERVAL / 2)
    assert cycle() is not None, "the memory is looked at once a second"
    collections.on_turn(100.0 + GROWTH_INTERVAL + LOOK_INTERVAL)
    assert cycle() is None


@pytest.mark.usefixtures("collector")
def test_a_process_that_needs_more_and_more_has_few_full_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of the memory is in use, so a full collection frees nothing.

    The next one follows only when the memory has grown by half again.
    """
    memory, sizes = 40 * 2**20, list[int]()
    collections = FullCollections(lambda: True, lambda: memory)
    collections.start(100.0)
    monkeypatch.setattr(gc, "collect", lambda: sizes.append(memory >> 20))
    for second in range(1000):  # the memory grows from 40 to 1040 MiB
        memory += 2**20
        collections.on_turn(101.0 + second)
    assert sizes == [105, 170, 256, 385, 578, 868]
    for second in range(1000):
        collections.on_turn(2000.0 + second / 10)
    assert len(sizes) == 6


@pytest.mark.usefixtures("collector")
def test_growth_alone_makes_no_collection_within_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, times = 40 * 2**20, list[float]()
    collections = FullCollections(lambda: True, lambda: memory)
    collections.start(100.0)
    now: float = 100.0
    monkeypatch.setattr(gc, "collect", lambda: times.append(now))
    for step in range(1, 40):
        now, memory = 100.0 + step, 2 * memory
        collections.on_turn(now)
    assert times == [110.0, 120.0, 130.0]
