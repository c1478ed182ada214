"""Addresses of arrays on the device, for kernels that read a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels import kernel_cache
from mlxpool.worker.kernels.kernel_builder import WARP_SIZE, build_kernel


def addresses_of(arrays: Sequence[mx.array]) -> list[int] | None:
    """Returns the addresses of the arrays on the device; computes those that are not yet.

    They are valid while the caller keeps the arrays and the host does not read them. Returns None
    where an array's numbers do not lie one behind the other.
    """
    with kernel_cache.compiling():
        found = [_address(one) for one in arrays]
        mx.eval(found)
    numbers = [np.array(one).tolist() for one in found]
    for one, (_, last, before) in zip(arrays, numbers, strict=True):
        if last != 1 or (one.ndim > 1 and before != one.shape[-1]):
            return None
    return [address for address, _, _ in numbers]


def _address(x: mx.array) -> mx.array:
    found: list[mx.array] = _kernel(x.ndim)(
        inputs=[x],
        grid=(WARP_SIZE, 1, 1),
        threadgroup=(WARP_SIZE, 1, 1),
        output_shapes=[(3,)],
        output_dtypes=[mx.int64],
    )
    return found[0]


@cache
def _kernel(dimensions: int) -> Any:
    return build_kernel("address", ["x"], ["found"], {"DIMS": dimensions})
