"""Compares products of attention heads with float64.

All cases run on a GPU, some also by simt.py without one.
"""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.rotary import RotaryEmbedding  # noqa: E402
from mlxpool.worker.layers.layer_types import Rope  # noqa: E402
from mlxpool.worker.layers.linear import MultiLinear  # noqa: E402
from support.float64 import assert_near, numbers, rotated  # noqa: E402

ON_GPU = mx.cuda.is_available()

runs = pytest.mark.usefixtures("machine")


CASES = [(1, 3, 64, 64, 0), (9, 2, 192, 256, 16), (150, 1, 128, 128, 8), (70, 1, 64, 192, 8)]
MORE = [(lines, 20, 192, 512, 64) for lines in (1, 8, 17, 33, 65, 128, 129, 1000)]
MORE += [(lines, 20, 512, 256, 0) for lines in (1, 8, 17, 33, 65, 128, 129, 1000)]


@runs
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(
    ("lines", "heads", "columns", "rows", "turned"), [*CASES, *(MORE if ON_GPU else ())]
)
def test_products_of_heads_equal_float64(
    lines: int, heads: int, columns: int, rows: int, turned: int, traditional: bool
) -> None:
    """The first `columns` numbers of a head are multiplied by its weight.

    The `turned` numbers after them are rotated instead.
    """
    mx.random.seed(lines + columns)
    weight = (mx.random.normal((heads, rows, columns)) * columns**-0.5).astype(mx.bfloat16)
    x = mx.random.normal((lines, heads, columns + turned)).astype(mx.bfloat16)
    layer = MultiLinear(weight)
    asked, factors = numbers(x), numbers(weight)
    expected = np.einsum("thi,hoi->tho", asked[..., :columns], factors)
    if turned:
        positions = mx.arange(lines, dtype=mx.int32) * 37
        turns = RotaryEmbedding(positions).turns(Rope(turned, 10_000.0, traditional=traditional))
        output = layer.of_rotated_lines(x, turns)
        half = turned // 2
        angles = numbers(positions)[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
        rest = rotated(asked[..., columns:], angles, traditional=traditional)
        expected = np.concatenate([expected, rest], axis=-1)
    else:
        output = layer.of_lines(x)
    assert_near(output, expected)


@runs
def test_other_weights_have_no_kernel() -> None:
    """The kernel refuses unsupported sizes and dtypes, and batch-invariant layers."""
    x = mx.random.normal((5, 2, 64)).astype(mx.bfloat16)
    weight = mx.random.normal((2, 128, 64)).astype(mx.bfloat16)
    for layer, rows in (
        (MultiLinear(weight, batch_invariant=True), 128),
        (MultiLinear(weight[:, :100]), 100),
        (MultiLinear(weight.astype(mx.float32)), 128),
    ):
        assert layer.kernel_weight(x) is None
        assert layer.of_lines(x).shape == (5, 2, rows)
    assert MultiLinear(weight).kernel_weight(x) is not None
