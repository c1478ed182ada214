"""Kernels that read some columns of each row of an array, or add values to them.

Sampling needs both operations over the vocabulary: log-probabilities of tokens, counts of tokens,
biases. MLX would compile a kernel for each type of index, which takes 3 to 5 seconds of a first
load.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels.kernel_builder import build_kernel, kernel_works

TAKE_THREADS = 256
SUM_THREADS = 1024


@cache
def works() -> bool:
    """Returns whether these kernels work on this device; the first call tries them."""
    return kernel_works("columns of rows", _are_right)


def take_columns(table: mx.array, ids: mx.array) -> mx.array:
    """Returns table[r, ids[r, j]] [R, k] of `table` [R, V] and int32 column `ids` [R, k]."""
    outputs: list[mx.array] = _take_kernel()(
        inputs=[table, ids],
        grid=(-(-ids.size // TAKE_THREADS) * TAKE_THREADS, 1, 1),
        threadgroup=(TAKE_THREADS, 1, 1),
        output_shapes=[ids.shape],
        output_dtypes=[table.dtype],
    )
    return outputs[0]


def column_sums(ids: mx.array, values: mx.array, size: int) -> mx.array:
    """Returns the sums of values in each of `size` columns of each row: float32 [R, size].

    values[r, j] is added to column ids[r, j] of row r. `ids` [R, k] are int32, `values` float32 of
    the same shape. If `values` is [1, 1], its number is added for each id. Ids below 0, and of
    `size` or more, are skipped. The order of the additions is not fixed, so the values must be
    numbers whose sums need no rounding.
    """
    rows = ids.shape[0]
    outputs: list[mx.array] = _sum_kernel(size, values.size > 1)(
        inputs=[ids, values],
        grid=(rows * SUM_THREADS, 1, 1),
        threadgroup=(SUM_THREADS, 1, 1),
        output_shapes=[(rows, size)],
        output_dtypes=[mx.float32],
    )
    return outputs[0]


@cache
def _take_kernel() -> Any:
    return build_kernel("take_numbers", ["table", "ids"], ["out"], {}, contiguous=True)


@cache
def _sum_kernel(size: int, each: bool) -> Any:
    constants = {"SIZE": size, "EACH": each}
    return build_kernel("column_sums", ["ids", "values"], ["out"], constants, contiguous=True)


def _are_right() -> bool:
    ids = mx.array([[2, 0, 2], [5, -1, 1]], dtype=mx.int32)
    counts = column_sums(ids, mx.ones((1, 1)), 4)
    sums = column_sums(ids, mx.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), 4)
    taken = take_columns(
        mx.concatenate([counts, sums], axis=1), mx.array([[2, 6], [1, 5]], mx.int32)
    )
    expected = (
        (counts, [[1, 0, 2, 0], [0, 1, 0, 0]]),
        (sums, [[2, 0, 5, 0], [0, 32, 0, 0]]),
        (taken, [[2, 5], [1, 32]]),
    )
    return all(np.array_equal(np.array(result), right) for result, right in expected)
