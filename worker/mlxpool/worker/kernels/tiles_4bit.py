"""Affine 4-bit weights in tiles, ordered for tensor cores; see tiles_4bit.cuh."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    Constant,
    build_kernel,
    declarations,
    include_line,
    kernel_works,
)

BITS = 4
GROUPS = (32, 64)  # sizes of groups
TILE = 64  # rows and columns of a tile
FRAGMENTS = 4  # fragments of a tile, with 16 rows each
THREADS = 256
NUMBERS_PER_THREAD = 8  # numbers that a thread dequantises


def fits(rows: int, columns: int, group: int, dtype: mx.Dtype) -> bool:
    """Returns whether a weight [rows, columns] with scales of `dtype` can be put into tiles."""
    whole = rows > 0 and rows % TILE == 0 and columns > 0 and columns % TILE == 0
    return whole and group in GROUPS and dtype in HALF_DTYPES


def fragment_bytes(group: int) -> int:
    """Returns the bytes of a fragment: 16 rows and 64 columns, with scales and biases."""
    return 512 + 64 * (TILE // group)


def header(group: int) -> str:
    """Returns the C++ code with which kernels that read tiles begin."""
    files = ("raised_numbers.cuh", "tiles_4bit.cuh")
    return declarations({"GROUP": group}) + "".join(map(include_line, files))


def in_tiles(weight: mx.array, scales: mx.array, biases: mx.array, group: int) -> mx.array:
    """Returns tiles [out / 64, in / 64, words] in uint32 of a `weight` [out, in / 8] in uint32.

    scales and biases are [out, in / group].
    """
    rows, columns = weight.shape[0], weight.shape[1] * NUMBERS_PER_THREAD
    words = FRAGMENTS * fragment_bytes(group) // 4
    shape = (rows // TILE, columns // TILE, words)
    outputs: list[mx.array] = _tile_kernel(group, scales.dtype)(
        inputs=[weight, scales, biases],
        grid=(_rounded_up(shape[0] * shape[1] * words), 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.uint32],
    )
    return outputs[0]


def dequantised_rows(
    tiles: mx.array, ids: mx.array | None, group: int, dtype: mx.Dtype
) -> mx.array:
    """Returns the rows `ids` [T], int32, of a weight in tiles -> [T, in]; None: all rows.

    `dtype` is the dtype of the weight's scales.
    """
    columns = tiles.shape[1] * TILE
    lines = tiles.shape[0] * TILE if ids is None else ids.shape[0]
    threads = lines * columns // NUMBERS_PER_THREAD // (2 if ids is None else 1)
    outputs: list[mx.array] = _rows_kernel(group, dtype, ids is None)(
        inputs=[tiles, tiles if ids is None else ids],
        grid=(_rounded_up(threads), 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, columns)],
        output_dtypes=[dtype],
    )
    return outputs[0]


def _rounded_up(threads: int) -> int:
    return -(-threads // THREADS) * THREADS


@cache
def _tile_kernel(group: int, dtype: mx.Dtype) -> Any:
    return build_kernel(
        "tile_4bit",
        ["weight", "scales", "biases"],
        ["out"],
        {"N": dtype},
        contiguous=True,
        header=header(group),
    )


@cache
def _rows_kernel(group: int, dtype: mx.Dtype, whole: bool) -> Any:
    constants: dict[str, Constant] = {"ALL": whole, "N": dtype}
    return build_kernel(
        "rows_4bit",
        ["tiles", "ids"],
        ["out"],
        constants,
        contiguous=True,
        header=header(group),
    )


@cache
def works(group: int, dtype: mx.Dtype) -> bool:
    """Returns whether conversion to tiles and dequantisation work on this device."""
    return kernel_works("weights of 4 bits in tiles", lambda: _is_right(group, dtype))


def _is_right(group: int, dtype: mx.Dtype) -> bool:
    numbers = mx.random.normal((2 * TILE, 4 * TILE), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(numbers, group_size=group, bits=BITS)
    expected = mx.dequantize(*packed, group_size=group, bits=BITS)
    tiles, ids = in_tiles(*packed, group), [77, 3, 3]
    whole = dequantised_rows(tiles, None, group, dtype)
    if not mx.allclose(whole, expected, 0.02, 0.02).item():
        return False
    rows = dequantised_rows(tiles, mx.array(ids, dtype=mx.int32), group, dtype)
    taken, all_rows = (np.array(array.astype(mx.float32)) for array in (rows, whole))
    return bool((taken == all_rows[ids]).all())
