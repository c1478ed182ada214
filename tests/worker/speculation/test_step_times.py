"""What steps with drafts are predicted to take."""

from __future__ import annotations

import random

import pytest

from mlxpool.worker.speculation.step_times import UNMEASURED_EXTRA, StepTimes


def predict(lines: int) -> float:
    return 0.010 + 0.001 * lines


def test_before_any_measure_it_is_what_the_cost_model_says() -> None:
    times = StepTimes(bubble=0.002)
    assert times.plain(4, predict) == pytest.approx(0.014)
    assert times.guessed(4, 6, predict) == pytest.approx(0.014 + 0.002 + 0.006)
    doubted = 0.014 * (1 + UNMEASURED_EXTRA) + 0.002 + 0.006
    assert times.with_drafts(4, 2, 6, predict, times.plain(4, predict)) == pytest.approx(doubted)


def test_plain_steps_are_those_measured_with_as_many_rows() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(2, 0, 0, 0.020)
        times.observe(6, 0, 0, 0.040)
    found = [times.plain(rows, predict) for rows in (1, 2, 4, 6, 9)]
    assert found == pytest.approx([0.020, 0.020, 0.030, 0.040, 0.040])


def test_slow_steps_without_drafts_change_nothing_until_most_are_slow() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(1, 0, 0, 0.020)
    for _ in range(4):
        times.observe(1, 0, 0, 2.0)
        assert times.plain(1, predict) == 0.020
    for _ in range(9):
        times.observe(1, 0, 0, 0.030)
    assert times.plain(1, predict) == 0.030


def test_the_costs_of_checks_are_learned() -> None:
    """Of a step with drafts, of each row that has some, and of each draft."""
    draw = random.Random(1)
    times = StepTimes(bubble=0.5)
    for _ in range(5):
        times.observe(4, 0, 0, 0.010)
    for _ in range(200):
        checked = draw.randint(1, 4)
        drafts = checked * draw.randint(1, 4)
        times.observe(4, checked, drafts, 0.010 + 0.003 + 0.001 * checked + 0.0005 * drafts)
    for checked, drafts in ((1, 2), (2, 8), (4, 16)):
        wanted = 0.010 + 0.003 + 0.001 * checked + 0.0005 * drafts
        assert times.with_drafts(
            4, checked, drafts, predict, times.plain(4, predict)
        ) == pytest.approx(wanted, rel=0.1)
    # The bubble is no more than a plain step.
    assert times.guessed(4, 2, predict) == pytest.approx(0.010 + 0.010 + 0.002)


def test_a_number_of_drafts_that_is_slower_than_the_others_is_known_as_such() -> None:
    """As where a device has another kernel from some number of lines on."""
    times = StepTimes()
    for _ in range(40):
        times.observe(1, 0, 0, 0.010)
        times.observe(1, 1, 2, 0.011)
        times.observe(1, 1, 4, 0.012)
        times.observe(1, 1, 8, 0.030)
    found = [
        times.with_drafts(1, 1, drafts, predict, times.plain(1, predict)) for drafts in (2, 4, 8)
    ]
    assert found == pytest.approx([0.011, 0.012, 0.030], rel=0.2)


def test_steps_with_drafts_that_cost_nothing_more_are_no_faster_than_plain_ones() -> None:
    times = StepTimes()
    for _ in range(30):
        times.observe(1, 0, 0, 0.010)
        times.observe(1, 1, 4, 0.0099)
    assert times.with_drafts(1, 1, 4, predict, times.plain(1, predict)) == pytest.approx(
        0.010, rel=0.03
    )


def test_a_disturbed_plain_step_of_few_rows_does_not_make_drafts_seem_free() -> None:
    times = StepTimes()
    for _ in range(10):
        times.observe(8, 0, 0, 0.010)
    times.observe(7, 0, 0, 0.030)
    times.observe(4, 0, 0, 0.006)
    assert [times.plain(rows, predict) for rows in (8, 7, 4)] == pytest.approx(
        [0.010, 0.010, 0.006]
    )
    assert 0.006 < times.plain(6, predict) <= 0.010


def test_a_machine_that_becomes_slower_slows_both_kinds_of_steps() -> None:
    """What a step with drafts takes is known as a multiple of a plain one."""
    times = StepTimes()
    for _ in range(10):
        times.observe(8, 0, 0, 0.010)
        times.observe(8, 8, 16, 0.018)
    for _ in range(30):
        times.observe(8, 0, 0, 0.015)
    assert times.with_drafts(8, 8, 16, predict, times.plain(8, predict)) == pytest.approx(
        0.027, rel=0.05
    )
