"""Softmax of attention scores, in separate terms where that is faster."""

from __future__ import annotations

import mlx.core as mx

from mlxpool.worker.kernels.cpu_exp import exp_below, supports


def softmax_average(scores: mx.array, values: mx.array) -> mx.array:
    """Returns softmax(scores) @ values: [..., n, M] and [..., L, V] -> [..., n, V].

    With M > L the scores after the first L take part in the softmax and have no value (sinks).
    """
    length = values.shape[-2]
    if not supports(scores):
        return mx.softmax(scores, axis=-1)[..., :length].astype(values.dtype) @ values
    weights, _, total = softmax_terms(scores)
    return (weights[..., :length] @ values) / total


def softmax_terms(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns exp(scores - top), the greatest scores `top` [..., 1] and the sums [..., 1]."""
    top = mx.max(scores, axis=-1, keepdims=True)
    weights = exp_below(scores - top)
    return weights, top, mx.sum(weights, axis=-1, keepdims=True)
