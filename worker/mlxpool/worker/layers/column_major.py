"""Weights laid out by columns, which the CPU's small products read faster.

MLX turns a matrix over one number at a time, ten times slower than it is read from a file. Strips
of rows that fit the processor's nearest cache, in several threads, keep up with the reading.
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

STRIP = 16  # rows turned over at once: their float32 fill whole cache lines of a column
SMALL = 2**16  # numbers for which a thread more pays


def to_column_major(parts: Sequence[mx.array]) -> mx.array:
    """Matrices [out, in] as one, the numbers of a column beside each other."""
    rows = sum(part.shape[0] for part in parts)
    if np is None or any(part.dtype != mx.float32 for part in parts):
        columns = mx.contiguous(mx.concatenate(list(parts)).T)
        mx.eval(columns)
        return columns.T
    columns = mx.zeros((parts[0].shape[1], rows))
    mx.eval(columns, *parts)
    target, begin = np.array(columns, copy=False), 0  # a view, as are the sources
    for part in parts:
        end = begin + part.shape[0]
        _turn_over(np.array(part, copy=False), target[:, begin:end])
        begin = end
    return columns.T


def _turn_over(source: np.ndarray, target: np.ndarray) -> None:
    """target = source.T, strip by strip; NumPy lets other threads run meanwhile."""
    rows = source.shape[0]
    threads = max(1, min(os.cpu_count() or 1, source.size // SMALL))
    share = -(-rows // (threads * STRIP)) * STRIP

    def strips(start: int) -> None:
        for row in range(start, min(start + share, rows), STRIP):
            target[:, row : row + STRIP] = source[row : row + STRIP].T

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(strips, range(0, rows, share)):
            pass
