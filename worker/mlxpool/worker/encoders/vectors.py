"""Truncates embedding vectors to the number of dimensions of a request; normalises them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxpool.common.errors import BadRequest

Vectors = npt.NDArray[np.float32]
MIN_LENGTH = 1e-12  # a shorter vector is divided by this length, so that zeros stay zeros


def require_dimensions(wanted: int, dimensions: int) -> None:
    """Raises BadRequest unless `wanted` is from 1 to `dimensions`, the model's vector length."""
    if not 1 <= wanted <= dimensions:
        raise BadRequest(
            f"dimensions is {wanted}, must be from 1 to {dimensions}, the size of this model's"
            " vectors"
        )


def finished(vectors: Vectors, dimensions: int, *, normalise: bool) -> Vectors:
    """Returns the first `dimensions` numbers of vectors [n, d]; 0: all numbers.

    `normalise`: divides the vectors by their lengths.
    """
    cut = vectors[:, :dimensions] if dimensions else vectors
    if not normalise:
        return np.ascontiguousarray(cut)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.ascontiguousarray(cut / np.maximum(lengths, MIN_LENGTH))
