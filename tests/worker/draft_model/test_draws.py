"""Tests draws of a draft model: each row's likeliest token, and its lead over the second."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.draft_model.draws import GROUP, likeliest  # noqa: E402
from mlxpool.worker.sampling.batch import NO_TOKEN  # noqa: E402


@pytest.mark.parametrize("size", [GROUP, 3 * GROUP, 3 * GROUP + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_without_numbers_has_no_token(size: int, dtype: str) -> None:
    """If a row's logits include a NaN or an infinite number, the row gets NO_TOKEN.

    Otherwise the row would get a draft that seems certain.
    """
    logits = np.zeros((4, size), np.float32)
    logits[0, size - 1], logits[0, 0] = 5.0, 2.0
    logits[1] = np.nan
    logits[2, 7] = np.nan
    logits[3, 7] = np.inf
    tokens, distances = likeliest(mx.array(logits).astype(getattr(mx, dtype)))
    assert tokens.tolist() == [size - 1, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert distances[0].item() == 3.0
