"""Products of few lines with a large weight, which take as long as reading it; of some: tiles.py.

MLX's own are as fast on the GPU, but cost its host side some 20 us each, and some of them keep it
from using a graph again (docs/benchmarks.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels import tiles
from mlxpool.worker.kernels.build import HALVES, LANES, kernel, warps_of, works

FEW = 16  # lines up to which a warp multiplies all of them with what it reads itself
COLUMNS = 32  # of a weight, that a warp takes at a time
ROWS = 16  # of a weight, that a thread block takes; of gated ones as many of both
FLIGHT = 64 * 1024  # bytes that a thread block has asked for at a time
MOST_STAGES = 8
MOST_WARPS = 16


@cache
def serves(lines: int, columns: int, rows: int, dtype: mx.Dtype) -> bool:
    """Whether `product` takes so many lines and a weight [rows, columns] here; it is tried once."""
    if lines > FEW:
        return tiles.serves(lines, columns, rows, dtype)
    if lines > FEW // 2 and columns * rows * dtype.size > tiles.LARGE:
        return False
    if lines <= 0 or dtype not in HALVES or rows % (2 * ROWS) or columns % COLUMNS:
        return False
    return _works(dtype)


def times(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] and weight [out, in] -> x @ weight.T [T, out], by our kernel or MLX's."""
    return product(x, weight) if reads(x, weight) else x @ weight.T


def reads(x: mx.array, weight: mx.array) -> bool:
    """Whether our kernel multiplies them."""
    fits = x.ndim == 2 and x.dtype == weight.dtype
    return fits and serves(x.shape[0], x.shape[1], weight.shape[0], x.dtype)


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] and weight [out, in] -> x @ weight.T [T, out]."""
    return _product(x, weight, gated=False)


def gated(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] and weight [2 * out, in], gates first -> silu(gate) * other [T, out]."""
    return _product(x, weight, gated=True)


def _product(x: mx.array, weight: mx.array, *, gated: bool) -> mx.array:
    lines, columns = x.shape
    if lines > FEW:
        return tiles.product(x, weight, gated=gated)
    out = weight.shape[0] // (1 + gated)
    warps = warps_of(columns // COLUMNS, MOST_WARPS)
    threads = warps * LANES
    found: list[mx.array] = _kernel(-(-lines // 8), warps, gated, x.dtype)(
        inputs=[x, weight],
        grid=(out // ROWS * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(lines, out)],
        output_dtypes=[x.dtype],
    )
    return found[0]


@cache
def _kernel(sets: int, warps: int, gated: bool, dtype: mx.Dtype) -> Any:
    """For 8 * `sets` lines."""
    tiles = 1 + gated
    stage = warps * LANES * tiles * 2 * 16
    stages = max(2, min(MOST_STAGES, FLIGHT // stage))
    sums = warps * tiles * ROWS * (8 * sets + 1) * 4
    return kernel(
        "product",
        ["x", "weight"],
        ["out"],
        {"SETS": sets, "WARPS": warps, "GATED": gated, "STAGES": stages, "N": dtype},
        whole=True,
        shared=max(stages * stage, sums),
        end="warp_sums.cuh",
    )


@cache
def _works(dtype: mx.Dtype) -> bool:
    return works("products of few lines", lambda: _right(dtype))


def _right(dtype: mx.Dtype) -> bool:
    weight = mx.random.normal((64, 256), key=mx.random.key(1)).astype(dtype)
    x = mx.random.normal((3, 256), key=mx.random.key(2)).astype(dtype)
    return bool(mx.allclose(product(x, weight), x @ weight.T, 0.02, 0.2).item())
