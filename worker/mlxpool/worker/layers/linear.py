"""Linear layers, norms and embeddings over MLX weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from mlxpool.worker.kernels import head_product, matmul_small, row_ops
from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.kernels.matmul_small import FusedOps
from mlxpool.worker.layers.byte_columns import ByteColumns
from mlxpool.worker.layers.layer_types import Activation, LinearInput, PendingNorm
from mlxpool.worker.layers.layer_types import Linear as AnyLinear
from mlxpool.worker.layers.quantised_weight import QuantisedWeight
from mlxpool.worker.layers.tiled_weight import TiledWeight

TILE_ROWS = 8  # the rows of x in each product of batch-invariant layers


class FusableLinear:
    """A linear layer whose kernel can include the norm before it and the addition after it."""

    __slots__ = ()

    def __call__(self, x: LinearInput) -> mx.array:
        if not isinstance(x, PendingNorm):
            return self.plain(x)
        return self.fused(x.x, _around(x)) if self.fuses(x.x) else self.plain(x())

    def gated(self, x: LinearInput) -> mx.array | None:
        """Returns silu(gate) * up: the first half of the outputs is gate, the second is up.

        Returns None if no single kernel computes this.
        """
        if not isinstance(x, PendingNorm):
            return self.plain_gated(x)
        if self.fuses(x.x):
            return self.fused(x.x, _around(x, gated=True))
        return self.plain_gated(x())

    def add_to(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """Returns `residual` plus the product of x; None if one kernel cannot compute both."""
        if residual.dtype == x.dtype and self.fuses(x):
            return self.fused(x, FusedOps(beside=residual))
        return None

    def plain(self, x: mx.array) -> mx.array:
        """Computes the layer for x [T, in] without a pending norm; returns [T, out]."""
        raise NotImplementedError

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """Computes `gated` for an array without a pending norm."""
        raise NotImplementedError

    def fuses(self, x: mx.array) -> bool:
        """Returns True if a kernel supports x and the operations around the product."""
        raise NotImplementedError

    def fused(self, x: mx.array, around: FusedOps) -> mx.array:
        """Returns the product of x, with the operations `around` it; `fuses(x)` must be true."""
        raise NotImplementedError


def _around(x: PendingNorm, *, gated: bool = False) -> FusedOps:
    assert isinstance(x.norm, RMSNorm)
    return FusedOps(gated=gated, gain=x.norm.weight, eps=x.norm.eps)


class Linear(FusableLinear, Struct, frozen=True):
    """A linear layer x [T, in] -> [T, out] with weight [out, in] and bias [out] or None.

    `one_row`: the weight in a form that is faster for an x of one row.
    """

    weight: mx.array
    bias: mx.array | None
    batch_invariant: bool = False
    one_row: ByteColumns | None = None
    columns: Any = None  # [in, out], a view of `weight`

    def __post_init__(self) -> None:
        columns = self.weight.T
        mx.eval(columns)
        force_setattr(self, "columns", columns)

    def plain(self, x: mx.array) -> mx.array:
        """Computes the layer for an array x; see FusableLinear."""
        if self.batch_invariant:
            out = tiled_matmul(x, self.weight)
            return out if self.bias is None else out + self.bias
        if self.one_row is not None and self.one_row.takes(x):
            out = self.one_row(x)
            return out if self.bias is None else out + self.bias
        if matmul_small.supports_arrays(x, self.weight, self.bias):
            return matmul_small.kernel_matmul(x, self.weight, FusedOps(bias=self.bias))
        return x @ self.columns if self.bias is None else mx.addmm(self.bias, x, self.columns)

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """Computes silu(gate) * up for an array x; None if no kernel does it. See FusableLinear."""
        if self.batch_invariant or not matmul_small.supports_arrays(x, self.weight, self.bias):
            return None
        return matmul_small.kernel_matmul(x, self.weight, FusedOps(gated=True, bias=self.bias))

    def fuses(self, x: mx.array) -> bool:
        """Returns True if a kernel supports x and the operations around the product."""
        return not self.batch_invariant and matmul_small.can_fuse(x, self.weight, self.bias)

    def fused(self, x: mx.array, around: FusedOps) -> mx.array:
        """Returns the product of x with the operations `around` it; see FusableLinear."""
        return matmul_small.kernel_matmul(x, self.weight, replace(around, bias=self.bias))


class GatedLinearUnit(Struct, frozen=True):
    """A gated unit x [T, in] -> activation(gate, up) [T, width]; `gate_up` gives gate, then up."""

    gate_up: AnyLinear
    width: int
    activation: Activation
    swiglu: bool

    def __call__(self, x: LinearInput) -> mx.array:
        layer = self.gate_up
        if self.swiglu and isinstance(layer, FusableLinear):
            out = layer.gated(x)
            if out is not None:
                return out
        both = layer(x)
        if self.swiglu and both.ndim == 2 and row_ops.supports_swiglu(self.width, both.dtype):
            return row_ops.swiglu(both)
        return self.activation(both[:, : self.width], both[:, self.width :])


class QuantisedLinear(FusableLinear, Struct, frozen=True):
    """A layer x [T, in] -> [T, out] with a quantised weight [out, in] and bias [out] or None."""

    weight: QuantisedWeight | TiledWeight
    bias: mx.array | None

    def plain(self, x: mx.array) -> mx.array:
        """Computes the layer for an array x; see FusableLinear."""
        if self.bias is None:
            return self.weight(x)
        if self.bias.dtype == x.dtype and self.weight.has_kernel(x):
            return self.weight.packed_product(x, FusedOps(bias=self.bias))
        return self.weight(x) + self.bias

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """Computes silu(gate) * up for an array x; None if no kernel does it. See FusableLinear."""
        if self.bias is None:
            return self.weight.gated(x)
        if self.bias.dtype == x.dtype and self.weight.has_kernel(x, gated=True):
            return self.weight.packed_product(x, FusedOps(gated=True, bias=self.bias))
        return None

    def fuses(self, x: mx.array) -> bool:
        """Returns True if a kernel supports x and the operations around the product."""
        return (self.bias is None or self.bias.dtype == x.dtype) and self.weight.fuses(x)

    def fused(self, x: mx.array, around: FusedOps) -> mx.array:
        """Returns the product of x with the operations `around` it; see FusableLinear."""
        return self.weight.packed_product(x, replace(around, bias=self.bias))


class ConcatenatedLinear(Struct, frozen=True):
    """Several layers with concatenated outputs: x [T, in] -> [T, sum of out]."""

    layers: tuple[AnyLinear, ...]

    def __call__(self, x: LinearInput) -> mx.array:
        x = x() if isinstance(x, PendingNorm) else x
        return mx.concatenate([layer(x) for layer in self.layers], axis=-1)

    def add_to(self, x: mx.array, residual: mx.array) -> None:
        """Returns None: no kernel adds this product to another array."""


class RMSNorm(Struct, frozen=True):
    """The root-mean-square norm over the last axis."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """Returns x + y, and its norm."""
        if self.weight.dtype == x.dtype == y.dtype and row_ops.supports_norm(x.shape[-1], x.dtype):
            return row_ops.add_norm(x, y, self.weight, self.eps)
        x = x + y
        return x, self(x)

    def deferred(self, x: mx.array) -> LinearInput:
        """Returns the norm of x, pending if the next product can include it."""
        return PendingNorm(x, self) if matmul_small.can_fuse_norm(x, self.weight) else self(x)


class Embedding(Struct, frozen=True):
    """The token embeddings with weight [vocabulary, d]: tokens [T] -> [T, d].

    `as_linear` is the output head over the same weight: x [T, d] -> logits [T, vocabulary].
    """

    weight: mx.array
    batch_invariant: bool = False
    one_row: ByteColumns | None = None  # see Linear
    head: Any = None  # the output head over `weight`

    def __post_init__(self) -> None:
        head = Linear(self.weight, None, self.batch_invariant, self.one_row)
        force_setattr(self, "head", head)

    def __call__(self, tokens: mx.array) -> mx.array:
        taken = (
            tokens.ndim == 1 and tokens.dtype == mx.int32 and row_ops.supports_rows_of(self.weight)
        )
        return row_ops.take_rows(self.weight, tokens) if taken else self.weight[tokens]

    def as_linear(self, x: LinearInput) -> mx.array:
        logits: mx.array = self.head(x)
        return logits


class QuantisedEmbedding(Struct, frozen=True):
    """An Embedding with a quantised weight; rows are dequantised to `dtype`."""

    weight: QuantisedWeight | TiledWeight
    dtype: mx.Dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight.rows(tokens, self.dtype)

    def as_linear(self, x: LinearInput) -> mx.array:
        return QuantisedLinear(self.weight, None)(x)


class MultiLinear(Struct, frozen=True):
    """A linear layer for each of H heads, with the weights [H, out, in]."""

    weight: mx.array | QuantisedWeight
    batch_invariant: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        """Multiplies each head's rows with the head's weight: x [H, T, in] -> [H, T, out]."""
        if isinstance(self.weight, QuantisedWeight):
            return self.weight(x)
        return self._product(x, self.weight.swapaxes(-1, -2))

    def of_lines(self, x: mx.array) -> mx.array:
        """Multiplies each head's numbers with the head's weight: x [T, H, in] -> [T, H, out]."""
        weight = self.kernel_weight(x)
        if weight is not None:
            return head_product.product(x, weight)
        return self(x.swapaxes(0, 1)).swapaxes(0, 1)

    def of_rotated_lines(self, x: mx.array, turns: RopeTables) -> mx.array | None:
        """Multiplies the first `in` numbers of x [T, H, in + R] with the weight of each head.

        Rotates the last R numbers by `turns`. Returns [T, H, out + R], or None if no kernel does
        both.
        """
        weight = self.kernel_weight(x)
        return None if weight is None else head_product.product(x, weight, turns)

    def kernel_weight(self, x: mx.array) -> mx.array | None:
        """Returns the weight if a kernel supports it for inputs with the dtype of x; else None."""
        weight = self.weight
        if isinstance(weight, QuantisedWeight) or self.batch_invariant or weight.dtype != x.dtype:
            return None
        _, out, columns = weight.shape
        return weight if head_product.supports(columns, out, x.dtype) else None

    def transposed(self, x: mx.array) -> mx.array:
        """Multiplies with the transposed weights: x [H, T, out] -> [H, T, in]."""
        if isinstance(self.weight, QuantisedWeight):
            return self.weight(x, transpose=False)
        return self._product(x, self.weight)

    def _product(self, x: mx.array, weight: mx.array) -> mx.array:
        if not self.batch_invariant:
            return x @ weight
        heads, tokens, size = x.shape
        rows = padded_rows(x.swapaxes(0, 1), TILE_ROWS).swapaxes(0, 1)
        tiles = rows.reshape(heads, -1, TILE_ROWS, size)
        columns = weight.shape[-1]
        shape = (heads, tiles.shape[1], size, columns)
        out = tiles @ mx.broadcast_to(weight[:, None], shape)
        return out.reshape(heads, -1, columns)[:, :tokens]


def padded_rows(x: mx.array, multiple: int) -> mx.array:
    """Returns x [T, ...] padded with zeros to a multiple of `multiple` rows."""
    missing = -x.shape[0] % multiple
    return mx.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def tiled_matmul(x: mx.array, weight: mx.array) -> mx.array:
    """Computes x [T, in] @ weight.T by products of TILE_ROWS rows: a row's bits do not depend on T.

    A product of another shape may use another kernel, which rounds differently.
    """
    tokens, size = x.shape
    tiles = padded_rows(x, TILE_ROWS).reshape(-1, TILE_ROWS, size)
    weights = mx.broadcast_to(weight.T, (tiles.shape[0], size, weight.shape[0]))
    return (tiles @ weights).reshape(-1, weight.shape[0])[:tokens]
