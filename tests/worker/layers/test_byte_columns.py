"""Compares products of one row and weights stored as columns of bytes with float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.worker.kernels.cpu_exp import on_linux_cpu  # noqa: E402
from mlxpool.worker.layers.builder import WeightLayerBuilder  # noqa: E402
from mlxpool.worker.layers.byte_columns import MAX_WIDTH, byte_columns  # noqa: E402
from mlxpool.worker.layers.linear import Embedding, Linear  # noqa: E402
from mlxpool.worker.layers.quantisation import QuantLayout, byte_columns_bytes  # noqa: E402
from mlxpool.worker.layers.quantised_weight import QuantisedWeight  # noqa: E402

pytestmark = pytest.mark.skipif(not on_linux_cpu(), reason="byte columns are for Linux CPUs")
COLUMNS = 192


def packed(rows: int, bits: int, group: int = 32) -> QuantisedWeight:
    numbers = mx.random.normal((rows, COLUMNS), key=mx.random.key(rows + bits)) + 0.3
    weight, scales, biases = mx.quantize(numbers, group_size=group, bits=bits)
    return QuantisedWeight(weight, scales, biases, None, QuantLayout("affine", bits, group))


def expected(x: Any, weights: Sequence[QuantisedWeight]) -> np.ndarray:
    dense = np.concatenate([np.array(weight.dequantised()) for weight in weights])
    return np.array(x, dtype=np.float64) @ dense.astype(np.float64).T


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_a_product_of_one_row_is_that_of_float64(bits: int, group: int) -> None:
    weights = [packed(96, bits, group), packed(32, bits, group)]
    columns = byte_columns(weights)
    x = mx.random.normal((1, COLUMNS), key=mx.random.key(3))
    assert columns is not None and columns.takes(x)
    wanted = expected(x, weights)
    assert np.abs(np.array(columns(x)) - wanted).max() < 1e-6 * np.abs(wanted).max()


def test_outputs_in_blocks_and_of_different_bits() -> None:
    weights = [packed(2 * MAX_WIDTH, 4), packed(MAX_WIDTH - 32, 8), packed(64, 5)]
    columns = byte_columns(weights)
    assert columns is not None and columns.numbers.shape[0] > 1
    x = mx.random.normal((1, COLUMNS), key=mx.random.key(4))
    wanted = expected(x, weights)
    assert np.abs(np.array(columns(x)) - wanted).max() < 1e-6 * np.abs(wanted).max()
    size = sum(
        byte_columns_bytes(weight.layout, (len(weight.weight), COLUMNS)) for weight in weights
    )
    assert size == columns.numbers.nbytes + columns.scales.nbytes + columns.biases.nbytes


def test_only_one_row_of_float32_is_taken() -> None:
    columns = byte_columns([packed(32, 4)])
    assert columns is not None
    assert not columns.takes(mx.zeros((2, COLUMNS)))
    assert not columns.takes(mx.zeros((1, COLUMNS), dtype=mx.bfloat16))


def test_other_weights_have_no_byte_columns() -> None:
    assert byte_columns([packed(33, 4)]) is None
    assert byte_columns([packed(32, 4), packed(32, 4, 64)]) is None
    assert byte_columns_bytes(QuantLayout("affine", 4, 32), (8, 32, COLUMNS)) == 0
    assert byte_columns_bytes(QuantLayout("mxfp4", 4, 32), (32, COLUMNS)) == 0


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_dequantised_layers_have_them(batch_invariant: bool) -> None:
    names = ["k", "v"]
    weights = {name: packed(64, bits) for name, bits in zip(names, (4, 8), strict=True)}
    arrays = {
        f"{name}.{kind}": getattr(weight, kind)
        for name, weight in weights.items()
        for kind in ("weight", "scales", "biases")
    }
    arrays |= {f"{name}.bias": mx.arange(64.0) for name in names}
    layouts = {name: weight.layout for name, weight in weights.items()}
    builder = WeightLayerBuilder(
        dict(arrays), layouts, mx.float32, batch_invariant=batch_invariant, dequantise=True
    )
    layer = builder.concatenated(names)
    assert isinstance(layer, Linear) and (layer.one_row is None) == batch_invariant
    x = mx.random.normal((2, COLUMNS), key=mx.random.key(5))
    wanted = expected(x, list(weights.values())) + np.tile(np.arange(64.0), 2)
    for rows in (x, x[:1]):
        assert np.abs(np.array(layer(rows)) - wanted[: len(rows)]).max() < 1e-4
    builder = WeightLayerBuilder(dict(arrays), layouts, mx.float32, dequantise=True)
    embedding = builder.embedding("k")
    assert isinstance(embedding, Embedding) and embedding.one_row is not None
    wanted = expected(x[:1], [weights["k"]])
    assert np.abs(np.array(embedding.as_linear(x[:1])) - wanted).max() < 1e-4
