"""The grid of kernels that compute several operations of one token, see cuda/token_rows.cuh.

For one token, each separate kernel costs the host more than the device. Thread blocks of a combined
kernel wait for each other, so all must be resident together: one block on each multiprocessor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels import device
from mlxpool.worker.kernels.kernel_builder import WARP_SIZE, Constant, build_kernel, include_line

WARPS = 16  # warps of a thread block
THREADS = WARPS * WARP_SIZE
STATE_WORDS = 4  # words of memory for the barrier of the grid
COLUMNS = 64  # a row of a weight has a multiple of this many numbers
MIN_MULTIPROCESSORS = 64  # with fewer, the combined kernel is slower
MAX_SHARED_BYTES = 128 * 1024  # shared memory of a thread block


def is_resident() -> bool:
    """Returns whether one thread block for each multiprocessor can be resident together."""
    count = device.multiprocessors()
    return count >= MIN_MULTIPROCESSORS and not device.shares_multiprocessors()


def build(
    name: str,
    inputs: Sequence[str],
    constants: Mapping[str, Constant],
    shared: int,
    header: str = "",
) -> Any:
    """Builds the kernel of `name`.cu, which has one output, see `kernel_builder.build_kernel`."""
    return build_kernel(
        name,
        inputs,
        ["out"],
        {"BLOCKS": device.multiprocessors(), **constants},
        contiguous=True,
        shared=shared,
        header=include_line("grid_barrier.cuh") + include_line("token_rows.cuh") + header,
        bounds=(THREADS, 1),
    )


def launch(
    kernel: Any, inputs: Sequence[mx.array | None], shape: Sequence[int], dtype: mx.Dtype
) -> mx.array:
    """Runs a kernel made by `build`; returns its output."""
    outputs: list[mx.array] = kernel(
        inputs=list(inputs),
        grid=(device.multiprocessors() * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[tuple(shape)],
        output_dtypes=[dtype],
    )
    return outputs[0]


@cache
def memory(name: str, words: int) -> mx.array:
    """Returns scratch memory of a kernel: `words` words after the words of the barrier.

    Launches with the same memory never overlap, because each launch reads the output of the
    previous launch.
    """
    scratch = mx.zeros((STATE_WORDS + words,), dtype=mx.int32)
    device.evaluate_in_own_memory([scratch])
    return scratch
