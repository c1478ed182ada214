"""Compares our exp (of sums and products), gelu and softmax (in NumPy) with float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from mlxpool.worker.attention.dot_product import softmax_average  # noqa: E402
from mlxpool.worker.kernels import cpu_exp  # noqa: E402
from mlxpool.worker.kernels.cpu_exp import CHUNK, MIN_ARGUMENT, MIN_SIZE  # noqa: E402
from support.float64 import silu, softmax  # noqa: E402

on_cpu = pytest.mark.skipif(
    mx.default_device().type == mx.DeviceType.gpu, reason="a GPU has an exp of its own"
)
by_numpy = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device().type == mx.DeviceType.gpu,
    reason="MLX's own functions are faster elsewhere",
)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects the formula that MLX compiles, even if no compiler is installed.

    Without a compiler MLX computes the formula's operations one by one, with the same results.
    """
    monkeypatch.setattr(cpu_exp, "vectorised", lambda: True)


@pytest.fixture
def compiled() -> Iterator[None]:
    cpu_exp.vectorised.cache_clear()
    yield
    mx.enable_compile()
    cpu_exp.vectorised.cache_clear()


@on_cpu
@pytest.mark.usefixtures("fast")
def test_exp_has_a_bounded_relative_error() -> None:
    x = np.concatenate([np.linspace(-150, 0, 100_001), np.linspace(-1e-3, 0, 1001)])
    x = x.astype(np.float32)
    got = np.array(cpu_exp.exp_below(mx.array(x)), dtype=np.float64)
    exact = np.exp(x.astype(np.float64))
    relative = np.abs(got / exact - 1)
    assert relative[x >= -10].max() < 5e-6
    assert relative[x >= MIN_ARGUMENT].max() < 2e-4
    assert (got[x < MIN_ARGUMENT] > 0).all() and (
        got[x < MIN_ARGUMENT] < 1e-30
    ).all()  # MLX's own function gives 0
    assert got[x == 0].tolist() == [1.0] * int((x == 0).sum())


@on_cpu
@pytest.mark.usefixtures("fast")
def test_exp_of_nan_is_nan() -> None:
    x = mx.concatenate([mx.full((MIN_SIZE,), -1.0), mx.array([mx.nan, -mx.inf])])
    got = np.array(cpu_exp.exp_below(x))
    assert np.isnan(got[MIN_SIZE]) and 0 <= got[MIN_SIZE + 1] < 1e-30


@on_cpu
@pytest.mark.usefixtures("fast")
def test_swiglu_equals_float64() -> None:
    gate = np.random.default_rng(1).normal(0, 8, (8, MIN_SIZE)).astype(np.float32)
    gate[0, :4] = 0, 120, -120, -0.0
    up = np.random.default_rng(2).normal(0, 2, gate.shape).astype(np.float32)
    got = np.array(cpu_exp.swiglu(mx.array(gate), mx.array(up)), dtype=np.float64)
    exact = silu(gate.astype(np.float64)) * up
    assert np.abs(got - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.abs(got[0, 2]) < 1e-27


@on_cpu
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("beside", [0, 3])
def test_softmax_averages_equal_float64(beside: int) -> None:
    """The softmax includes `beside` additional scores (sinks), which have no values."""
    draw = np.random.default_rng(beside)
    scores = draw.normal(0, 5, (2, 3, 40, 50 + beside)).astype(np.float32)
    scores[:, :, :, 10] = -np.inf
    values = draw.normal(size=(2, 3, 50, 8)).astype(np.float32)
    exact = softmax(scores.astype(np.float64))[..., :50] @ values
    got = np.array(softmax_average(mx.array(scores), mx.array(values)))
    assert np.abs(got - exact).max() < 1e-5


@on_cpu
def test_without_a_compiler_exp_is_computed_by_mlx(compiled: None) -> None:
    mx.disable_compile()
    assert not cpu_exp.vectorised()
    x = mx.full((MIN_SIZE,), -2.5)
    assert mx.array_equal(cpu_exp.exp_below(x), mx.exp(x)).item()


def test_small_arrays_and_other_dtypes_are_computed_by_mlx(fast: None) -> None:
    assert cpu_exp.supports(mx.zeros((MIN_SIZE,)))
    assert not cpu_exp.supports(mx.zeros((MIN_SIZE - 1,)))
    assert not cpu_exp.supports(mx.zeros((MIN_SIZE,), dtype=mx.bfloat16))


@pytest.mark.parametrize("size", [MIN_SIZE, CHUNK, CHUNK + 7, 3 * CHUNK - 1])
@by_numpy
def test_gelu_has_a_bounded_error(size: int) -> None:
    x = np.linspace(-12, 12, size).astype(np.float32)
    given = mx.array(x)
    got = np.array(cpu_exp.gelu(given), dtype=np.float64)
    exact = [value * 0.5 * math.erfc(-value / math.sqrt(2)) for value in x.astype(np.float64)]
    assert (np.abs(got - exact) <= 1e-6 * np.abs(x) + 1e-12).all()
    assert np.array(given).tolist() == x.tolist()


@by_numpy
def test_gelu_takes_an_array_that_is_a_view() -> None:
    x = mx.random.normal((64, 96))
    whole, half = cpu_exp.gelu(x), cpu_exp.gelu(x[:, 48:])
    assert np.array(half).tolist() == np.array(whole)[:, 48:].tolist()


@by_numpy
def test_softmax_of_scores_that_are_hidden_and_large() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32) * 100
    x[..., 4:] = -np.inf
    weights, sums = cpu_exp.softmax_in_place(mx.array(x))
    assert np.array(weights / sums) == pytest.approx(softmax(x.astype(np.float64)), abs=1e-6)


@by_numpy
def test_what_numpy_is_not_faster_for() -> None:
    assert cpu_exp.takes_numpy(mx.zeros(MIN_SIZE))
    assert not cpu_exp.takes_numpy(mx.zeros(MIN_SIZE - 1))
    assert not cpu_exp.takes_numpy(mx.zeros(MIN_SIZE, mx.bfloat16))
