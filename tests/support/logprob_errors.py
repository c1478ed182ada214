"""Compares an engine's bfloat16 log-probabilities with those of another computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxpool.worker.scheduling.sequence import SampledToken

USUAL, WORST = 0.1, 0.5  # bounds of errors by bfloat16, in nats: of the median, and of any token
LEAST_COMPARED = 20  # the fewest compared log-probabilities, so that an empty comparison fails


def assert_near(
    ours: Sequence[Sequence[SampledToken]], others: Sequence[Sequence[SampledToken]]
) -> None:
    """Asserts that log-probabilities are near, in each row up to the first token that differs."""
    errors: list[float] = []
    for row, other in zip(ours, others, strict=True):
        for mine, theirs in zip(row, other, strict=True):
            assert mine.logprob is not None and theirs.logprob is not None
            near, exact = dict(mine.logprob.top), dict(theirs.logprob.top)
            errors += [abs(near[token] - exact[token]) for token in near.keys() & exact.keys()]
            if mine.token != theirs.token:
                break
    assert len(errors) > LEAST_COMPARED
    assert np.median(errors) < USUAL and max(errors) < WORST
