"""A sum and its root-mean-square norm in one kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALVES, LANES, Constant, kernel, works

EACH = 8  # numbers of a thread
MOST = 1024 * EACH  # numbers of a line


@cache
def serves(size: int, dtype: mx.Dtype) -> bool:
    """Whether `add_norm` takes lines of `size` numbers here; the first call tries it."""
    if dtype not in HALVES or size % EACH or size > MOST:
        return False
    return works("norms", lambda: _right(size, dtype))


def add_norm(x: mx.array, y: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """x + y [T, d] and its norm, weighed with weight [d]; rounded as the single steps round."""
    size = x.shape[-1]
    threads = -(-size // (EACH * LANES)) * LANES
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
    return kernel("rms_norm", ["x", "y", "weight"], ["added", "normed"], constants, whole=True)


def _right(size: int, dtype: mx.Dtype) -> bool:
    x, y = (mx.random.normal((2, size), key=mx.random.key(n)).astype(dtype) for n in range(2))
    weight = mx.arange(size).astype(dtype) / size
    added, normed = add_norm(x, y, weight, 1e-5)
    expected = mx.fast.rms_norm(x + y, weight, 1e-5)
    return bool(mx.allclose(added, x + y).item() and mx.allclose(normed, expected, 0.02).item())
