"""gelu and softmax by NumPy, compared with float64."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from mlxpool.worker.kernels import cpu_exp  # noqa: E402
from mlxpool.worker.kernels.cpu_exp import CHUNK, MIN_SIZE  # noqa: E402

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device().type == mx.DeviceType.gpu,
    reason="MLX's own functions are faster elsewhere",
)


@pytest.mark.parametrize("size", [MIN_SIZE, CHUNK, CHUNK + 7, 3 * CHUNK - 1])
def test_gelu_has_a_bounded_error(size: int) -> None:
    x = np.linspace(-12, 12, size).astype(np.float32)
    given = mx.array(x)
    got = np.array(cpu_exp.gelu(given), dtype=np.float64)
    exact = [one * 0.5 * math.erfc(-one / math.sqrt(2)) for one in x.astype(np.float64)]
    assert (np.abs(got - exact) <= 1e-6 * np.abs(x) + 1e-12).all()
    assert np.array(given).tolist() == x.tolist()


def test_gelu_takes_an_array_that_is_a_view() -> None:
    x = mx.random.normal((64, 96))
    whole, half = cpu_exp.gelu(x), cpu_exp.gelu(x[:, 48:])
    assert np.array(half).tolist() == np.array(whole)[:, 48:].tolist()


def test_softmax_of_scores_that_are_hidden_and_large() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32) * 100
    x[..., 4:] = -np.inf
    weights, sums = cpu_exp.softmax_in_place(mx.array(x))
    powers = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    expected = powers / powers.sum(-1, keepdims=True)
    assert np.array(weights / sums) == pytest.approx(expected, abs=1e-6)


def test_what_numpy_is_not_faster_for() -> None:
    assert cpu_exp.takes_numpy(mx.zeros(MIN_SIZE))
    assert not cpu_exp.takes_numpy(mx.zeros(MIN_SIZE - 1))
    assert not cpu_exp.takes_numpy(mx.zeros(MIN_SIZE, mx.bfloat16))
