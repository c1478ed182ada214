"""8-bit keys and values: the errors of dequantised numbers, NaN, and the bytes of a token."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention import int8_numbers  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec, LatentSpec, RecurrentSpec  # noqa: E402
from mlxpool.worker.caches.stored import AUTO, INT8, Numbers, StoredArray  # noqa: E402

HEADS = st.lists(
    st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=1, max_size=40
)


def quantised(numbers: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns integers, scales and dequantised numbers, in float64."""
    integers, scales = int8_numbers.quantise(mx.array(numbers, dtype=mx.float32))
    read = int8_numbers.dequantise(integers, scales, mx.float32)
    assert (integers.dtype, scales.dtype) == (mx.int8, mx.bfloat16)
    return tuple(  # type: ignore[return-value]
        np.array(array.astype(mx.float32)).astype(np.float64) for array in (integers, scales, read)
    )


@settings(max_examples=200, deadline=None)
@given(HEADS)
def test_a_number_is_read_within_half_a_scale(numbers: list[float]) -> None:
    """The scale is the greatest absolute number / 127, within the precision of bfloat16."""
    integers, scales, read = quantised([numbers])
    exact = np.array([numbers], np.float32).astype(np.float64)
    most = np.abs(exact).max()
    assert np.abs(integers).max() <= 127 and scales.shape == (1, 1)
    if most / 127 > 1e-36:  # bfloat16 has fewer digits for smaller scales
        assert abs(scales[0, 0] * 127 / most - 1) <= 2**-8
        assert np.abs(read - exact).max() <= scales[0, 0] * 0.5 * (1 + 1e-5)
        assert np.abs(integers).max() == 127


@settings(max_examples=100, deadline=None)
@given(HEADS)
def test_what_is_read_is_stored_as_it_was(numbers: list[float]) -> None:
    integers, scales, read = quantised([numbers])
    if scales[0, 0] > 1e-36:
        again = quantised(read)
        assert (again[0] == integers).all() and (again[1] == scales).all()


@pytest.mark.parametrize("numbers", [[0.0] * 4, [1e-44, 0.0], [-0.0, 0.0]])
def test_heads_of_zeros_are_zeros(numbers: list[float]) -> None:
    assert not quantised([numbers])[2].any()


def test_ties_are_rounded_to_even() -> None:
    integers, scales, _ = quantised([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert scales.item() == 1 and integers.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_read_as_none(number: float) -> None:
    """A NaN or infinite number makes its own head NaN or infinite, and no other head.

    The worker notices a failed model by such numbers.
    """
    read = quantised([[1.0, number, 2.0], [1.0, 2.0, 3.0]])[2]
    assert not np.isfinite(read[0]).all() and np.isfinite(read[1]).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_token_is_stored_alike_whatever_is_stored_with_it(counts: list[int], seed: int) -> None:
    new = np.random.default_rng(seed).normal(size=(2, sum(counts), 16)).astype(np.float32)
    whole = int8_numbers.quantise(mx.array(new))
    starts = np.cumsum([0, *counts])
    parts = [
        int8_numbers.quantise(mx.array(new[:, begin:end]))
        for begin, end in itertools.pairwise(starts)
    ]
    for at in range(2):
        joined = mx.concatenate([part[at] for part in parts], axis=1)
        assert mx.array_equal(joined, whole[at]).item()


def test_plain_keys_and_values_are_stored_as_they_are() -> None:
    """Without quantisation the stored arrays are the new arrays: no computation is added."""
    new = mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4))
    shape = RowShape((KeyValueSpec(2, 4, 4),), mx.float32, 100)
    assert shape.stored(new) is new and shape.read(new) is new


def test_the_arrays_that_layers_store() -> None:
    layer = KeyValueSpec(2, 64, 32)
    assert layer.stored() == (StoredArray("keys", 2, 64), StoredArray("values", 2, 32))
    assert layer.stored(INT8) == (
        StoredArray("keys", 2, 64, Numbers.INT8),
        StoredArray("values", 2, 32, Numbers.INT8),
        StoredArray("key_scales", 2, 1, Numbers.SCALE),
        StoredArray("value_scales", 2, 1, Numbers.SCALE),
    )
    assert LatentSpec(20, 16).stored() == (StoredArray("latents", 1, 20),)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_twice_the_tokens_fit_into_the_bytes_of_16_bits(size: int) -> None:
    """With heads of 64 numbers 1.94 times as many tokens fit, with 128 numbers 1.97 times.

    In the bytes of 32-bit numbers, four times as many fit.
    """
    caches = (KeyValueSpec(8, size, size), RecurrentSpec(((4, 4),)))
    for dtype, least in ((mx.bfloat16, 1.9), (mx.float16, 1.9), (mx.float32, 3.8)):
        plain, quantised_shape = (RowShape(caches, dtype, 4096, kv=kv) for kv in (AUTO, INT8))
        assert plain.token_bytes / quantised_shape.token_bytes >= least
    window = KeyValueSpec(8, size, size, window=512)
    assert window.fixed_bytes(2, 256) / window.fixed_bytes(2, 256, INT8) >= 1.9
