"""Adds two arrays and computes the RMS norm of the sum, in one kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
)

NUMBERS_PER_THREAD = 8
MAX_SIZE = 1024 * NUMBERS_PER_THREAD  # of the last axis


@cache
def supports(size: int, dtype: mx.Dtype) -> bool:
    """Returns whether `add_norm` supports a last axis of `size`; the first call tries it."""
    if dtype not in HALF_DTYPES or size % NUMBERS_PER_THREAD or size > MAX_SIZE:
        return False
    return kernel_works("norms", lambda: _is_right(size, dtype))


def add_norm(x: mx.array, y: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Returns x + y [T, d] and its norm times weight [d], rounded like the single operations."""
    size = x.shape[-1]
    threads = -(-size // (NUMBERS_PER_THREAD * WARP_SIZE)) * WARP_SIZE
    added, normed = _kernel(size, threads, float(eps), x.dtype)(
        inputs=[x, y, weight],
        grid=(x.size // size * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
    return added, normed


@cache
def _kernel(size: int, threads: int, eps: float, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"SIZE": size, "THREADS": threads, "EPS": eps, "N": dtype}
    return build_kernel(
        "rms_norm", ["x", "y", "weight"], ["added", "normed"], constants, contiguous=True
    )


def _is_right(size: int, dtype: mx.Dtype) -> bool:
    x, y = (mx.random.normal((2, size), key=mx.random.key(n)).astype(dtype) for n in range(2))
    weight = mx.arange(size).astype(dtype) / size
    added, normed = add_norm(x, y, weight, 1e-5)
    expected = mx.fast.rms_norm(x + y, weight, 1e-5)
    return bool(mx.allclose(added, x + y).item() and mx.allclose(normed, expected, 0.02).item())
