"""Dequantises affine weights, or rows of weights, at the speed of memory writes."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    Constant,
    build_kernel,
    include_line,
    kernel_works,
)

THREADS = 256
NUMBERS_PER_STEP = 8  # numbers that a thread dequantises at a time
STEPS_PER_THREAD = 4


@cache
def supports(bits: int, group: int, dtype: mx.Dtype) -> bool:
    """Returns whether `unpack` supports weights of this format; tries each format once."""
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
    outputs: list[mx.array] = _kernel(bits, group, dtype)(
        inputs=[weight, scales, biases],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(out, groups * group)],
        output_dtypes=[dtype],
    )
    return outputs[0]


@cache
def supports_rows(bits: int, group: int, dtype: mx.Dtype) -> bool:
    """Returns whether `unpack_rows` supports weights of this format; tries each format once."""
    return dtype in HALF_DTYPES and kernel_works(
        f"rows of {bits} bits", lambda: _rows_are_right(bits, group, dtype)
    )


def unpack_rows(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    ids: mx.array,
    bits: int,
    group: int,
    dtype: mx.Dtype,
) -> mx.array:
    """Dequantises the rows `ids` [T], int32, of a weight as in `unpack` -> [T, in].

    MLX would gather rows with a kernel that it compiles at each load.
    """
    lines, columns = ids.shape[0], scales.shape[1] * group
    threads = lines * columns // NUMBERS_PER_STEP
    outputs: list[mx.array] = _rows_kernel(bits, group, dtype)(
        inputs=[weight, scales, biases, ids],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, columns)],
        output_dtypes=[dtype],
    )
    return outputs[0]


@cache
def _kernel(bits: int, group: int, dtype: mx.Dtype) -> Any:
    constants = _constants(bits, group, dtype) | {"TIMES": STEPS_PER_THREAD}
    inputs, header = ["weight", "scales", "biases"], include_line("packed_numbers.cuh")
    return build_kernel("dequantise", inputs, ["out"], constants, contiguous=True, header=header)


@cache
def _rows_kernel(bits: int, group: int, dtype: mx.Dtype) -> Any:
    inputs, header = ["weight", "scales", "biases", "ids"], include_line("packed_numbers.cuh")
    constants = _constants(bits, group, dtype)
    return build_kernel(
        "dequantise_rows", inputs, ["out"], constants, contiguous=True, header=header
    )


def _constants(bits: int, group: int, dtype: mx.Dtype) -> dict[str, Constant]:
    return {"BITS": bits, "GROUP": group, "N": dtype}


def _is_right(bits: int, group: int, dtype: mx.Dtype) -> bool:
    numbers = mx.random.normal((64, 4 * group), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(numbers, group_size=group, bits=bits)
    expected = mx.dequantize(*packed, group_size=group, bits=bits)
    return bool(mx.allclose(unpack(*packed, bits, group, dtype), expected, 0.02, 0.02).item())


def _rows_are_right(bits: int, group: int, dtype: mx.Dtype) -> bool:
    numbers = mx.random.normal((4, 2 * group), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(numbers, group_size=group, bits=bits)
    rows = mx.split(mx.dequantize(*packed, group_size=group, bits=bits), 4)
    taken = unpack_rows(*packed, mx.array([3, 0, 3], dtype=mx.int32), bits, group, dtype)
    expected = mx.concatenate([rows[3], rows[0], rows[3]])  # MLX would compile a gather
    return bool(mx.allclose(taken, expected, 0.02, 0.02).item())
