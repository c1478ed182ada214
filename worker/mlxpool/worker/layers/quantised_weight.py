"""Quantised weights in MLX: products, single rows, and dequantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import dequantise, matmul_4bit, matmul_small
from mlxpool.worker.kernels.device import on_gpu
from mlxpool.worker.kernels.matmul_small import FusedOps
from mlxpool.worker.layers.quantisation import NVFP4_RANGE, QuantLayout

# The least rows of x for which dequantising and a dense product are faster (docs/benchmarks.md).
CPU_DEQUANTISE_ROWS = 8
GPU_DEQUANTISE_ROWS = 6


def _pays_to_dequantise(x: mx.array, group_size: int) -> bool:
    """Returns True if dequantising the weight first is faster or more exact for x [..., T, in]."""
    if not on_gpu():
        return x.shape[-2] >= CPU_DEQUANTISE_ROWS
    if x.dtype == mx.float32 and x.shape[-1] <= group_size < x.size:
        return True  # if a row is one group, MLX's products on Hopper round to 10 bits
    return x.shape[-2] >= GPU_DEQUANTISE_ROWS


class QuantisedWeight(Struct, frozen=True):
    """A quantised weight [..., out, in]; `factor` is float32 [] or [E], or None."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    factor: mx.array | None
    layout: QuantLayout

    @classmethod
    def of(
        cls, arrays: Mapping[str, mx.array], module: str, layout: QuantLayout
    ) -> QuantisedWeight:
        """Returns the weight of `module`; its tensors are among `arrays`."""
        weight, factor = arrays[f"{module}.weight"], arrays.get(f"{module}.factor")
        if f"{module}.global_scale" in arrays:
            factor = arrays[f"{module}.global_scale"] / NVFP4_RANGE
        return cls(
            weight,
            arrays[f"{module}.scales"],
            arrays.get(f"{module}.biases"),
            None if factor is None else factor.reshape(weight.shape[:-2]),
            layout,
        )

    def __call__(self, x: mx.array, *, transpose: bool = True) -> mx.array:
        """Multiplies x [..., in] with weight.T -> [..., out].

        Without `transpose`, multiplies x [..., out] with the weight -> [..., in].
        """
        layout = self.layout
        if transpose and self.has_kernel(x):
            return self.packed_product(x)
        if _pays_to_dequantise(x, layout.group_size):
            dense = self.dequantised(x.dtype)
            if transpose and dense.ndim == 2:
                return matmul_small.matmul(x, dense)
            return x @ (dense.swapaxes(-1, -2) if transpose else dense)
        out = mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=transpose,
            group_size=layout.group_size,
            bits=layout.bits,
            mode=layout.mode,
        )
        return _scaled(out, None if self.factor is None else self.factor[..., None, None])

    def gated(self, x: mx.array) -> mx.array | None:
        """Returns silu(gate) * up [T, out / 2] of x [T, in]; the first half of `out` are the gates.

        Returns None if no single kernel computes this.
        """
        if self.has_kernel(x):
            return self.packed_product(x, FusedOps(gated=True))
        if x.ndim != 2 or self.weight.ndim != 2:
            return None
        rows, columns = x.shape
        pays = _pays_to_dequantise(x, self.layout.group_size)
        if pays and matmul_small.supports(rows, columns, self.weight.shape[0], x.dtype):
            return matmul_small.gated_matmul(x, self.dequantised(x.dtype))
        return None

    def fuses(self, x: mx.array) -> bool:
        """Returns True if `packed_product` supports x [T, in] and operations around the product."""
        return matmul_small.is_fusable(x) and self.has_kernel(x)

    def packed_product(self, x: mx.array, around: FusedOps = matmul_small.NO_FUSED_OPS) -> mx.array:
        """Multiplies x [T, in] with weight.T -> [T, out], by our kernel over the packed weight."""
        assert self.biases is not None
        group = self.layout.group_size
        return matmul_4bit.kernel_matmul(x, self.weight, self.scales, self.biases, group, around)

    def has_kernel(self, x: mx.array, *, gated: bool = False) -> bool:
        """Returns True if `packed_product` supports x and this weight, `gated` or not."""
        layout = self.layout
        if x.ndim != 2 or self.weight.ndim != 2 or (layout.mode, layout.bits) != ("affine", 4):
            return False
        rows, columns = self.weight.shape[0], x.shape[1]
        has_biases = self.biases is not None and self.biases.dtype == x.dtype
        fits = has_biases and self.scales.dtype == x.dtype and self.factor is None
        return fits and matmul_4bit.supports(x.shape[0], rows, columns, layout.group_size, x.dtype)

    def gathered_product(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Multiplies each row of x [..., 1, in] with its expert's weight -> [..., 1, out].

        The whole weight is [E, out, in].
        """
        layout = self.layout
        out = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=layout.group_size,
            bits=layout.bits,
            mode=layout.mode,
            sorted_indices=is_sorted,
        )
        return _scaled(out, None if self.factor is None else self.factor[experts][..., None, None])

    def rows(self, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
        """Returns the dequantised rows of the weight for these tokens."""
        if self._has_rows_kernel(tokens, dtype):
            assert self.biases is not None
            bits, group = self.layout.bits, self.layout.group_size
            packed = self.weight, self.scales, self.biases
            return dequantise.unpack_rows(*packed, tokens, bits, group, dtype)
        biases = None if self.biases is None else self.biases[tokens]
        row = QuantisedWeight(
            self.weight[tokens], self.scales[tokens], biases, self.factor, self.layout
        )
        return row.dequantised(dtype)

    def _has_rows_kernel(self, tokens: mx.array, dtype: mx.Dtype) -> bool:
        """Returns True if our kernel reads rows of this weight, which must have `biases`."""
        layout = self.layout
        plain = self.weight.ndim == 2 and self.factor is None and self.biases is not None
        some = tokens.ndim == 1 and tokens.dtype == mx.int32
        return plain and some and dequantise.supports_rows(layout.bits, layout.group_size, dtype)

    def dequantised(self, dtype: mx.Dtype | None = None) -> mx.array:
        """Returns the dense weight [..., out, in]; `dtype` None: in a dtype that loses nothing."""
        layout = self.layout
        kind = dtype or self.scales.dtype
        plain = self.weight.ndim == 2 and self.factor is None
        biases = self.biases if plain else None  # weights of mode affine have biases
        if biases is not None and dequantise.supports(layout.bits, layout.group_size, kind):
            return dequantise.unpack(
                self.weight, self.scales, biases, layout.bits, layout.group_size, kind
            )
        out = mx.dequantize(
            self.weight,
            self.scales,
            self.biases,
            group_size=layout.group_size,
            bits=layout.bits,
            mode=layout.mode,
            dtype=dtype,
        )
        return _scaled(out, None if self.factor is None else self.factor[..., None, None])


def concatenated(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Returns weights [..., out, in] concatenated along `out`.

    If there are several weights, they must have the same layout and no factor.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    whole = QuantisedWeight(
        mx.concatenate([part.weight for part in weights], axis=-2),
        mx.concatenate([part.scales for part in weights], axis=-2),
        _joined([part.biases for part in weights]),
        None,
        first.layout,
    )
    mx.eval([array for array in (whole.weight, whole.scales, whole.biases) if array is not None])
    return whole


def _joined(arrays: Sequence[mx.array | None]) -> mx.array | None:
    present = [array for array in arrays if array is not None]
    return mx.concatenate(present, axis=-2) if present else None


def _scaled(out: mx.array, factor: mx.array | None) -> mx.array:
    return out if factor is None else (out * factor).astype(out.dtype)
