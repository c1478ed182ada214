"""The predicted times of steps with drafts."""

from __future__ import annotations

import pytest

from mlxpool.worker.speculation.step_times import (
    NEWEST,
    SETTLING_STEPS,
    UNMEASURED_EXTRA,
    StepTimes,
)

STEP = 0.010


def predict(lines: int) -> float:
    return STEP + 0.001 * lines


def found(times: StepTimes, rows: int, *drafts: int) -> list[float]:
    """Returns the predicted seconds of a step for each of these numbers of drafts."""
    plain = times.plain(rows, predict)
    return [times.with_drafts(rows, count, predict, plain) for count in drafts]


def test_before_any_measure_it_is_what_the_cost_model_says() -> None:
    times = StepTimes()
    assert not times.knows_plain and times.plain(4, predict) == pytest.approx(0.014)
    assert times.guessed(4, 6, predict, 0.014) == pytest.approx(0.020)
    assert found(times, 4, 6) == pytest.approx([0.014 * (1 + UNMEASURED_EXTRA) + 0.006])


def test_plain_steps_are_those_measured_with_as_many_rows() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(2, 0, 0.020)
        times.observe(6, 0, 0.040)
    plain = [times.plain(rows, predict) for rows in (1, 2, 4, 6, 9)]
    assert plain == pytest.approx([0.020, 0.020, 0.030, 0.040, 0.040])


def test_slow_steps_change_nothing_until_most_are_slow() -> None:
    """A few slow steps do not change the predicted times of steps, with drafts or without."""
    times = StepTimes()
    for _ in range(NEWEST):
        times.observe(1, 0, 0.020)
        times.observe(1, 4, 0.030)
    for _ in range(NEWEST // 2):
        times.observe(1, 0, 2.0)
        times.observe(1, 4, 3.0)
        assert times.plain(1, predict) == 0.020 and found(times, 1, 4) == pytest.approx([0.030])
    for _ in range(NEWEST):
        times.observe(1, 0, 0.030)
    assert times.plain(1, predict) == 0.030


def test_a_step_whose_time_is_not_that_of_its_kind_changes_nothing() -> None:
    times = StepTimes()
    times.observe(1, 0, STEP)
    times.observe(1, 0, 1.0, measured=False)
    times.observe(1, 4, 1.0, measured=False)
    assert times.plain(1, predict) == STEP and not times.known_drafts(1)


def test_costs_of_numbers_of_drafts_are_learned_and_lie_between_those_measured() -> None:
    """Between measured numbers of drafts the cost is interpolated.

    Each draft beyond the largest measured number costs the mean of the measured drafts. If passes
    are submitted ahead, it costs the cost model's prediction for one more input instead.
    """
    for ahead, further in ((False, 0.0265), (True, 0.025)):
        times = StepTimes(ahead=ahead)
        for _ in range(5):
            for drafts, seconds in ((0, STEP), (4, 0.013), (8, 0.021)):
                times.observe(4, drafts, seconds)
                times.settle()
                while not times.settled:
                    times.observe(4, 0, STEP, measured=False)
        assert times.known_drafts(4) == 8
        expected = [0.0115, 0.013, 0.017, 0.021, further]
        assert found(times, 4, 2, 4, 6, 8, 12) == pytest.approx(expected)


def test_numbers_of_rows_are_apart() -> None:
    """Each power of two of rows is measured separately.

    The cost of one row does not predict the cost of eight rows.
    """
    times = StepTimes()
    for rows in (1, 8):
        times.observe(rows, 0, STEP)
    times.observe(1, 4, 0.090)
    assert not times.known_drafts(1)  # the first step of a kind may compile more than others
    times.observe(1, 4, 0.050)
    assert (times.known_drafts(1), times.known_drafts(8)) == (4, 0)
    assert found(times, 8, 4) == pytest.approx([STEP * (1 + UNMEASURED_EXTRA) + 0.004])


def test_a_number_of_drafts_that_is_slower_than_the_others_is_known_as_such() -> None:
    """A device may use another, slower kernel from some number of inputs on."""
    times = StepTimes()
    for _ in range(40):
        times.observe(1, 0, 0.010)
        times.observe(1, 2, 0.011)
        times.observe(1, 4, 0.012)
        times.observe(1, 8, 0.030)
    assert found(times, 1, 2, 4, 8) == pytest.approx([0.011, 0.012, 0.030])


def test_steps_with_drafts_are_no_faster_than_plain_ones() -> None:
    times = StepTimes()
    for _ in range(30):
        times.observe(1, 0, 0.010)
        times.observe(1, 4, 0.0099)
    assert found(times, 1, 4) == pytest.approx([0.010])


def test_a_disturbed_plain_step_of_few_rows_does_not_make_drafts_seem_free() -> None:
    times = StepTimes()
    for _ in range(10):
        times.observe(8, 0, 0.010)
    times.observe(7, 0, 0.030)
    times.observe(4, 0, 0.006)
    plain = [times.plain(rows, predict) for rows in (8, 7, 4)]
    assert plain == pytest.approx([0.010, 0.010, 0.006])
    assert 0.006 < times.plain(6, predict) <= 0.010


def test_a_machine_that_becomes_slower_slows_both_kinds_of_steps() -> None:
    """The time of a step with drafts is stored as a multiple of the time of a plain step.

    If the machine becomes slower, the predictions of both grow together.
    """
    times = StepTimes()
    for _ in range(10):
        times.observe(8, 0, 0.010)
        times.observe(8, 16, 0.018)
    for _ in range(30):
        times.observe(8, 0, 0.015)
    assert found(times, 8, 16) == pytest.approx([0.027])


def test_what_the_steps_behind_drafts_take_more_is_a_cost_of_the_drafts() -> None:
    """If passes are submitted ahead, a step with drafts also slows down the next few plain steps.

    Their extra time, compared with later plain steps, counts as a cost of the drafts.
    """
    times = StepTimes(ahead=True)
    times.observe(1, 0, STEP)
    for _ in range(2):  # the first known cost is used at once
        times.observe(1, 4, 2 * STEP)
    assert found(times, 1, 4) == pytest.approx([2 * STEP])
    for _ in range(NEWEST):
        times.observe(1, 4, 2 * STEP)
        assert not times.settled
        for number in range(SETTLING_STEPS):
            times.observe(1, 0, (1.5 if number < 2 else 1.0) * STEP)
        assert times.settled
    assert found(times, 1, 4) == pytest.approx([3 * STEP])
    assert times.plain(1, predict) == STEP


def test_drafts_behind_which_no_step_is_measured_cost_what_their_own_steps_took() -> None:
    """If no step after the drafts is measured, the drafts cost what their own steps took."""
    times = StepTimes(ahead=True)
    times.observe(1, 0, STEP)
    for _ in range(2 * NEWEST):
        times.observe(1, 4, 2 * STEP)
        times.settle()
        times.observe(1, 0, 9 * STEP)
    assert found(times, 1, 4) == pytest.approx([2 * STEP])
