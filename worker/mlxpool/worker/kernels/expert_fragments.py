"""Quantised weights of experts, ordered for tensor cores; see expert_fragments.cuh."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels.kernel_builder import (
    Constant,
    build_kernel,
    declarations,
    include_line,
)

ROWS = 16  # rows of a fragment
COLUMNS = 64
THREADS = 256
MAX_MXFP4_SCALE = 128  # in E8M0; a larger exponent means a scale of 4 or more


class PackedFormat(Struct, frozen=True):
    """A format of quantised numbers: `bits` each, in groups of `group` with a scale, as in MLX.

    If `floats` is true, the mode is mxfp4; otherwise it is affine, with biases.
    """

    bits: int
    group: int
    floats: bool

    @property
    def mode(self) -> str:
        """The name of the format in MLX."""
        return "mxfp4" if self.floats else "affine"

    @property
    def fragment_bytes(self) -> int:
        """The bytes of a fragment: 16 rows and 64 columns, with scales and biases."""
        return ROWS * COLUMNS * self.bits // 8 + ROWS // 2 * self._factor_bytes

    @property
    def fragment_words(self) -> int:
        """The words of 32 bits that each thread of a warp has of a fragment."""
        return self.bits + self._factor_bytes // 4

    @property
    def _factor_bytes(self) -> int:
        """The bytes of the scales and biases of two rows of a fragment."""
        return COLUMNS // self.group * (2 if self.floats else 8)


PACKED_FORMATS = (
    *(PackedFormat(bits, group, floats=False) for bits in (4, 8) for group in (32, 64)),
    PackedFormat(4, 32, floats=True),
)


class PackedArrays(Struct, frozen=True):
    """Quantised weights [E, out, in] as MLX stores them, in words of uint32."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    packed: PackedFormat

    def opened(self) -> mx.array:
        """Returns the dequantised weights."""
        return mx.dequantize(
            self.weight,
            self.scales,
            self.biases,
            group_size=self.packed.group,
            bits=self.packed.bits,
            mode=self.packed.mode,
        )


def quantised(weight: mx.array, packed: PackedFormat) -> PackedArrays:
    """Returns experts' weights [E, out, in] in this format."""
    arrays = mx.quantize(weight, group_size=packed.group, bits=packed.bits, mode=packed.mode)
    return PackedArrays(arrays[0], arrays[1], None if packed.floats else arrays[2], packed)


def in_fragments(weights: PackedArrays, *, gated: bool) -> mx.array:
    """Returns fragments [E, out / 16, in / 64, words] in uint32.

    `gated`: the first half of the rows are gates; a fragment has eight gates and the eight matching
    ups.
    """
    packed, (experts, rows, words) = weights.packed, weights.weight.shape
    steps = words * 32 // packed.bits // COLUMNS
    shape = (experts, rows // ROWS, steps, packed.fragment_bytes // 4)
    count = experts * shape[1] * steps * shape[3]
    outputs: list[mx.array] = _kernel(packed, gated, weights.scales.dtype)(
        inputs=[weights.weight, weights.scales, weights.biases],
        grid=(-(-count // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.uint32],
    )
    return outputs[0]


def header(packed: PackedFormat) -> str:
    """Returns the C++ code with which kernels that read fragments begin."""
    constants: dict[str, Constant] = {
        "BITS": packed.bits,
        "GROUP": packed.group,
        "FLOATS": packed.floats,
    }
    files = ("raised_numbers.cuh", "expert_fragments.cuh")
    return declarations(constants) + "".join(map(include_line, files))


@cache
def _kernel(packed: PackedFormat, gated: bool, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {
        "GATED": gated,
        "N": mx.bfloat16 if packed.floats else dtype,
    }
    return build_kernel(
        "expert_fragments",
        ["weight", "scales", "biases"],
        ["out"],
        constants,
        contiguous=True,
        header=header(packed),
    )
