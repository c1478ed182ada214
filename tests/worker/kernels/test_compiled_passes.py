"""Compiled functions: one for each kind of arguments, few of them, none of a call that failed."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels.compiled_passes import CompiledPasses  # noqa: E402


def test_the_kind_that_was_used_longest_ago_is_compiled_again() -> None:
    traced: list[int] = []

    def double(x: Any) -> Any:
        traced.append(x.size)
        return 2 * x

    passes = CompiledPasses(double, max_passes=2)
    compiled = []
    for size in (1, 2, 1, 3, 1, 2):
        known = size in passes
        assert passes(size, mx.ones(size)).tolist() == [2.0] * size
        assert passes.compiled != known and size in passes
        compiled.append(passes.compiled)
    assert compiled == [True, True, False, True, False, True]
    assert traced == [1, 2, 3, 2]


def test_a_call_that_failed_has_compiled_nothing() -> None:
    """The next one of its kind compiles, and says so: it may take as long as a first one."""
    fails = True

    def double(x: Any) -> Any:
        if fails:
            raise RuntimeError("no memory is left")
        return 2 * x

    passes = CompiledPasses(double)
    with pytest.raises(RuntimeError):
        passes("kind", mx.ones(1))
    assert "kind" not in passes
    fails = False
    assert passes("kind", mx.ones(1)).item() == 2.0 and passes.compiled
