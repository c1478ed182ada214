"""The numbers of affine quantised weights, as fast as they can be written."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALVES, Constant, kernel, works

THREADS = 256
EACH = 8  # numbers that a thread makes at a time
TIMES = 4  # that it does so


@cache
def serves(bits: int, group: int, dtype: mx.Dtype) -> bool:
    """Whether `unpack` makes such numbers here; it is tried once for each kind."""
    return dtype in HALVES and works(f"{bits} bits", lambda: _right(bits, group, dtype))


def unpack(
    weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group: int, dtype: mx.Dtype
) -> mx.array:
    """weight [out, in * bits / 32] in uint32, scales and biases [out, in / group] -> [out, in]."""
    out, groups = scales.shape
    threads = -(-out * groups * group // (EACH * TIMES))
    found: list[mx.array] = _kernel(bits, group, dtype)(
        inputs=[weight, scales, biases],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(out, groups * group)],
        output_dtypes=[dtype],
    )
    return found[0]


@cache
def _kernel(bits: int, group: int, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {"BITS": bits, "GROUP": group, "TIMES": TIMES, "N": dtype}
    return kernel("dequantise", ["weight", "scales", "biases"], ["out"], constants, whole=True)


def _right(bits: int, group: int, dtype: mx.Dtype) -> bool:
    numbers = mx.random.normal((64, 4 * group), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(numbers, group_size=group, bits=bits)
    expected = mx.dequantize(*packed, group_size=group, bits=bits)
    return bool(mx.allclose(unpack(*packed, bits, group, dtype), expected, 0.02, 0.02).item())
