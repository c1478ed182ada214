"""Weights in tiles compute the same as the weights before tiling; simulated by simt.py."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import matmul_4bit_tiles  # noqa: E402
from mlxpool.worker.layers.linear import QuantisedEmbedding, QuantisedLinear  # noqa: E402
from mlxpool.worker.layers.quantisation import QuantLayout  # noqa: E402
from mlxpool.worker.layers.quantised_weight import QuantisedWeight  # noqa: E402
from mlxpool.worker.layers.tiled_weight import TiledWeight, in_tiles  # noqa: E402

pytestmark = pytest.mark.usefixtures("machine")


def packed(rows: int, columns: int, bits: int = 4, group: int = 64) -> QuantisedWeight:
    numbers = mx.random.normal((rows, columns), key=mx.random.key(1)) * columns**-0.5
    weight, scales, biases = mx.quantize(numbers.astype(mx.bfloat16), group_size=group, bits=bits)
    return QuantisedWeight(weight, scales, biases, None, QuantLayout("affine", bits, group))


@pytest.mark.parametrize("shape", [(3, 64), (12, 64), (300, 64), (2, 5, 64)])
def test_products_equal_those_of_the_dense_weight(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 tokens exceed the kernels' limit, so the weight is dequantised for them."""
    monkeypatch.setattr(matmul_4bit_tiles, "MAX_TOKENS", 256)
    weight = packed(64, 64)
    tiled = in_tiles(weight)
    assert isinstance(tiled, TiledWeight)
    x = mx.random.normal(shape).astype(mx.bfloat16)
    dense = weight.dequantised(mx.float32)
    expected = x.astype(mx.float32) @ dense.T
    actual = QuantisedLinear(tiled, None)(x)
    assert actual.shape == expected.shape
    assert np.allclose(np.array(actual.astype(mx.float32)), np.array(expected), 0.02, 0.03)
    exact = tiled(x.astype(mx.float32))  # no kernel takes float32
    assert exact.dtype == mx.float32
    assert np.allclose(np.array(exact), np.array(expected), 0.02, 0.03)


def test_rows_of_an_embedding_are_those_of_its_weight() -> None:
    weight = packed(128, 192, group=32)
    tiled = in_tiles(weight)
    assert isinstance(tiled, TiledWeight)
    table = QuantisedEmbedding(tiled, mx.float32)
    tokens = mx.array([[127, 0, 64], [9, 9, 17]])
    expected = np.array(weight.dequantised(mx.float32))[np.array(tokens)]
    assert np.allclose(np.array(table(tokens)), expected, 0.01, 1e-3)
    assert table(tokens).dtype == mx.float32


def test_other_weights_stay_as_they_are() -> None:
    whole = packed(64, 128, group=128)
    for weight in (packed(96, 64), packed(64, 96, group=32), packed(64, 64, bits=8), whole):
        assert in_tiles(weight) is weight
    single = packed(64, 64)
    assert single.biases is not None
    several = QuantisedWeight(
        single.weight[None], single.scales[None], single.biases[None], None, single.layout
    )
    assert in_tiles(several) is several
