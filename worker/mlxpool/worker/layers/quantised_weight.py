"""Quantised weights in MLX: products with them, rows of them, and the numbers they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.kernels import dequantise, matmul_4bit, matmul_small
from mlxpool.worker.kernels.matmul_small import Around
from mlxpool.worker.layers.quantisation import NVFP4_RANGE, QuantLayout

# Lines from which on a plain product of opened numbers is faster (docs/benchmarks.md).
CPU_DEQUANTISE_ROWS = 8
GPU_DEQUANTISE_ROWS = 6


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _many(x: mx.array, group: int) -> bool:
    """Whether opening a weight with groups of so many columns pays for these lines [..., T, in]."""
    if not _on_gpu():
        return x.shape[-2] >= CPU_DEQUANTISE_ROWS
    if x.dtype == mx.float32 and x.shape[-1] <= group < x.size:
        return True  # of one group a row MLX's products on Hopper read ten bits of a fraction
    return x.shape[-2] >= GPU_DEQUANTISE_ROWS


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [..., out, in] as its layout keeps it; `factor` is float32 [] or [E], or None."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    factor: mx.array | None
    layout: QuantLayout

    @classmethod
    def of(
        cls, arrays: Mapping[str, mx.array], module: str, layout: QuantLayout
    ) -> QuantisedWeight:
        """The weight of `module`, whose tensors are among `arrays`."""
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
        """x [..., in] @ weight.T -> [..., out]; without `transpose` x [..., out] -> [..., in]."""
        layout = self.layout
        if transpose and self._reads(x):
            return self.as_it_lies(x)
        if _many(x, layout.group):
            numbers = self.dense(x.dtype)
            if transpose and numbers.ndim == 2:
                return matmul_small.times(x, numbers)
            return x @ (numbers.swapaxes(-1, -2) if transpose else numbers)
        out = mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=transpose,
            group_size=layout.group,
            bits=layout.bits,
            mode=layout.mode,
        )
        return _scaled(out, None if self.factor is None else self.factor[..., None, None])

    def gated(self, x: mx.array) -> mx.array | None:
        """x [T, in] -> silu(gate) * other [T, out / 2] where a kernel does it in one, else None.

        The first half of `out` are gates.
        """
        if self._reads(x):
            return self.as_it_lies(x, Around(gated=True))
        opened = x.ndim == self.weight.ndim == 2 and _many(x, self.layout.group)
        if opened and matmul_small.serves(x.shape[0], x.shape[1], self.weight.shape[0], x.dtype):
            return matmul_small.gated(x, self.dense(x.dtype))
        return None

    def fuses(self, x: mx.array) -> bool:
        """Whether `as_it_lies` takes x [T, in] and does what is Around the product, too."""
        return matmul_small.few(x) and self._reads(x)

    def as_it_lies(self, x: mx.array, around: Around = matmul_small.PLAIN) -> mx.array:
        """x [T, in] @ weight.T -> [T, out], with the weight as it lies."""
        assert self.biases is not None
        group = self.layout.group
        return matmul_4bit.product(x, self.weight, self.scales, self.biases, group, around)

    def _reads(self, x: mx.array) -> bool:
        layout = self.layout
        if x.ndim != 2 or self.weight.ndim != 2 or (layout.mode, layout.bits) != ("affine", 4):
            return False
        rows, columns = self.weight.shape[0], x.shape[1]
        biased = self.biases is not None and self.biases.dtype == x.dtype
        fits = biased and self.scales.dtype == x.dtype and self.factor is None
        return fits and matmul_4bit.serves(x.shape[0], rows, columns, layout.group, x.dtype)

    def gathered(self, x: mx.array, experts: mx.array, ordered: bool) -> mx.array:
        """x [..., 1, in] with the expert of each, of a weight [E, out, in] -> [..., 1, out]."""
        layout = self.layout
        out = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=layout.group,
            bits=layout.bits,
            mode=layout.mode,
            sorted_indices=ordered,
        )
        return _scaled(out, None if self.factor is None else self.factor[experts][..., None, None])

    def rows(self, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
        """tokens [T] -> [T, in], the numbers of these rows."""
        biases = None if self.biases is None else self.biases[tokens]
        row = QuantisedWeight(
            self.weight[tokens], self.scales[tokens], biases, self.factor, self.layout
        )
        return row.dense(dtype)

    def dense(self, dtype: mx.Dtype | None = None) -> mx.array:
        """The numbers [..., out, in]; without a `dtype` in the one that holds them without loss."""
        layout = self.layout
        kind = dtype or self.scales.dtype
        plain = self.weight.ndim == 2 and self.factor is None
        biases = self.biases if plain else None  # affine ones have them
        if biases is not None and dequantise.serves(layout.bits, layout.group, kind):
            return dequantise.unpack(
                self.weight, self.scales, biases, layout.bits, layout.group, kind
            )
        out = mx.dequantize(
            self.weight,
            self.scales,
            self.biases,
            group_size=layout.group,
            bits=layout.bits,
            mode=layout.mode,
            dtype=dtype,
        )
        return _scaled(out, None if self.factor is None else self.factor[..., None, None])


def concatenated(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """The weights [..., out, in] as one along `out`; many have one layout and no factor."""
    first = parts[0]
    if len(parts) == 1:
        return first
    whole = QuantisedWeight(
        mx.concatenate([part.weight for part in parts], axis=-2),
        mx.concatenate([part.scales for part in parts], axis=-2),
        _joined([part.biases for part in parts]),
        None,
        first.layout,
    )
    mx.eval([one for one in (whole.weight, whole.scales, whole.biases) if one is not None])
    return whole


def _joined(arrays: Sequence[mx.array | None]) -> mx.array | None:
    there = [array for array in arrays if array is not None]
    return mx.concatenate(there, axis=-2) if there else None


def _scaled(out: mx.array, factor: mx.array | None) -> mx.array:
    return out if factor is None else (out * factor).astype(out.dtype)
