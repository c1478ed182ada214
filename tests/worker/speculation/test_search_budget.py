"""The search for drafts takes a share of the time of steps: less where nothing is found."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mlxpool.worker.speculation.search_budget import (
    FRUITLESS,
    LEAST_SHARE,
    MAX_REST,
    MAX_SAVED,
    MIN_OVERHEADS,
    SHARE,
    SearchBudget,
)

STEP = 0.001  # seconds


def test_a_share_of_steps_is_saved_up_to_a_bound() -> None:
    budget = SearchBudget()
    assert budget.spent
    budget.earn(STEP)
    assert budget.saved == pytest.approx(SHARE * STEP) and not budget.spent
    budget.earn(1000.0)
    assert budget.saved == MAX_SAVED


def test_the_share_shrinks_where_nothing_is_found_and_is_whole_again_when_something_is() -> None:
    budget, shares = SearchBudget(), []
    for _ in range(10):
        budget.spend(FRUITLESS / 2, overhead=0.0, rows=1, found=False)
        shares.append(budget.share / SHARE)
    assert shares[:4] == [1, 0.5, 0.5, 0.25] and budget.share == LEAST_SHARE
    budget.spend(1e-6, overhead=0.0, rows=1, found=True)
    assert budget.share == SHARE
    budget.spend(FRUITLESS / 2, overhead=0.0, rows=1, found=False)
    assert budget.share == SHARE


@pytest.mark.parametrize("overhead", [5e-6, 50e-6, 150e-6])
def test_a_search_begins_when_what_precedes_it_is_a_small_part_of_what_is_saved(
    overhead: float,
) -> None:
    """Over all steps no more is spent than the share."""
    budget, steps, spent = SearchBudget(), 0, 0.0
    for _ in range(50):
        budget.earn(STEP)
        steps += 1 + budget.steps_until_search(STEP, 1)
        assert budget.saved >= MIN_OVERHEADS * overhead - SHARE * STEP or not spent
        search = max(overhead, budget.saved)
        budget.spend(search, overhead=overhead, rows=8, found=True)
        spent += search
    assert spent <= SHARE * STEP * steps + overhead


def test_a_search_begins_when_it_can_look_at_all_rows() -> None:
    budget = SearchBudget()
    budget.spend(50e-6, overhead=10e-6, rows=10, found=True)
    few, many = replace(budget), replace(budget)
    assert 10 < few.steps_until_search(STEP, 10) < many.steps_until_search(STEP, 100) < MAX_REST
    assert few.saved == pytest.approx(50e-6, abs=2 * SHARE * STEP)
    assert many.saved == pytest.approx(410e-6, abs=2 * SHARE * STEP)


def test_a_search_of_many_rows_begins_when_no_more_can_be_saved() -> None:
    budget = SearchBudget()
    budget.spend(10e-3, overhead=0.0, rows=10, found=True)
    steps = budget.steps_until_search(0.1, 1000)
    assert 10 <= steps <= 15 and budget.saved == pytest.approx(MAX_SAVED, abs=SHARE * 0.1)


def test_rests_have_a_bound() -> None:
    budget = SearchBudget()
    budget.spend(100.0, overhead=1.0, rows=1, found=False)
    assert budget.steps_until_search(STEP, 1) == MAX_REST
    assert budget.steps_until_search(0.0, 1) == 0
