"""Dequantises affine weights, as fast as memory can be written."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES, Constant, build_kernel, kernel_works

THREADS = 256
NUMBERS_PER_STEP = 8  # that a thread makes at a time
STEPS_PER_THREAD = 4


@cache
def supports(bits: int, group: int, dtype: mx.Dtype) -> bool:
    """Returns whether `unpack` supports these weights here; tries each kind once."""
    return dtype in HALF_DTYPES and kernel_works(
        f"{bits} bits", lambda: _is_right(bits, group, dtype)
    )


def unpack(
    weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group: int, dtype: mx.Dtype
) -> mx.array:
    """Dequantises weight [out, in * bits / 32] in uint32 -> [out, in].

    scales and biases are [out, in / group].
    """
    out, groups = scales.shape
    threads = -(-out * groups * group // (NUMBERS_PER_STEP * STEPS_PER_THREAD))
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
    constants: dict[str, Constant] = {
        "BITS": bits,
        "GROUP": group,
        "TIMES": STEPS_PER_THREAD,
        "N": dtype,
    }
    return build_kernel(
        "dequantise", ["weight", "scales", "biases"], ["out"], constants, contiguous=True
    )


def _is_right(bits: int, group: int, dtype: mx.Dtype) -> bool:
    numbers = mx.random.normal((64, 4 * group), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(numbers, group_size=group, bits=bits)
    expected = mx.dequantize(*packed, group_size=group, bits=bits)
    return bool(mx.allclose(unpack(*packed, bits, group, dtype), expected, 0.02, 0.02).item())
