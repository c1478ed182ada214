"""Layers over named weights in MLX, quantised or not: a model file does not see which."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.kernels import matmul_small, rms_norm
from mlxpool.worker.kernels.matmul_small import Around
from mlxpool.worker.layers.interface import Activation, LinearInput, PendingNorm
from mlxpool.worker.layers.interface import Linear as AnyLinear
from mlxpool.worker.layers.quantised_weight import QuantisedWeight

TILE_ROWS = 8  # tokens of each product where results may not depend on how many there are


class FusableLinear:
    """A linear layer whose product may norm its lines first, and add to them at the end."""

    __slots__ = ()

    def __call__(self, x: LinearInput) -> mx.array:
        if not isinstance(x, PendingNorm):
            return self.plain(x)
        return self.fused(x.x, _around(x)) if self.fuses(x.x) else self.plain(x())

    def gated(self, x: LinearInput) -> mx.array | None:
        """Of a weight whose first half are gates silu(gate) * other, if a kernel does it in one."""
        if not isinstance(x, PendingNorm):
            return self.plain_gated(x)
        if self.fuses(x.x):
            return self.fused(x.x, _around(x, gated=True))
        return self.plain_gated(x())

    def onto(self, x: mx.array, beside: mx.array) -> mx.array | None:
        """See base.Linear."""
        if beside.dtype == x.dtype and self.fuses(x):
            return self.fused(x, Around(beside=beside))
        return None

    def plain(self, x: mx.array) -> mx.array:
        """x [T, in] -> [T, out]."""
        raise NotImplementedError

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """See `gated`."""
        raise NotImplementedError

    def fuses(self, x: mx.array) -> bool:
        """Whether a kernel takes these lines and what is Around their product."""
        raise NotImplementedError

    def fused(self, x: mx.array, around: Around) -> mx.array:
        """The product of lines for which that is so."""
        raise NotImplementedError


def _around(x: PendingNorm, *, gated: bool = False) -> Around:
    assert isinstance(x.norm, RMSNorm)
    return Around(gated=gated, gain=x.norm.weight, eps=x.norm.eps)


@dataclass(frozen=True, slots=True)
class Linear(FusableLinear):
    """x [T, in] -> [T, out] with weight [out, in] and bias [out] or None."""

    weight: mx.array
    bias: mx.array | None
    exact: bool = False

    def plain(self, x: mx.array) -> mx.array:
        """See FusableLinear."""
        if self.exact:
            out = tiled_matmul(x, self.weight)
            return out if self.bias is None else out + self.bias
        if self.bias is None:
            return matmul_small.times(x, self.weight)
        return mx.addmm(self.bias, x, self.weight.T)

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """See FusableLinear."""
        if self.bias is None and not self.exact and matmul_small.reads(x, self.weight):
            return matmul_small.gated(x, self.weight)
        return None

    def fuses(self, x: mx.array) -> bool:
        """See FusableLinear."""
        return self.bias is None and not self.exact and matmul_small.fuses(x, self.weight)

    def fused(self, x: mx.array, around: Around) -> mx.array:
        """See FusableLinear."""
        return matmul_small.product(x, self.weight, around)


@dataclass(frozen=True, slots=True)
class GatedLinearUnit:
    """x [T, in] -> activation(gate, up) [T, width] of the two that `gate_up` gives side by side."""

    gate_up: AnyLinear
    width: int
    activation: Activation
    swiglu: bool

    def __call__(self, x: LinearInput) -> mx.array:
        layer = self.gate_up
        if self.swiglu and isinstance(layer, FusableLinear):
            found = layer.gated(x)
            if found is not None:
                return found
        both = layer(x)
        return self.activation(both[:, : self.width], both[:, self.width :])


@dataclass(frozen=True, slots=True)
class QuantisedLinear(FusableLinear):
    """x [T, in] -> [T, out] with a quantised weight [out, in] and bias [out] or None."""

    weight: QuantisedWeight
    bias: mx.array | None

    def plain(self, x: mx.array) -> mx.array:
        """See FusableLinear."""
        out = self.weight(x)
        return out if self.bias is None else out + self.bias

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """See FusableLinear."""
        return self.weight.gated(x) if self.bias is None else None

    def fuses(self, x: mx.array) -> bool:
        """See FusableLinear."""
        return self.bias is None and self.weight.fuses(x)

    def fused(self, x: mx.array, around: Around) -> mx.array:
        """See FusableLinear."""
        return self.weight.as_it_lies(x, around)


@dataclass(frozen=True, slots=True)
class ConcatenatedLinear:
    """x [T, in] -> the outputs of several layers, one behind the other [T, sum of out]."""

    layers: tuple[AnyLinear, ...]

    def __call__(self, x: LinearInput) -> mx.array:
        x = x() if isinstance(x, PendingNorm) else x
        return mx.concatenate([layer(x) for layer in self.layers], axis=-1)

    def onto(self, x: mx.array, beside: mx.array) -> None:
        """See base.Linear."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square norm over the last axis."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)

    def after(self, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """x + y, and its norm."""
        if self.weight.dtype == x.dtype == y.dtype and rms_norm.serves(x.shape[-1], x.dtype):
            return rms_norm.add_norm(x, y, self.weight, self.eps)
        x = x + y
        return x, self(x)

    def late(self, x: mx.array) -> LinearInput:
        """See base.Norm."""
        return PendingNorm(x, self) if matmul_small.norms(x, self.weight) else self(x)


@dataclass(frozen=True, slots=True)
class Embedding:
    """tokens [T] -> [T, d], and x [T, d] -> logits [T, vocabulary], with weight [vocabulary, d]."""

    weight: mx.array
    exact: bool = False

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def as_linear(self, x: LinearInput) -> mx.array:
        return Linear(self.weight, None, self.exact)(x)


@dataclass(frozen=True, slots=True)
class QuantisedEmbedding:
    """As Embedding, with a quantised weight; its rows come in `dtype`."""

    weight: QuantisedWeight
    dtype: mx.Dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight.rows(tokens, self.dtype)

    def as_linear(self, x: LinearInput) -> mx.array:
        return QuantisedLinear(self.weight, None)(x)


@dataclass(frozen=True, slots=True)
class MultiLinear:
    """A linear layer for each head, with weight [H, out, in]."""

    weight: mx.array | QuantisedWeight
    exact: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        """x [H, T, in] -> [H, T, out]."""
        if isinstance(self.weight, QuantisedWeight):
            return self.weight(x)
        return self._product(x, self.weight.swapaxes(-1, -2))

    def back(self, x: mx.array) -> mx.array:
        """x [H, T, out] -> [H, T, in], with the same weight the other way round."""
        if isinstance(self.weight, QuantisedWeight):
            return self.weight(x, transpose=False)
        return self._product(x, self.weight)

    def _product(self, x: mx.array, weight: mx.array) -> mx.array:
        if not self.exact:
            return x @ weight
        heads, tokens, size = x.shape
        tiles = (
            padded_rows(x.swapaxes(0, 1), TILE_ROWS)
            .swapaxes(0, 1)
            .reshape(heads, -1, TILE_ROWS, size)
        )
        columns = weight.shape[-1]
        shape = (heads, tiles.shape[1], size, columns)
        out = tiles @ mx.broadcast_to(weight[:, None], shape)
        return out.reshape(heads, -1, columns)[:, :tokens]


def padded_rows(x: mx.array, multiple: int) -> mx.array:
    """x [T, ...] with zeros behind it up to a multiple of tokens."""
    missing = -x.shape[0] % multiple
    return mx.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def tiled_matmul(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] @ weight.T in products of TILE_ROWS lines, all of one shape: a line's bits do not depend
    on T. (A product of another shape may take another kernel, which rounds otherwise.)
    """
    tokens, size = x.shape
    tiles = padded_rows(x, TILE_ROWS).reshape(-1, TILE_ROWS, size)
    weights = mx.broadcast_to(weight.T, (tiles.shape[0], size, weight.shape[0]))
    return (tiles @ weights).reshape(-1, weight.shape[0])[:tokens]
