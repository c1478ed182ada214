"""The choice of the number of drafts that each row checks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.speculation.depths import MIN_GAIN, choose_depths

CHANCES = st.lists(st.lists(st.floats(0, 1), max_size=3).map(tuple), min_size=1, max_size=3)


def test_drafts_that_cost_nothing_are_all_checked() -> None:
    assert choose_depths(
        [(0.9, 0.9), (0.5,)], 4, 99, 1.0, lambda checked, drafts, deepest: 1.0
    ) == [2, 1]


def test_none_is_checked_where_a_step_with_drafts_costs_more_than_it_gives() -> None:
    assert choose_depths(
        [(0.9,) * 8], 1, 99, 1.0, lambda checked, drafts, deepest: 1.0 + drafts
    ) == [0]
    assert choose_depths([(0.0,) * 8], 1, 99, 1.0, lambda checked, drafts, deepest: 1.0) == [0]
    gain = MIN_GAIN - 1 - 0.001
    assert choose_depths([(gain,)], 1, 99, 1.0, lambda checked, drafts, deepest: 1.0) == [0]


def test_rows_with_better_chances_get_more() -> None:
    depths = choose_depths(
        [(0.95,) * 8, (0.3,) * 8, ()],
        3,
        99,
        1.0,
        lambda checked, drafts, deepest: 1.0 + 0.15 * drafts,
    )
    assert depths[0] > 1 and depths[1:] == [0, 0]


def test_no_more_than_most() -> None:
    for most in (1, 3, 8):
        depths = choose_depths(
            [(1.0,) * 8, (0.9,) * 8], 2, most, 1.0, lambda checked, drafts, deepest: 1.0
        )
        assert sum(depths) == most


@given(
    chances=CHANCES,
    rows=st.integers(3, 5),
    constant=st.floats(0, 0.5),
    of_draft=st.floats(0, 0.5),
)
def test_no_choice_of_the_same_size_gives_more(
    chances: list[tuple[float, ...]], rows: int, constant: float, of_draft: float
) -> None:
    def seconds(checked: int, drafts: int, deepest: int) -> float:
        return 1 + constant + of_draft * drafts

    def rate(depths: tuple[int, ...]) -> float:
        gained = 0.0
        for some, depth in zip(chances, depths, strict=True):
            product = 1.0
            for chance in some[:depth]:
                product *= chance
                gained += product
        checked = sum(depth > 0 for depth in depths)
        return (rows + gained) / (seconds(checked, sum(depths), max(depths)) if checked else 1.0)

    chosen = tuple(choose_depths(chances, rows, 99, 1.0, seconds))
    assert all(depth <= len(some) for depth, some in zip(chosen, chances, strict=True))
    if any(chosen):
        assert rate(chosen) > MIN_GAIN * rows
        same = [
            depths
            for depths in itertools.product(*(range(len(some) + 1) for some in chances))
            if sum(depths) == sum(chosen)
        ]
        assert rate(chosen) >= max(map(rate, same)) * (1 - 1e-9)
