"""Writing into a pool of blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import Constant, kernel

THREADS = 256
PIECE = 16  # bytes that a thread copies


def write(pool: mx.array, fresh: mx.array, slots: mx.array) -> mx.array:
    """Puts fresh [n, heads, size] at tokens `slots` [n] of pool [blocks, heads, block, size].

    Returns a 0 that readers have to add to the places that they read.
    """
    _, heads, block, size = pool.shape
    found: list[mx.array] = _kernel(heads, block, size, pool.dtype)(
        inputs=[pool, mx.contiguous(fresh.astype(pool.dtype)), slots],
        grid=(-(-fresh.size // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return found[0]


def copy(pool: mx.array, blocks: mx.array) -> mx.array:
    """The first of `blocks` [2] of pool [blocks, heads, block, size] into the other.

    Returns a 0, see `write`.
    """
    _, heads, block, size = pool.shape
    count = heads * block * size * pool.dtype.size // PIECE
    found: list[mx.array] = _copier(count)(
        inputs=[pool, blocks],
        grid=(-(-count // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return found[0]


@cache
def _copier(count: int) -> Any:
    return kernel("block_copy", ["pool", "blocks"], ["done"], {"COUNT": count})


@cache
def _kernel(heads: int, block: int, size: int, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"HEADS": heads, "BLOCK": block, "SIZE": size, "N": dtype}
    return kernel("block_write", ["pool", "fresh", "slots"], ["done"], constants)
