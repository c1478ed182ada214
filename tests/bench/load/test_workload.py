"""The random requests of a load test: their lengths, token ids and times of arrival."""

from __future__ import annotations

import statistics
from itertools import pairwise
from random import Random

import pytest

from mlxpool.bench.load.workload import VOCABULARY, WORDS, Lengths, Workload, draw, text_of

PROMPT, OUTPUT = Lengths(270, 1.0, 16, 3000), Lengths(121, 0.7, 16, 512)
MANY = Workload(4000, PROMPT, OUTPUT)


def test_lengths_have_their_median_and_bounds() -> None:
    requests = draw(MANY, 0.0, "0 1")
    for lengths, drawn in (
        (PROMPT, [len(request.prompt) for request in requests]),
        (OUTPUT, [request.output for request in requests]),
    ):
        assert statistics.median(drawn) == pytest.approx(lengths.median, rel=0.06)
        assert min(drawn) == lengths.minimum and max(drawn) == lengths.maximum


def test_a_sigma_of_0_gives_the_median() -> None:
    assert {Lengths(32.5, 0.0, 1, 100).draw(Random(seed)) for seed in range(9)} == {32}


def test_arrivals_are_a_poisson_process() -> None:
    due = [request.due for request in draw(MANY, 20.0, "0 1")]
    gaps = [after - before for before, after in pairwise(due)]
    assert due[0] == 0.0 and min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.1)


def test_a_rate_of_0_is_all_at_once() -> None:
    assert {request.due for request in draw(MANY, 0.0, "0 1")} == {0.0}


def test_the_same_seed_gives_the_same_requests_at_every_rate() -> None:
    work = Workload(20, PROMPT, OUTPUT)
    once, again, paced, other = (
        draw(work, rate, seed)
        for rate, seed in ((0.0, "3 1"), (0.0, "3 1"), (5.0, "3 1"), (0.0, "3 2"))
    )
    assert once == again
    assert [(r.prompt, r.output) for r in once] == [(r.prompt, r.output) for r in paced]
    assert [len(r.prompt) for r in once] != [len(r.prompt) for r in other]


def test_a_draw_stays_the_same_over_versions() -> None:
    first = draw(Workload(3, PROMPT, OUTPUT), 2.0, "0 0")
    assert [(len(r.prompt), r.output, round(r.due, 3)) for r in first] == [
        (100, 368, 0.0),
        (120, 170, 1.227),
        (263, 50, 2.635),
    ]
    assert all(0 <= int(token) < VOCABULARY for request in first for token in request.prompt)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((270, 1.0, 0, 100), "lengths from 0 to 100"),
        ((270, 1.0, 9, 8), "need 1 <= MIN <= MAX"),
        ((0, 1.0, 1, 8), "a median above 0"),
        ((5, -1.0, 1, 8), "sigma of 0 or more"),
        ((float("nan"), 1.0, 1, 8), "a median above 0"),
        ((float("inf"), 1.0, 1, 8), "a median above 0"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(
    given: tuple[float, float, int, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Lengths(*given)


def test_a_text_has_a_word_for_each_id() -> None:
    assert text_of([0, 1, len(WORDS)]) == "the of the"
    assert len(set(WORDS)) == len(WORDS)
