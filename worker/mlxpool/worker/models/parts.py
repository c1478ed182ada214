"""Layers over named weights in MLX; the only file that knows how a weight is laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.models.base import Layer


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, in] -> [T, out] with weight [out, in] and bias [out] or None."""

    weight: mx.array
    bias: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.weight.T
        return mx.addmm(self.bias, x, self.weight.T)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last axis."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Embedding:
    """tokens [T] -> [T, d], and x [T, d] -> logits [T, vocabulary], with weight [vocabulary, d]."""

    weight: mx.array

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ self.weight.T


class Parts:
    """The parts of a model whose weights are these."""

    def __init__(self, weights: Mapping[str, mx.array]) -> None:
        self._weights = weights

    def linear(self, name: str) -> Layer:
        return Linear(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def norm(self, name: str, eps: float) -> Layer:
        return Norm(self._weights[f"{name}.weight"], eps)

    def embedding(self, name: str) -> Embedding:
        return Embedding(self._weights[f"{name}.weight"])

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        return gate * mx.sigmoid(gate) * up
