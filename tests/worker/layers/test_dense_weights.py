"""Weights made dense equal MLX's dequantised weights bit for bit, in any mixture of formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.layers.dense_weights import dense, to_column_major  # noqa: E402
from mlxpool.worker.layers.quantisation import QuantLayout  # noqa: E402
from mlxpool.worker.layers.quantised_weight import QuantisedWeight  # noqa: E402

pytestmark = pytest.mark.skipif(device.on_gpu(), reason="weights lie by columns on the CPU alone")


def quantised(rows: int, bits: int, group: int, mode: str = "affine") -> QuantisedWeight:
    weight = mx.random.normal((rows, 256), key=mx.random.key(bits * group))
    packed, scales, *biases = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
    layout = QuantLayout(mode, bits, group)
    return QuantisedWeight(packed, scales, biases[0] if biases else None, None, layout)


def bits_of(array: Any) -> np.ndarray:
    bits: np.ndarray = np.array(array).view(np.uint32)
    return bits


@pytest.mark.parametrize("shape", [(3, 5), (16, 4096), (515, 257), (2048, 33), (1, 70000)])
def test_values_stay_and_columns_are_contiguous(
    shape: tuple[int, int],
) -> None:
    weight = mx.random.normal(shape, key=mx.random.key(0))
    weight[0, 0] = float("nan")
    cut = shape[0] // 3 + 1
    parts = [weight[:cut], weight[cut:]] if shape[0] > cut else [weight]
    turned = to_column_major(parts, mx.float32)
    assert np.array_equal(np.array(turned), np.array(weight), equal_nan=True)
    assert np.array(turned, copy=False).T.flags.c_contiguous


def test_another_dtype() -> None:
    weight = mx.random.normal((300, 400)).astype(mx.bfloat16)
    assert mx.array_equal(to_column_major([weight], mx.bfloat16), weight).item()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("rows", [1, 700])
def test_a_quantised_weight_is_dequantised_as_mlx_does(rows: int, bits: int, group: int) -> None:
    weight = quantised(rows, bits, group)
    expected = bits_of(weight.dequantised(mx.float32))
    assert np.array_equal(bits_of(dense(weight, mx.float32)), expected)
    plain = mx.random.normal((40, 256))
    turned = bits_of(to_column_major([weight, plain, weight], mx.float32))
    assert np.array_equal(turned, np.concatenate([expected, bits_of(plain), expected]))


def test_weights_of_other_layouts_and_dtypes() -> None:
    for weight in (quantised(40, 4, 32, "mxfp4"), quantised(40, 8, 32, "mxfp8")):
        expected = bits_of(weight.dequantised(mx.float32))
        assert np.array_equal(bits_of(dense(weight, mx.float32)), expected)
        assert np.array_equal(bits_of(to_column_major([weight], mx.float32)), expected)
    weight = quantised(40, 4, 32)
    for dtype in (mx.bfloat16, mx.float16):
        whole = weight.dequantised(dtype)
        assert mx.array_equal(dense(weight, dtype), whole).item()
        assert mx.array_equal(to_column_major([weight], dtype), whole).item()
