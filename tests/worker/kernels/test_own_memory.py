"""Counters and barriers of kernels never get a freed buffer, which may be managed memory."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import matmul_tiled, token_grid  # noqa: E402

FREED = 2**20  # bytes
ALLOCATIONS: dict[str, Any] = {
    "barrier of a grid": lambda: token_grid.memory.__wrapped__("test", 100),
    "counters of a product": lambda: matmul_tiled.counters.__wrapped__(),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_the_cache_is_emptied_before_an_allocation(name: str) -> None:
    freed = mx.zeros((FREED // 4,), dtype=mx.int32)
    mx.eval(freed)
    del freed
    assert mx.get_cache_memory() >= FREED
    arrays: Any = ALLOCATIONS[name]()
    assert mx.get_cache_memory() < FREED
    del arrays
