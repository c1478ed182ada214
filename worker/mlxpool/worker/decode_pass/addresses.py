"""Addresses of arrays on the device, for kernels that read a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels import kernel_cache
from mlxpool.worker.kernels.kernel_builder import WARP_SIZE, build_kernel


def addresses_of(arrays: Sequence[mx.array]) -> list[int] | None:
    """Returns the addresses of the arrays on the device; evaluates the arrays.

    The addresses are valid while the caller keeps the arrays and the host does not read the arrays.
    Returns None if the numbers of an array are not contiguous.
    """
    with kernel_cache.compiling():
        places = [_address(array) for array in arrays]
        mx.eval(places)
    numbers = [np.array(place).tolist() for place in places]
    for array, (_, last, before) in zip(arrays, numbers, strict=True):
        if last != 1 or (array.ndim > 1 and before != array.shape[-1]):
            return None
    return [address for address, _, _ in numbers]


def _address(x: mx.array) -> mx.array:
    outputs: list[mx.array] = _kernel(x.ndim)(
        inputs=[x],
        grid=(WARP_SIZE, 1, 1),
        threadgroup=(WARP_SIZE, 1, 1),
        output_shapes=[(3,)],
        output_dtypes=[mx.int64],
    )
    return outputs[0]


@cache
def _kernel(dimensions: int) -> Any:
    return build_kernel("address", ["x"], ["found"], {"DIMS": dimensions})
