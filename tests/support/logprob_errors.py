"""Compares the log-probabilities of an engine in bfloat16 with those of another computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxpool.worker.scheduling.sequence import SampledToken

USUAL, WORST = 0.1, 0.5  # nats that rounding to bfloat16 costs: the median, and any token
LEAST_COMPARED = 20  # log-probabilities, so that an empty comparison fails


def assert_near(
    ours: Sequence[Sequence[SampledToken]], others: Sequence[Sequence[SampledToken]]
) -> None:
    """Compares the likeliest tokens of rows, each as far as both drew the same tokens."""
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
