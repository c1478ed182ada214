"""Writes tokens into a pool of blocks, rotated or as they are, and copies a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import Constant, build_kernel

THREADS = 256
COPY_BYTES = 16  # that a thread copies
VECTOR = 8  # numbers of 16 bytes
LINE_INPUTS = ("q", "k", "v", "keys", "values", "slots", "cosines", "sines")


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines and sines [T, ..., D / 2] in float32, which rotate D numbers of each head."""

    cosines: mx.array
    sines: mx.array
    traditional: bool


def rotate_and_write(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pools: tuple[mx.array, mx.array],
    slots: mx.array,
    turns: RopeTables | None,
) -> mx.array:
    """Rotates q [T, H, D] and k [T, KV, D], writes k and v into the pools; returns q rotated.

    Line t goes into slot slots[t] of the pools [blocks, KV, block, D]. With slot -1 it is padding:
    nothing is written and its q is zeros. q, k and v may be views. Whatever reads the pools must
    depend on the result, see the package.
    """
    lines, heads, size = q.shape
    _, pairs, block, _ = pools[0].shape
    dtype, none = pools[0].dtype, mx.zeros((1,))
    cosines, sines = (none, none) if turns is None else (turns.cosines, turns.sines)
    turned = 0 if turns is None else 2 * cosines.shape[-1]
    each = math.gcd(VECTOR, turned // 2)  # gcd(8, 0) is 8
    traditional = turns is not None and turns.traditional
    made = _rotate_kernel(heads // pairs, pairs, size, block, turned, traditional, each, dtype)
    count = (heads + 2 * pairs) * size // (2 * each)
    found: list[mx.array] = made(
        inputs=[*(one.astype(dtype) for one in (q, k, v)), *pools, slots, cosines, sines],
        grid=(-(-count // THREADS) * THREADS, lines, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, heads, size)],
        output_dtypes=[dtype],
    )
    return found[0].astype(q.dtype)


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
def _rotate_kernel(
    group: int,
    pairs: int,
    size: int,
    block: int,
    turned: int,
    traditional: bool,
    each: int,
    dtype: mx.Dtype,
) -> Any:
    constants: dict[str, Constant] = {
        "GROUP": group,
        "HEADS": pairs,
        "SIZE": size,
        "BLOCK": block,
        "TURNED": turned,
        "TRADITIONAL": traditional,
        "EACH": each,
        "N": dtype,
    }
    return build_kernel("rotate_and_write", LINE_INPUTS, ["out"], constants)


@cache
def _write_kernel(heads: int, block: int, size: int, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"HEADS": heads, "BLOCK": block, "SIZE": size, "N": dtype}
    return build_kernel("block_write", ["pool", "fresh", "slots"], ["done"], constants)
