"""Writes tokens into a pool of blocks, and copies a block."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import Constant, build_kernel

THREADS = 256
COPY_BYTES = 16  # that a thread copies


def write_tokens(pool: mx.array, fresh: mx.array, slots: mx.array) -> mx.array:
    """Writes fresh [n, heads, size] into slots [n] of pool [blocks, heads, block, size].

    Returns a 0 that readers must add to the indices that they read, see the package.
    """
    _, heads, block, size = pool.shape
    found: list[mx.array] = _write_kernel(heads, block, size, pool.dtype)(
        inputs=[pool, mx.contiguous(fresh.astype(pool.dtype)), slots],
        grid=(-(-fresh.size // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return found[0]


def copy_block(pool: mx.array, blocks: mx.array) -> mx.array:
    """Copies the first of `blocks` [2] of pool [blocks, heads, block, size] to the second.

    Returns a 0, see `write_tokens`.
    """
    _, heads, block, size = pool.shape
    count = heads * block * size * pool.dtype.size // COPY_BYTES
    found: list[mx.array] = _copy_kernel(count)(
        inputs=[pool, blocks],
        grid=(-(-count // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return found[0]


@cache
def _copy_kernel(count: int) -> Any:
    return build_kernel("block_copy", ["pool", "blocks"], ["done"], {"COUNT": count})


@cache
def _write_kernel(heads: int, block: int, size: int, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"HEADS": heads, "BLOCK": block, "SIZE": size, "N": dtype}
    return build_kernel("block_write", ["pool", "fresh", "slots"], ["done"], constants)
