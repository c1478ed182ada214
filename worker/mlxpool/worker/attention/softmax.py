"""Softmax of attention's scores in the parts that it is made of."""

from __future__ import annotations

import mlx.core as mx

from mlxpool.worker.kernels.cpu_exp import exp_below, serves


def averaged(scores: mx.array, values: mx.array) -> mx.array:
    """softmax(scores) @ values: [..., n, M] and [..., L, V] -> [..., n, V].

    With M > L the scores behind the first L take their part of the softmax and give nothing.
    """
    length = values.shape[-2]
    if not serves(scores):
        return mx.softmax(scores, axis=-1)[..., :length].astype(values.dtype) @ values
    weights, _, total = weighed(scores)
    return (weights[..., :length] @ values) / total


def weighed(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """exp(scores - top), `top` and the sum of the first; the last axis of both is 1."""
    top = mx.max(scores, axis=-1, keepdims=True)
    weights = exp_below(scores - top)
    return weights, top, mx.sum(weights, axis=-1, keepdims=True)
