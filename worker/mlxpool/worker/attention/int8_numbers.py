"""Keys and values as 8-bit integers with a scale for each token and head, see caches/stored.py."""

from __future__ import annotations

import mlx.core as mx

from mlxpool.worker.caches.stored import AUTO, INT8, Numbers

Arrays = tuple[mx.array, ...]
GREATEST = 127  # the greatest absolute integer; -128 is not used
SCALES = mx.bfloat16
NUMBER_DTYPES = {Numbers.INT8: mx.int8, Numbers.SCALE: SCALES}  # other numbers: the model's dtype


def dtype_of(numbers: Numbers, model: mx.Dtype) -> mx.Dtype:
    """Returns the dtype in which `numbers` are stored; `model`: the dtype of the computation."""
    return NUMBER_DTYPES.get(numbers, model)


def stored(new: Arrays, dtype: mx.Dtype, kv: str = AUTO) -> Arrays:
    """Returns the stored form of a layer's new arrays [..., size], in a model of this dtype."""
    if kv != INT8:
        return new
    quantised = [quantise(array.astype(dtype)) for array in new]
    return (*(numbers for numbers, _ in quantised), *(scales for _, scales in quantised))


def read(held: Arrays, dtype: mx.Dtype, kv: str = AUTO) -> Arrays:
    """Returns the numbers that a layer's stored arrays represent: the inverse of `stored`."""
    if kv != INT8:
        return held
    half = len(held) // 2
    pairs = zip(held[:half], held[half:], strict=True)
    return tuple(dequantise(numbers, scales, dtype) for numbers, scales in pairs)


def quantise(x: mx.array) -> tuple[mx.array, mx.array]:
    """Returns x [..., size] as integers [..., size] and scales [..., 1] in bfloat16.

    If x has an infinite number or a NaN, the scale becomes infinite or NaN, and the dequantised
    numbers NaN.
    """
    x = x.astype(mx.float32)
    scales = (mx.max(mx.abs(x), axis=-1, keepdims=True) / GREATEST).astype(SCALES)
    divisors = scales.astype(mx.float32)
    # Numbers so small that their scale is 0 become 0. With a scale that was rounded down to
    # bfloat16, quotients can exceed 127.
    quotients = mx.where(divisors > 0, x / divisors, 0.0)
    rounded = mx.clip(mx.round(quotients), -GREATEST, GREATEST)
    return rounded.astype(mx.int8), scales


def dequantise(numbers: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """Returns the products [..., size] of integers [..., size] and scales [..., 1]."""
    return (numbers.astype(mx.float32) * scales.astype(mx.float32)).astype(dtype)
