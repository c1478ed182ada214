"""What our kernels compute, in float64 and NumPy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels.score_params import ScoreParams


def numbers(array: Any) -> Any:
    """Returns an array of MLX in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_near(found: Any, expected: Any, within: float = 0.02) -> None:
    """Compares an array of MLX; `within`: of the largest expected number."""
    assert found.shape == expected.shape
    assert np.abs(numbers(found) - expected).max() < within * np.abs(expected).max()


def normed(x: Any, gain: Any, eps: float) -> Any:
    """Returns x with the root mean square of its last axis divided out, times `gain`."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def gated(both: Any) -> Any:
    """Returns SwiGLU of [T, 2 N] numbers: those of the gate, then the others."""
    gate, other = np.split(both, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * other


def rotated(x: Any, angles: Any, *, traditional: bool) -> Any:
    """Returns x [..., D] with its pairs rotated by angles [..., D / 2].

    A pair is two neighbours (`traditional`), or the numbers of one place in both halves.
    """
    half = x.shape[-1] // 2
    one, two = (x[..., ::2], x[..., 1::2]) if traditional else (x[..., :half], x[..., half:])
    left = one * np.cos(angles) - two * np.sin(angles)
    right = two * np.cos(angles) + one * np.sin(angles)
    return np.stack([left, right], axis=-1 if traditional else -2).reshape(x.shape)


def attention(q: Any, keys: Any, values: Any, seen: Any, scores: ScoreParams) -> Any:
    """Returns attention [T, H, E] of q [T, H, D] over keys [L, KV, D] and values [L, KV, E].

    `seen` [T, L]: whether a line attends to a key; each attends to one at least.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(one, group, axis=1) for one in (keys, values))
    found = np.einsum("thd,lhd->htl", q, keys) * scores.scale
    if scores.softcap:
        found = scores.softcap * np.tanh(found / scores.softcap)
    found = np.where(seen, found, -np.inf)
    sinks = -np.inf if scores.sinks is None else numbers(scores.sinks)[:, None, None]
    top = np.maximum(found.max(-1, keepdims=True), sinks)
    weights = np.exp(found - top)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks - top)
    return np.einsum("htl,lhe->the", weights, values)


def dequantised(weight: Any, scales: Any, biases: Any, group: int, bits: int) -> Any:
    """Returns the numbers of a quantised weight; in bfloat16 MLX rounds intermediate results."""
    factors = (one.astype(mx.float32) for one in (scales, biases))
    return numbers(mx.dequantize(weight, *factors, group_size=group, bits=bits))
