"""Decides by a trial whether our kernels can write a model's KV pool, and logs a failure."""

from __future__ import annotations

import logging
from functools import cache

import mlx.core as mx

from mlxpool.worker.attention.in_pool.kv_pool import KVPool
from mlxpool.worker.attention.row_shape import RowShape

log = logging.getLogger("mlxpool.worker")


@cache
def kernels_write(shape: RowShape) -> bool:
    """Returns True if our kernels can write the pool; tries them once and logs a failure."""
    try:
        pool = KVPool(shape, 1, in_place=True)
        here = mx.array([[0]], dtype=mx.int32)
        for layer, arrays in enumerate(pool.arrays):
            numbers = arrays[: len(arrays) // 2] if shape.quantised else arrays  # without scales
            fresh = tuple(mx.ones((1, array.shape[1], array.shape[3])) for array in numbers)
            mx.eval(pool.write(layer, fresh, mx.array([1], dtype=mx.int32), here))
            # Slices blocks, because MLX would compile a kernel to gather them.
            written = shape.read(tuple(array[:1, :, 1:2] for array in arrays))
            if not all(bool(mx.allclose(array, mx.ones(1), 0.01).item()) for array in written):
                raise RuntimeError("the written numbers were not read back")
    except (RuntimeError, ValueError) as error:
        log.warning("our CUDA kernels do not work here, the KV cache is not paged: %s", error)
        return False
    return True
