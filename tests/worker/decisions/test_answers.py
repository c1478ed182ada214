"""Tests the probabilities of answers, computed from token probabilities, on a small language."""

from __future__ import annotations

import math
from itertools import product

import pytest

from mlxpool.worker.decisions.answers import Answers, Found, Path, decided, kept_forms

END = 9


def shares(branch: Path) -> dict[int, float]:
    """Returns probabilities of the tokens 0 to 9 after a branch, different for each branch."""
    weights = [1 + (sum(branch) * 7 + len(branch) * 3 + token * token) % 11 for token in range(10)]
    return {token: weight / sum(weights) for token, weight in enumerate(weights)}


def found_of(answers: Answers) -> Found:
    return {
        branch: {token: math.log(shares(branch)[token]) for token in tokens}
        for branch, tokens in answers.branches().items()
    }


def probability(path: Path) -> float:
    return math.prod(shares(path[:at])[token] for at, token in enumerate(path))


def test_branches_are_the_beginnings_of_answers() -> None:
    answers = Answers((((1,),), ((1, 0), (5, 1, 0)), ((2,), (5, 2))))
    assert answers.branches() == {(): (1, 2, 5), (1,): (0,), (5,): (1, 2), (5, 1): (0,)}
    assert next(iter(answers.branches())) == ()


def test_masses_are_those_of_all_texts_that_begin_with_an_answer() -> None:
    """The probability of each text of three tokens is added to the answer with which it begins.

    If the text begins with several answers, its probability is added to the longest.
    """
    answers = Answers((((1,),), ((1, 0),), ((2,), (5, 2)), ((7, 7, 7),)))
    labels = {path: index for index, paths in enumerate(answers.paths) for path in paths}
    masses = [0.0] * len(answers.paths)
    for text in product(range(10), repeat=3):
        begins = [path for path in labels if text[: len(path)] == path]
        if begins:
            masses[labels[max(begins, key=len)]] += probability(text)
    result = decided(answers, found_of(answers), 1.0)
    assert result.outside == pytest.approx(1 - sum(masses))
    assert result.probabilities == pytest.approx([mass / sum(masses) for mass in masses])


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 3.0, 100.0])
def test_a_temperature_keeps_the_order_and_the_mass_outside(temperature: float) -> None:
    answers = Answers((((1,),), ((2,),), ((3,),)))
    plain = decided(answers, found_of(answers), 1.0)
    changed = decided(answers, found_of(answers), temperature)
    powers = [value ** (1 / temperature) for value in plain.probabilities]
    assert changed.probabilities == pytest.approx([power / sum(powers) for power in powers])
    assert changed.outside == plain.outside


def test_numbers_far_below_those_of_floats() -> None:
    answers = Answers((((1,),), ((2,),)))
    far = decided(answers, {(): {1: -2000.0, 2: -2001.0}}, 1.0)
    assert far.probabilities == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    assert far.outside == 1.0
    none = decided(answers, {(): {1: -math.inf, 2: -math.inf}}, 1.0)
    assert none.probabilities == (0.5, 0.5) and none.outside == 1.0
    sure = decided(answers, {(): {1: 1e-7, 2: -30.0}}, 1.0)  # rounding may give more than 1
    assert sure.outside == 0.0 and sure.probabilities[0] == pytest.approx(1)


def test_a_branch_whose_longer_answers_have_all_the_mass() -> None:
    answers = Answers((((1,),), ((1, 0),)))
    result = decided(answers, {(): {1: -0.1}, (1,): {0: 0.0}}, 1.0)
    assert result.probabilities == pytest.approx([0, 1])


def test_forms_that_need_other_branches_are_left_out() -> None:
    expected, single, other = [(1, 2), (3,)], [(4,), (5,)], [(6, 2), (7,)]
    kept = kept_forms([expected, single, other, [(1, 9), (3,)]])
    assert kept == (((1, 2), (4,), (1, 9)), ((3,), (5,)))
    assert kept_forms([[(1,), (2,)], [(1,), (2,)]]) == (((1,),), ((2,),))


def test_labels_with_the_same_tokens_are_found() -> None:
    assert Answers((((1,),), ((2,), (3,)), ((3,),))).twice() == (1, 2)
    assert Answers((((1,), (1, 2)), ((2,),))).twice() is None
