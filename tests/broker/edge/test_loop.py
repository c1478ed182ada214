"""The order of work and the waits in a pass of the loop, and the reports of delayed passes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from functools import partial

import pytest

from mlxpool.broker.edge import loop as module
from mlxpool.broker.edge.loop import LAG_WINDOW, Loop, LoopLag, Priority


@pytest.fixture
def late() -> list[float]:
    return []


@pytest.fixture
def loop(late: list[float]) -> Loop:
    return Loop(LoopLag(), lambda seconds, now: late.append(seconds))


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    pairs = [os.pipe() for _ in range(3)]
    yield pairs
    for pair in pairs:
        for descriptor in pair:
            os.close(descriptor)


def _append(calls: list[str], name: str, now: float) -> None:
    calls.append(name)


def test_a_turn_handles_sources_by_priority_and_then_tasks(
    loop: Loop, pipes: list[tuple[int, int]]
) -> None:
    calls: list[str] = []
    priorities = (Priority.CLIENTS, Priority.WORKERS, Priority.WORKER_EXITS)
    for (reader, writer), priority in zip(pipes, priorities, strict=True):
        loop.add_source(reader, partial(_append, calls, priority.name), priority)
        os.write(writer, b"x")
    loop.add_task(lambda now: calls.append("task"))
    loop.turn()
    assert calls == ["WORKERS", "WORKER_EXITS", "CLIENTS", "task"]
    calls.clear()
    os.read(pipes[0][0], 1)
    loop.remove_source(pipes[1][0])
    loop.turn()
    assert calls == ["WORKER_EXITS", "task"]


def test_a_turn_waits_until_the_first_task_is_due(loop: Loop, pipes: list[tuple[int, int]]) -> None:
    begun = time.monotonic()
    loop.add_source(pipes[0][0], lambda now: None)
    loop.add_task(lambda now: None, lambda: begun + 0.05)
    loop.add_task(lambda now: None, lambda: math.inf)
    loop.turn()
    assert 0.05 <= time.monotonic() - begun < 30


def test_a_late_turn_is_reported_before_anything_is_handled(
    loop: Loop, late: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    loop.add_task(lambda now: seen.append(len(late)), time.monotonic)
    loop.turn()
    late.clear()  # the first pass may have been late, too, on a busy machine
    monkeypatch.setattr(module, "LATE", 0.02)
    time.sleep(0.1)
    loop.turn()
    assert seen[-1] == 1 and late[-1] > 0.05


# ---- loop lag ------------------------------------------------------------------------------------
# The longest pass of the loop in a moving window.


def test_the_lag_is_the_longest_turn() -> None:
    lag = LoopLag()
    for seconds in (0.1, 0.5, 0.2):
        lag.record(seconds, 100.0)
    assert lag.worst(100.0) == 0.5


def test_a_long_turn_is_reported_for_one_window_and_forgotten_after_two() -> None:
    lag = LoopLag()
    lag.record(0.5, 100.0)
    lag.record(0.1, 100.0 + LAG_WINDOW)
    assert lag.worst(100.0 + LAG_WINDOW) == 0.5
    assert lag.worst(100.0 + 2 * LAG_WINDOW) == 0.1


def test_a_long_turn_of_long_ago_is_not_reported() -> None:
    lag = LoopLag()
    lag.record(0.5, 100.0)
    assert lag.worst(100.0 + 10 * LAG_WINDOW) == 0.0


def test_reading_the_lag_changes_nothing() -> None:
    lag = LoopLag()
    lag.record(0.5, 100.0)
    assert [lag.worst(101.0) for _ in range(3)] == [0.5] * 3
