"""Tests the options of requested vectors: dimensions and normalisation."""

from __future__ import annotations

import numpy as np
import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.worker.encoders.vectors import finished, require_dimensions

VECTORS = np.array([[3, 4, 12], [0, 0, 0]], np.float32)


def test_the_first_dimensions_are_normalised_after_they_are_cut() -> None:
    vectors = finished(VECTORS, 2, normalise=True)
    assert vectors.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0, 0]]


def test_vectors_stay_as_they_are_without_both() -> None:
    assert finished(VECTORS, 0, normalise=False).tolist() == VECTORS.tolist()


@pytest.mark.parametrize("wanted", [0, -1, 4])
def test_dimensions_that_the_model_has_not_are_refused(wanted: int) -> None:
    with pytest.raises(BadRequest, match=f"dimensions is {wanted}, must be from 1 to 3"):
        require_dimensions(wanted, 3)
