"""Counters and barriers of kernels never get a freed buffer, which may be managed memory."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import matmul_tiled, token_grid  # noqa: E402

FREED = 2**20  # bytes
MADE = {
    "barrier of a grid": lambda: token_grid.memory.__wrapped__("test", 100),
    "counters of a product": lambda: matmul_tiled.counters.__wrapped__(),
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_made_from_an_emptied_cache(name: str) -> None:
    freed = mx.zeros((FREED // 4,), dtype=mx.int32)
    mx.eval(freed)
    del freed
    assert mx.get_cache_memory() >= FREED
    made: Any = MADE[name]()
    assert mx.get_cache_memory() < FREED
    del made
