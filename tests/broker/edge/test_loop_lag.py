"""The longest turn of the loop over a moving window."""

from __future__ import annotations

from mlxpool.broker.edge.loop import LAG_WINDOW, LoopLag


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
