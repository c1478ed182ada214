"""Memory that the host and a CUDA GPU both address.

MLX has one cache of freed buffers, both of device memory and of managed memory. An array of host
numbers needs managed memory. If the cache returns a buffer in device memory, MLX replaces this
buffer, and the host has to wait for the device. The host also waits when managed memory is freed,
and when an array in device memory is read. Under mixed load on an H200, the host thus waited for
the pass in flight in a third of the steps. Arrays of this module are allocated once and reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

# Sets of memory, more than the passes in flight: no pass still reads the set that the next pass
# overwrites.
SETS = 3
LEAST_NUMBERS = 4096  # numbers in the memory of a pass
ALIGNMENT = 32  # arrays begin at multiples of this many numbers

# Parameters of cuMemAdvise: the memory stays on the host, and the device reads and writes it there.
# The last two end this advice.
_PREFERRED_LOCATION, _ACCESSED_BY, _HOST, _DEVICE = 3, 5, -1, 0
_NO_LOCATION, _NO_ACCESS = 4, 6

Numbers = npt.NDArray[Any]


class SharedArray:
    """Memory for `size` int32 numbers: the device uses `array`, the host uses `numbers`."""

    def __init__(self, size: int) -> None:
        self.array = mx.zeros((size,), dtype=mx.int32)
        mx.eval(self.array)
        self.numbers = np.array(self.array, copy=False)  # a view; MLX moves the array to the host
        place = self.numbers.ctypes.data, self.numbers.nbytes
        _advise(*place, _PREFERRED_LOCATION, _ACCESSED_BY)
        # MLX keeps freed memory for the outputs of operations, which should be on the device.
        weakref.finalize(self, _advise, *place, _NO_LOCATION, _NO_ACCESS).atexit = False


def aligned(count: int) -> int:
    """Returns `count` rounded up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _advise(address: int, size: int, location: int, access: int) -> None:
    """Advises the driver on the location of managed memory and on the processors that use it.

    Without advice, pages move to the processor that uses them: this takes longer but is correct.
    """
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL("libcuda.so.1").cuMemAdvise
        where, count = ctypes.c_uint64(address), ctypes.c_size_t(size)
        advise(where, count, location, _HOST)
        advise(where, count, access, _DEVICE)
