"""Writes the keys and values of tokens into a pool of blocks, and copies blocks."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.kernels.kernel_builder import (
    WARP_SIZE,
    Constant,
    build_kernel,
    include_line,
    kernel_works,
    write_in_place,
)

THREADS = 256
COPY_BYTES = 16  # bytes that a thread copies
VECTOR = 8  # numbers in 16 bytes
LINE_INPUTS = ("q", "k", "v", "keys", "values", "slots", "cosines", "sines")
QUANTISED_INPUTS = (
    "q", "k", "v", "keys", "values", "key_scales", "value_scales", "slots", "cosines", "sines",
)  # fmt: skip


class RopeTables(Struct, frozen=True):
    """The cosines and sines [T, ..., D / 2] of RoPE in float32, for D numbers of each head."""

    cosines: mx.array
    sines: mx.array
    traditional: bool


def rope_tables(
    positions: mx.array, frequencies: mx.array, scale: float, gain: float
) -> tuple[mx.array, mx.array]:
    """Returns cosines and sines [T, 1, D / 2] of positions [T] times angular frequencies [D / 2].

    Positions are multiplied by `scale`, cosines and sines by `gain`.
    """
    lines, half = positions.shape[0], frequencies.shape[0]
    cosines, sines = _tables_kernel(half, scale, gain)(
        inputs=[positions, frequencies],
        grid=(-(-lines * half // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, 1, half)] * 2,
        output_dtypes=[mx.float32] * 2,
    )
    return cosines, sines


@cache
def makes_tables() -> bool:
    """Returns whether `rope_tables` works on this device; the first call tries it."""
    return kernel_works("angles of positions", _tables_are_right)


def _tables_are_right() -> bool:
    # Compared on the host: MLX would compile a kernel for each operation.
    positions, frequencies = np.array([0, 7, 100_000]), np.array([1.0, 0.125, 1e-4])
    angles = (positions[:, None] * 0.5 * frequencies).astype(np.float32)
    tables = rope_tables(
        mx.array(positions.astype(np.int32)), mx.array(frequencies.astype(np.float32)), 0.5, 2.0
    )
    expected = 2 * np.cos(angles), 2 * np.sin(angles)
    pairs = zip(tables, expected, strict=True)
    return all(np.allclose(np.array(table)[:, 0], right, atol=1e-2) for table, right in pairs)


def rotate_and_write(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pools: tuple[mx.array, ...],
    slots: mx.array,
    turns: RopeTables | None,
) -> mx.array:
    """Rotates q [T, H, D] and k [T, KV, D], writes k and v into the pools; returns rotated q.

    Token t is written into slot slots[t] of the pools [blocks, KV, block, D]. A token with slot -1
    is padding: it is not written, and its q is zeros. q, k and v may be views. Readers of the pools
    must depend on the result, see the package. Four pools have 8-bit keys and values, and scales
    [blocks, KV, block, 1]; q, k and v then share a dtype of 16 bits.
    """
    if is_quantised(pools):
        return _rotate_and_quantise(q, k, v, pools, slots, turns)
    lines, heads, size = q.shape
    _, pairs, block, _ = pools[0].shape
    dtype, none = pools[0].dtype, mx.zeros((1,))
    cosines, sines = (none, none) if turns is None else (turns.cosines, turns.sines)
    turned = 0 if turns is None else 2 * cosines.shape[-1]
    each = math.gcd(VECTOR, turned // 2)  # gcd(8, 0) is 8
    traditional = turns is not None and turns.traditional
    kernel = _rotate_kernel(heads // pairs, pairs, size, block, turned, traditional, each, dtype)
    count = (heads + 2 * pairs) * size // (2 * each)
    outputs: list[mx.array] = kernel(
        inputs=[*(array.astype(dtype) for array in (q, k, v)), *pools, slots, cosines, sines],
        grid=(-(-count // THREADS) * THREADS, lines, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, heads, size)],
        output_dtypes=[dtype],
    )
    return outputs[0].astype(q.dtype)


def is_quantised(pools: tuple[mx.array, ...]) -> bool:
    """Returns whether a layer's pools have integers and scales, see caches/stored.py."""
    return len(pools) == 4


def _rotate_and_quantise(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pools: tuple[mx.array, ...],
    slots: mx.array,
    turns: RopeTables | None,
) -> mx.array:
    lines, heads, size = q.shape
    _, pairs, block, _ = pools[0].shape
    none = mx.zeros((1,))
    cosines, sines = (none, none) if turns is None else (turns.cosines, turns.sines)
    turned = 0 if turns is None else 2 * cosines.shape[-1]
    traditional = turns is not None and turns.traditional
    kernel = _quantise_kernel(heads // pairs, pairs, size, block, turned, traditional, q.dtype)
    threads = (heads + 2 * pairs) * WARP_SIZE
    outputs: list[mx.array] = kernel(
        inputs=[q, k, v, *pools, slots, cosines, sines],
        grid=(-(-threads // THREADS) * THREADS, lines, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, heads, size)],
        output_dtypes=[q.dtype],
    )
    return outputs[0]


def write_tokens(pool: mx.array, fresh: mx.array, slots: mx.array) -> mx.array:
    """Writes `fresh` [n, heads, size] into `slots` [n] of `pool` [blocks, heads, block, size].

    Returns a 0 that readers of the pool must add to their indices, see the package.
    """
    _, heads, block, size = pool.shape
    inputs = [pool, mx.contiguous(fresh.astype(pool.dtype)), slots]
    return write_in_place(_write_kernel(heads, block, size, pool.dtype), inputs, fresh.size)


def copy_block(pool: mx.array, blocks: mx.array) -> mx.array:
    """Copies block blocks[0] of the pool [blocks, heads, block, size] to block blocks[1].

    Returns a 0, see `write_tokens`.
    """
    _, heads, block, size = pool.shape
    count = heads * block * size * pool.dtype.size // COPY_BYTES
    return write_in_place(_copy_kernel(count), [pool, blocks], count)


@cache
def _copy_kernel(count: int) -> Any:
    return build_kernel("block_copy", ["pool", "blocks"], ["done"], {"COUNT": count})


@cache
def _tables_kernel(half: int, scale: float, gain: float) -> Any:
    constants: dict[str, Constant] = {"HALF": half, "SCALE": float(scale), "GAIN": float(gain)}
    return build_kernel(
        "rope_tables", ["positions", "turns"], ["cosines", "sines"], constants, contiguous=True
    )


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
def _quantise_kernel(
    group: int,
    pairs: int,
    size: int,
    block: int,
    turned: int,
    traditional: bool,
    dtype: mx.Dtype,
) -> Any:
    constants: dict[str, Constant] = {
        "GROUP": group,
        "HEADS": pairs,
        "SIZE": size,
        "BLOCK": block,
        "TURNED": turned,
        "TRADITIONAL": traditional,
        "N": dtype,
    }
    header = include_line("integers.cuh")
    return build_kernel("rotate_and_quantise", QUANTISED_INPUTS, ["out"], constants, header=header)


@cache
def _write_kernel(heads: int, block: int, size: int, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"HEADS": heads, "BLOCK": block, "SIZE": size, "N": dtype}
    return build_kernel("block_write", ["pool", "fresh", "slots"], ["done"], constants)
