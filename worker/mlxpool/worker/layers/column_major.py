"""Column-major weights, which small products on the CPU read faster.

MLX transposes a matrix one number at a time, ten times slower than a file is read. Transposing
strips of rows that fit the processor's first cache, in several threads, is as fast as reading.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx

try:
    import numpy as np
except ImportError:  # comes with the extra `cpu`; without it loading takes longer
    np = None  # type: ignore[assignment]

STRIP_ROWS = 16  # rows transposed together: in float32 they fill whole cache lines of a column
NUMBERS_PER_THREAD = 2**16  # from which on one more thread pays


def to_column_major(weights: Sequence[mx.array]) -> mx.array:
    """Matrices [out, in] concatenated along `out`, in column-major order."""
    rows = sum(weight.shape[0] for weight in weights)
    if np is None or any(weight.dtype != mx.float32 for weight in weights):
        columns = mx.contiguous(mx.concatenate(list(weights)).T)
        mx.eval(columns)
        return columns.T
    columns = mx.zeros((weights[0].shape[1], rows))
    mx.eval(columns, *weights)
    target, begin = np.array(columns, copy=False), 0  # a view of the array, not a copy
    for weight in weights:
        end = begin + weight.shape[0]
        _transpose_into(np.array(weight, copy=False), target[:, begin:end])
        begin = end
    return columns.T


def _transpose_into(source: np.ndarray, target: np.ndarray) -> None:
    """target = source.T, strip by strip; NumPy releases the GIL meanwhile."""
    rows = source.shape[0]
    threads = max(1, min(os.cpu_count() or 1, source.size // NUMBERS_PER_THREAD))
    share = -(-rows // (threads * STRIP_ROWS)) * STRIP_ROWS

    def strips(start: int) -> None:
        for row in range(start, min(start + share, rows), STRIP_ROWS):
            target[:, row : row + STRIP_ROWS] = source[row : row + STRIP_ROWS].T

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(strips, range(0, rows, share)):
            pass
