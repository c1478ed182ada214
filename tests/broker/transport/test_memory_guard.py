"""The memory guard: memory use that requests explain, and connections that it never closes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxpool.broker import host
from mlxpool.broker.transport.memory_guard import (
    CHECK_INTERVAL,
    MAX_UNEXPLAINED,
    TRIM_TIME,
    MemoryGuard,
    _bytes_held,
    busy_descriptors,
)
from support import kinds
from support.core_harness import Story


def test_a_connection_with_a_stream_or_an_open_call_is_busy(story: Story) -> None:
    story.generate(link=1)
    story.ask(kinds.TOKENIZE, 2, model="m", text="a")
    story.hear(3)
    peers = {n: SimpleNamespace(descriptor=10 + n) for n in (1, 2, 3)}
    front: Any = SimpleNamespace(by_number=peers)
    assert busy_descriptors(front, story.core.state) == {11, 12}
    assert busy_descriptors(front, story.core.state, story.now) == set()


def test_blobs_of_open_calls_are_explained_memory(story: Story) -> None:
    worker = story.ready_worker()
    story.ask(kinds.TOKENIZE, 1, bytes(500), model="m", text=True)
    story.ask(kinds.TOKENIZE, 1, bytes(70), model="other", text=True)
    assert worker.asked
    assert _bytes_held(story.core.state) == 570


def test_memory_that_is_freed_late_is_given_back(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection's memory may be freed after a check; later checks return it to the system."""
    trims, used, now = [], [2 * MAX_UNEXPLAINED], 100.0
    monkeypatch.setattr(host, "trim_heap", lambda: trims.append(now))
    monkeypatch.setattr(host, "resident_bytes", lambda pid: used[0])
    nobody: Any = SimpleNamespace(endpoints=())
    front: Any = SimpleNamespace(by_number={}, full=SimpleNamespace(bytes=0))
    guard = MemoryGuard(nobody, front, story.core.state)
    guard.check(now)
    used[0] = 0
    while now < 100.0 + 2 * TRIM_TIME:
        now += CHECK_INTERVAL
        guard.check(now)
    assert trims[0] < 101.0 and 99.0 + TRIM_TIME < trims[-1] < 100.0 + TRIM_TIME
