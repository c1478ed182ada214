"""Chooses the number of drafts of each sequence that gives the most tokens a second. Pure."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import accumulate
from operator import itemgetter, mul

MIN_GAIN = 1.08  # the least ratio of tokens a second with drafts to tokens a second without


def choose_depths(
    chances: Many[Many[float]],
    rows: int,
    most: int,
    plain: float,
    seconds: Callable[[int, int, int], float],
    least_gain: float = MIN_GAIN,
) -> list[int]:
    """Returns the number of drafts to check for each sequence that can have drafts.

    `chances`: for each of these sequences, the probability of each draft to be right if the drafts
    before it are right. `rows`: the number of all sequences in the step, including those without
    drafts. `most`: the most drafts of all sequences together. `plain`: seconds of the step without
    drafts. `seconds(checking, drafts, deepest)`: seconds of a step in which `checking` sequences
    have `drafts` drafts together, at most `deepest` each. All returned numbers are 0 if the step
    would give less than `least_gain` times the tokens per second of a step without drafts.
    """
    ranked = sorted(
        (
            (chance, row, depth)
            for row, some in enumerate(chances)
            for depth, chance in enumerate(accumulate(some, mul), start=1)
        ),
        key=itemgetter(0),
        reverse=True,  # stable: the drafts of a sequence stay in order
    )[:most]
    best, depths = least_gain * rows / plain, [0] * len(chances)
    gained, checked, deepest, chosen = 0.0, 0, 0, 0
    for number, (chance, _, depth) in enumerate(ranked, start=1):
        gained += chance
        checked += depth == 1
        deepest = max(deepest, depth)
        lines = number + checked  # inputs of the sequences with drafts
        if number & (number - 1) and lines & (lines - 1) and number < len(ranked):
            continue  # to save time, tries only powers of two (drafts or inputs) and the last
        rate = (rows + gained) / seconds(checked, number, deepest)
        if rate > best:
            best, chosen = rate, number
    for _, row, _ in ranked[:chosen]:
        depths[row] += 1
    return depths
