"""Affine 4-bit weights in tiles, in the memory order in which a GPU's kernels read them."""

from __future__ import annotations

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import matmul_4bit_tiles, matmul_small, tiles_4bit
from mlxpool.worker.kernels.matmul_small import FusedOps
from mlxpool.worker.layers.quantised_weight import QuantisedWeight


class TiledWeight(Struct, frozen=True):
    """A quantised weight [out, in] as tiles [out / 64, in / 64, words], see tiles_4bit.cuh."""

    tiles: mx.array
    group_size: int
    dtype: mx.Dtype  # the dtype of scales and biases

    def __call__(self, x: mx.array) -> mx.array:
        """Multiplies x [..., in] with weight.T -> [..., out]."""
        if x.ndim != 2:
            return self(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
        if self.has_kernel(x):
            return self.packed_product(x)
        return matmul_small.matmul(x, self.dequantised(x.dtype))

    def gated(self, x: mx.array) -> mx.array | None:
        """Returns silu(gate) * up [T, out / 2] of x [T, in]; the first half of `out` are the gates.

        Returns None if no single kernel computes this.
        """
        return (
            self.packed_product(x, FusedOps(gated=True)) if self.has_kernel(x, gated=True) else None
        )

    def fuses(self, x: mx.array) -> bool:
        """Returns True if `packed_product` supports x [T, in] and operations around the product."""
        return matmul_small.is_fusable(x) and self.has_kernel(x, gated=True)

    def packed_product(self, x: mx.array, around: FusedOps = matmul_small.NO_FUSED_OPS) -> mx.array:
        """Multiplies x [T, in] with weight.T -> [T, out], by our own kernel over the tiles."""
        return matmul_4bit_tiles.kernel_matmul(x, self.tiles, self.group_size, around)

    def has_kernel(self, x: mx.array, *, gated: bool = False) -> bool:
        """Returns True if `packed_product` supports x and this weight, `gated` or not."""
        rows = self.tiles.shape[0] * tiles_4bit.TILE
        fits = x.ndim == 2 and x.dtype == self.dtype
        return fits and matmul_4bit_tiles.supports(x.shape[0], rows, gated=gated)

    def rows(self, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
        """Returns the dequantised rows of the weight for these tokens."""
        ids = tokens.reshape(-1).astype(mx.int32)
        dequantised = tiles_4bit.dequantised_rows(self.tiles, ids, self.group_size, self.dtype)
        return dequantised.reshape(*tokens.shape, -1).astype(dtype)

    def dequantised(self, dtype: mx.Dtype | None = None) -> mx.array:
        """Returns the dense weight [out, in]; `dtype` None: in the dtype of the scales."""
        dense = tiles_4bit.dequantised_rows(self.tiles, None, self.group_size, self.dtype)
        return dense.astype(dtype or self.dtype)


def in_tiles(weight: QuantisedWeight) -> QuantisedWeight | TiledWeight:
    """Returns the weight in tiles if the kernels support it on this device, else `weight` itself.

    The result is evaluated, so that at most one weight is in memory twice.
    """
    layout, scales, biases = weight.layout, weight.scales, weight.biases
    if weight.weight.ndim != 2 or (layout.mode, layout.bits) != ("affine", tiles_4bit.BITS):
        return weight
    if biases is None or biases.dtype != scales.dtype or weight.factor is not None:
        return weight
    rows, groups = scales.shape
    columns, group = groups * layout.group_size, layout.group_size
    if not tiles_4bit.fits(rows, columns, group, scales.dtype):
        return weight
    if not matmul_4bit_tiles.works(group, scales.dtype):
        return weight
    tiles = tiles_4bit.in_tiles(weight.weight, scales, biases, group)
    mx.eval(tiles)
    return TiledWeight(tiles, group, scales.dtype)
