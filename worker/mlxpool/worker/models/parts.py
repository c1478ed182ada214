"""Layers over named weights in MLX; the only file that knows how a weight is laid out."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.models.base import Layer

TILE = 8  # tokens of each product where results may not depend on how many there are


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, in] -> [T, out] with weight [out, in] and bias [out] or None."""

    weight: mx.array
    bias: mx.array | None
    exact: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        if self.exact:
            out = tiled(x, self.weight)
            return out if self.bias is None else out + self.bias
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
    exact: bool = False

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        return tiled(x, self.weight) if self.exact else x @ self.weight.T


def padded(x: mx.array, multiple: int) -> mx.array:
    """x [T, ...] with zeros behind it up to a multiple of tokens."""
    missing = -x.shape[0] % multiple
    return mx.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def tiled(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] @ weight.T in products of TILE lines, all of one shape: a line's bits do not depend
    on T. (A product of another shape may take another kernel, which rounds otherwise.)
    """
    tokens, size = x.shape
    tiles = padded(x, TILE).reshape(-1, TILE, size)
    weights = mx.broadcast_to(weight.T, (tiles.shape[0], size, weight.shape[0]))
    return (tiles @ weights).reshape(-1, weight.shape[0])[:tokens]


class Parts:
    """The parts of a model whose weights are these; `exact`: see `tiled`."""

    def __init__(self, weights: MutableMapping[str, mx.array], *, exact: bool = False) -> None:
        self._weights = weights
        self._exact = exact

    def linear(self, name: str) -> Layer:
        return self.joined([name])

    def joined(self, names: Sequence[str]) -> Layer:
        """Linear layers of one input as one, outputs side by side: fewer and larger products.

        Takes their weights out, so that they are not there twice.
        """
        weight = _laid_out(self._side_by_side([f"{name}.weight" for name in names]))
        biased = f"{names[0]}.bias" in self._weights
        bias = self._side_by_side([f"{name}.bias" for name in names]) if biased else None
        return Linear(weight, bias, self._exact)

    def _side_by_side(self, names: Sequence[str]) -> mx.array:
        parts = [self._weights.pop(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        whole = mx.concatenate(parts)
        mx.eval(whole)
        return whole

    def norm(self, name: str, eps: float) -> Layer:
        return Norm(self._weights[f"{name}.weight"], eps)

    def embedding(self, name: str) -> Embedding:
        return Embedding(self._weights[f"{name}.weight"], self._exact)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        return gate * mx.sigmoid(gate) * up


def _laid_out(weight: mx.array) -> mx.array:
    """The same [out, in]; on the CPU its columns lie together, which small products read faster."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return weight
    columns = mx.contiguous(weight.T)
    mx.eval(columns)
    return columns.T
