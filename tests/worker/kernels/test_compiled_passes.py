"""Tests the cache of compiled functions: its keys, its bound, and its entries after a failure."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels.compiled_passes import CompiledPasses, ComputedKinds  # noqa: E402


def test_the_kind_that_was_used_longest_ago_is_compiled_again() -> None:
    """The kind that was used longest ago is dropped, and compiled again when it is used.

    `notice` is called before a function is traced, because tracing already takes time.
    """
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
    assert seen == [event for kind in traced for event in ("notice", kind)]


def test_a_call_that_failed_has_compiled_nothing() -> None:
    """The next call of the same kind gives notice and compiles, as if it were the first call."""
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


def test_a_call_whose_evaluation_failed_has_compiled_nothing() -> None:
    """If the evaluation of a pass fails, the kinds that it compiled are treated as not compiled.

    Kinds that were evaluated before are still treated as compiled. A kind that was dropped before
    the failure is ignored.
    """
    notices: list[None] = []
    passes = CompiledPasses(lambda x: 2 * x, lambda: notices.append(None), max_passes=2)
    mx.eval(passes("old", mx.ones(1)))
    passes.evaluated()
    for kind in ("freed", "new"):
        passes("old", mx.ones(1))
        passes(kind, mx.ones(1))
    passes.failed()
    assert "old" in passes and "freed" not in passes and "new" not in passes
    mx.eval(passes("new", mx.ones(1)))
    assert len(notices) == 4
    passes.evaluated()
    passes.failed()
    assert "new" in passes


def test_a_kind_is_new_until_a_pass_of_it_was_evaluated() -> None:
    """A kind is treated as known while its first pass is in flight.

    After a failure it is treated as new again.
    """
    kinds = ComputedKinds()
    assert [kinds.is_new(kind) for kind in ("a", "a", "b")] == [True, False, True]
    kinds.evaluated()
    assert [kinds.is_new(kind) for kind in ("a", "c", "c")] == [False, True, False]
    kinds.failed()
    assert [kinds.is_new(kind) for kind in ("a", "b", "c")] == [False, False, True]
