"""Memory that the host and a CUDA GPU both address.

MLX has one cache of freed buffers, of the device's own memory and of managed memory alike. An array
made of the host's numbers needs managed memory: where the cache has a buffer of the device's own of
that size, MLX replaces it, which waits for the device, as freeing managed memory does. To read an
array of the device's own does the same. Under mixed load on an H200 the host so waited for the pass
in flight in a third of the steps. What is here is allocated once and used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

# More passes than are in flight: where a pass begins, nobody reads what it will overwrite.
SETS = 3
LEAST_NUMBERS = 4096  # of the memory of a pass
ALIGNMENT = 32  # numbers between the beginnings of two arrays in it

# Of cuMemAdvise: the memory stays with the host, and the device reads and writes it there; and the
# end of both.
_PREFERRED_LOCATION, _ACCESSED_BY, _HOST, _DEVICE = 3, 5, -1, 0
_NO_LOCATION, _NO_ACCESS = 4, 6

Numbers = npt.NDArray[Any]


class SharedArray:
    """`size` int32 numbers: `array` for the device, `numbers` for the host."""

    def __init__(self, size: int) -> None:
        self.array = mx.zeros((size,), dtype=mx.int32)
        mx.eval(self.array)
        self.numbers = np.array(self.array, copy=False)  # a view; MLX moves the array to the host
        place = self.numbers.ctypes.data, self.numbers.nbytes
        _advise(*place, _PREFERRED_LOCATION, _ACCESSED_BY)
        # MLX keeps freed memory for the outputs of operations, which belong on the device.
        weakref.finalize(self, _advise, *place, _NO_LOCATION, _NO_ACCESS).atexit = False


def aligned(count: int) -> int:
    """Returns the numbers that an array of `count` numbers takes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _advise(address: int, size: int, location: int, access: int) -> None:
    """Tells the driver where `size` bytes of managed memory should be, and who addresses them.

    Without advice pages move to where they are used, which takes longer and is right as well.
    """
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL("libcuda.so.1").cuMemAdvise
        where, count = ctypes.c_uint64(address), ctypes.c_size_t(size)
        advise(where, count, location, _HOST)
        advise(where, count, access, _DEVICE)
