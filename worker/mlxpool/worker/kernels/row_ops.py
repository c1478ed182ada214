"""Kernels over the rows [T, d] of a step: norms, gated activations, and rows of a table."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
)

NUMBERS_PER_THREAD = 8
MAX_NORM_SIZE = 1024 * NUMBERS_PER_THREAD
THREADS = 256  # threads of a thread block of `swiglu` and `take_rows`
COPY_BYTES = 16  # bytes that a thread copies


@cache
def supports_norm(size: int, dtype: mx.Dtype) -> bool:
    """Returns whether `add_norm` supports rows of `size` numbers; the first call tries it."""
    if dtype not in HALF_DTYPES or size % NUMBERS_PER_THREAD or size > MAX_NORM_SIZE:
        return False
    return kernel_works("norms", lambda: _norm_is_right(size, dtype))


def add_norm(x: mx.array, y: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Returns x + y [T, d], and the RMS norm of this sum times `weight` [d].

    Both results are rounded like the separate operations.
    """
    size = x.shape[-1]
    threads = -(-size // (NUMBERS_PER_THREAD * WARP_SIZE)) * WARP_SIZE
    added, normed = _norm_kernel(size, threads, float(eps), x.dtype)(
        inputs=[x, y, weight],
        grid=(x.size // size * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
    return added, normed


@cache
def _norm_kernel(size: int, threads: int, eps: float, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"SIZE": size, "THREADS": threads, "EPS": eps, "N": dtype}
    return build_kernel(
        "rms_norm", ["x", "y", "weight"], ["added", "normed"], constants, contiguous=True
    )


def _norm_is_right(size: int, dtype: mx.Dtype) -> bool:
    x, y = (mx.random.normal((2, size), key=mx.random.key(n)).astype(dtype) for n in range(2))
    weight = mx.arange(size).astype(dtype) / size
    added, normed = add_norm(x, y, weight, 1e-5)
    expected = mx.fast.rms_norm(x + y, weight, 1e-5)
    return bool(mx.allclose(added, x + y).item() and mx.allclose(normed, expected, 0.02).item())


@cache
def supports_swiglu(width: int, dtype: mx.Dtype) -> bool:
    """Returns whether `swiglu` supports this width and dtype; the first call tries it."""
    fits = dtype in HALF_DTYPES and width % NUMBERS_PER_THREAD == 0
    return fits and kernel_works("gated feed-forwards", lambda: _gate_is_right(dtype))


def swiglu(both: mx.array) -> mx.array:
    """Returns silu(gate) * up [T, W] of both [T, 2 * W], gates first.

    The result is rounded like the separate operations. MLX's fused operation would read two views
    that are not contiguous, and MLX would compile it at each load.
    """
    lines, width = both.shape[0], both.shape[1] // 2
    threads = lines * width // NUMBERS_PER_THREAD
    outputs: list[mx.array] = _gate_kernel(width, both.dtype)(
        inputs=[both],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, width)],
        output_dtypes=[both.dtype],
    )
    return outputs[0]


@cache
def _gate_kernel(width: int, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"WIDTH": width, "N": dtype}
    return build_kernel("swiglu", ["both"], ["out"], constants, contiguous=True)


def _gate_is_right(dtype: mx.Dtype) -> bool:
    both = mx.random.normal((3, 64), key=mx.random.key(1)).astype(dtype)
    gate, up = (half.astype(mx.float32) for half in mx.split(both, 2, axis=1))
    expected = gate * mx.sigmoid(gate) * up
    return bool(mx.allclose(swiglu(both).astype(mx.float32), expected, 0.02, 0.02).item())


def supports_rows_of(table: mx.array) -> bool:
    """Returns whether `take_rows` supports rows of this table; the first call tries it."""
    return table.nbytes // table.shape[0] % COPY_BYTES == 0 and _takes(table.dtype)


@cache
def _takes(dtype: mx.Dtype) -> bool:
    return dtype in HALF_DTYPES and kernel_works("rows of a table", lambda: _take_is_right(dtype))


def take_rows(table: mx.array, ids: mx.array) -> mx.array:
    """Returns table[ids] [T, ...] of `table` [N, ...] and int32 `ids` [T], all below N.

    MLX would compile a kernel for this at each load.
    """
    shape = (ids.shape[0], *table.shape[1:])
    pieces = table.nbytes // table.shape[0] // COPY_BYTES
    outputs: list[mx.array] = _take_kernel(pieces)(
        inputs=[table, ids],
        grid=(-(-shape[0] * pieces // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[table.dtype],
    )
    return outputs[0]


@cache
def _take_kernel(pieces: int) -> Any:
    return build_kernel("take_rows", ["table", "ids"], ["out"], {"PIECES": pieces}, contiguous=True)


def _take_is_right(dtype: mx.Dtype) -> bool:
    table = mx.arange(4 * 8).reshape(4, 8).astype(dtype)
    rows = take_rows(table, mx.array([3, 0, 3], dtype=mx.int32))
    return bool((np.array(rows.astype(mx.float32))[:, 0] == [24, 0, 24]).all())
