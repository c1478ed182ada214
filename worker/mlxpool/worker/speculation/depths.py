"""How many drafts of each row a step checks, so that it gives the most tokens a second. Pure."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import accumulate
from operator import itemgetter, mul

MIN_GAIN = 1.08  # tokens a second with drafts divided by those without: below it there are none


def choose_depths(
    chances: Many[Many[float]],
    rows: int,
    most: int,
    plain: float,
    seconds: Callable[[int, int, int], float],
    least_gain: float = MIN_GAIN,
) -> list[int]:
    """Returns the number of drafts to check of each row that can have some.

    `chances`: of each such row, how likely each draft is right if those before it are. `rows`: all
    rows of the step, those without drafts too. `most`: drafts of all rows together. `plain`:
    seconds of the step without drafts. `seconds(checking, drafts, deepest)`: seconds of a step in
    which `checking` rows have `drafts` together, and one of them `deepest`. All numbers are 0 where
    the step would give less than `least_gain` times the tokens a second of one without drafts.
    """
    every = sorted(
        (
            (chance, row, depth)
            for row, some in enumerate(chances)
            for depth, chance in enumerate(accumulate(some, mul), start=1)
        ),
        key=itemgetter(0),
        reverse=True,  # stable: the drafts of a row stay in order
    )[:most]
    best, depths = least_gain * rows / plain, [0] * len(chances)
    gained, checked, deepest, chosen = 0.0, 0, 0, 0
    for number, (chance, _, depth) in enumerate(every, start=1):
        gained += chance
        checked += depth == 1
        deepest = max(deepest, depth)
        lines = number + checked  # inputs of the rows that check
        if number & (number - 1) and lines & (lines - 1) and number < len(every):
            continue  # to save time: rated are powers of two, of drafts or of inputs, and all
        rate = (rows + gained) / seconds(checked, number, deepest)
        if rate > best:
            best, chosen = rate, number
    for _, row, _ in every[:chosen]:
        depths[row] += 1
    return depths
