"""Compiled functions: one for each kind of arguments, few of them, none of a call that failed."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels.compiled_passes import CompiledPasses  # noqa: E402


def test_the_kind_that_was_used_longest_ago_is_compiled_again() -> None:
    """The notice comes before a function is traced, which is the first that takes time."""
    seen: list[str] = []

    def double(x: Any) -> Any:
        seen.append(f"traced {x.size}")
        return 2 * x

    passes = CompiledPasses(double, lambda: seen.append("notice"), max_passes=2)
    compiled = []
    for size in (1, 2, 1, 3, 1, 2):
        known, before = size in passes, seen.count("notice")
        assert passes(size, mx.ones(size)).tolist() == [2.0] * size
        new = seen.count("notice") - before
        assert new != known and size in passes
        compiled.append(bool(new))
    assert compiled == [True, True, False, True, False, True]
    traced = [f"traced {size}" for size in (1, 2, 3, 2)]
    assert seen == [one for kind in traced for one in ("notice", kind)]


def test_a_call_that_failed_has_compiled_nothing() -> None:
    """The next one of its kind compiles, and says so: it may take as long as a first one."""
    fails = True

    def double(x: Any) -> Any:
        if fails:
            raise RuntimeError("no memory is left")
        return 2 * x

    notices: list[None] = []
    passes = CompiledPasses(double, lambda: notices.append(None))
    with pytest.raises(RuntimeError):
        passes("kind", mx.ones(1))
    assert "kind" not in passes
    fails = False
    assert passes("kind", mx.ones(1)).item() == 2.0
    assert len(notices) == 2
