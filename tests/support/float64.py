"""Parts of models in float64 and NumPy: references for kernels and for whole models."""

from __future__ import annotations

from typing import Any

import numpy as np


def numbers(array: Any) -> Any:
    """Returns an array of MLX as a NumPy array in float64."""
    import mlx.core as mx  # references for whole models do not use it

    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_near(found: Any, expected: Any, within: float = 0.02) -> None:
    """Asserts that an array of MLX is near the expected array.

    `within` is the largest allowed error, divided by the largest expected number.
    """
    assert found.shape == expected.shape
    assert np.abs(numbers(found) - expected).max() < within * np.abs(expected).max()


def normed(x: Any, gain: Any, eps: float) -> Any:
    """Returns RMS norm: x divided by the root mean square of its last axis, times `gain`."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def silu(x: Any) -> Any:
    """Returns x times its sigmoid."""
    return x / (1 + np.exp(-x))


def gated(both: Any) -> Any:
    """Returns SwiGLU of [T, 2 N] numbers: the first half are gates."""
    gate, other = np.split(both, 2, axis=1)
    return silu(gate) * other


def softmax(x: Any) -> Any:
    """Returns the softmax over the last axis."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def rope_angles(count: int, size: int, base: float) -> Any:
    """Returns the angles [T, 1, D / 2] of the positions of T tokens, for heads [T, H, D]."""
    return np.arange(count)[:, None, None] * base ** (-np.arange(0, size, 2) / size)


def rotated(x: Any, angles: Any, *, traditional: bool) -> Any:
    """Returns x [..., D] with its pairs rotated by angles [..., D / 2].

    If `traditional` is true, a pair is two neighbouring numbers. Otherwise a pair has the numbers
    at the same index of both halves of D.
    """
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if traditional else (x[..., :half], x[..., half:])
    left = first * np.cos(angles) - second * np.sin(angles)
    right = second * np.cos(angles) + first * np.sin(angles)
    return np.stack([left, right], axis=-1 if traditional else -2).reshape(x.shape)


def attention(
    q: Any,
    keys: Any,
    values: Any,
    seen: Any,
    scale: float,
    sinks: Any = None,
    softcap: float = 0.0,
) -> Any:
    """Returns attention [T, H, E] of q [T, H, D] over keys [L, KV, D] and values [L, KV, E].

    `seen` [T, L] is True if a query attends to a key; each query attends to at least one key.
    `sinks` is an array of MLX [H].
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(heads, group, axis=1) for heads in (keys, values))
    scores = np.einsum("thd,lhd->htl", q, keys) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -np.inf)
    sink = -np.inf if sinks is None else numbers(sinks)[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
    return np.einsum("htl,lhe->the", weights, values)


def dequantised(weight: Any, scales: Any, biases: Any, group: int, bits: int) -> Any:
    """Returns the numbers of a quantised weight in float64.

    MLX computes them in float32, because in bfloat16 it rounds intermediate results.
    """
    import mlx.core as mx

    scales, biases = (array.astype(mx.float32) for array in (scales, biases))
    return numbers(mx.dequantize(weight, scales, biases, group_size=group, bits=bits))
