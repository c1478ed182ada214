"""Timers: one time for each key; the earliest timer fires first."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.core.state import Timers


def test_without_a_time_the_next_is_infinity() -> None:
    timers: Timers[str] = Timers()
    assert timers.next() == math.inf
    assert timers.due(1e9) == []
    assert len(timers) == 0


def test_the_earliest_key_is_due_first() -> None:
    timers: Timers[str] = Timers()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        timers.set(key, at)
    assert timers.next() == 1.0
    assert timers.due(2.0) == ["a", "b"]
    assert timers.next() == 3.0
    assert len(timers) == 1


def test_only_the_newest_time_of_a_key_counts() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    assert timers.next() == 5.0
    assert timers.due(4.0) == []
    timers.set("a", 2.0)
    assert timers.due(9.0) == ["a"]
    assert timers.due(9.0) == []


def test_a_key_can_be_set_back_to_an_earlier_time() -> None:
    timers: Timers[str] = Timers()
    for at in (1.0, 2.0, 1.0):
        timers.set("a", at)
    assert timers.due(3.0) == ["a"]
    assert timers.next() == math.inf


def test_a_cleared_key_is_not_due() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("b", 2.0)
    timers.clear("a")
    timers.clear("unknown")
    timers.set("b", math.inf)
    assert timers.next() == math.inf
    assert timers.due(9.0) == []


def test_keys_of_any_kind_at_one_time_keep_their_order() -> None:
    timers: Timers[object] = Timers()
    keys = [b"x", ("link", 1), "tombstones", ("model", "m")]
    for key in keys:
        timers.set(key, 1.0)
    assert timers.due(1.0) == keys


steps = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 9)), max_size=60)


@given(steps, st.integers(0, 9))
def test_timers_agree_with_a_plain_map(changes: list[tuple[int, int | None]], now: int) -> None:
    timers: Timers[int] = Timers()
    plain: dict[int, int] = {}
    for key, at in changes:
        if at is None:
            timers.clear(key)
            plain.pop(key, None)
        else:
            timers.set(key, at)
            plain[key] = at
        assert timers.next() == min(plain.values(), default=math.inf)
    due = timers.due(now)
    assert sorted(map(repr, due)) == sorted(repr(k) for k, at in plain.items() if at <= now)
    assert len(timers) == len(plain) - len(due)
