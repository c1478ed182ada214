"""The transfer of a pass's results to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels.kernel_builder import build_kernel, kernel_works, write_in_place
from mlxpool.worker.transfers.shared_array import LEAST_NUMBERS, SETS, Numbers, SharedArray, aligned
from mlxpool.worker.transfers.uploads import Uploads

# Fills the memory of the first array before a pass; no token or count has this value.
NOT_THERE = -(2**31)
_KINDS = {mx.int32: "i4", mx.uint32: "u4", mx.float32: "f4"}


class Downloads:
    """Transfers the results of passes in flight to the host. Used by one thread."""

    def __init__(self, size: int = LEAST_NUMBERS) -> None:
        """`size`: the count of numbers that a pass is expected to download.

        If a pass downloads more numbers, more memory is allocated.
        """
        self._size = size
        self._free = [SharedArray(size) for _ in range(SETS)]

    def begin(self, arrays: Sequence[mx.array]) -> Download:
        """Returns the download of arrays of 4-byte numbers that a pass computes."""
        total = sum(aligned(array.size) for array in arrays)
        if total > self._size:
            self._size, self._free = 2 * total, []
        into = self._free.pop() if self._free else SharedArray(self._size)
        return Download(self, into, arrays)

    def give_back(self, memory: SharedArray) -> None:
        """Takes back the memory of a finished download."""
        if memory.numbers.size == self._size:
            self._free.append(memory)


class Download:
    """A transfer to the host; after the pass has evaluated `done`, `read` returns the numbers."""

    def __init__(self, owner: Downloads, into: SharedArray, arrays: Sequence[mx.array]) -> None:
        self._owner, self._into = owner, into
        self._places: list[tuple[int, tuple[int, ...], str]] = []
        self.done: list[mx.array] = []
        at = 0
        into.numbers[: arrays[0].size] = NOT_THERE
        for array in arrays:
            self.done.append(write_to(array, into.array[at : at + array.size]))
            self._places.append((at, array.shape, _KINDS[array.dtype]))
            at += aligned(array.size)

    def arrived(self) -> Numbers | None:
        """Returns the first array's numbers, if the device has already written them; else None.

        NOT_THERE must not occur among the numbers of the first array. The device writes each number
        atomically.
        """
        at, shape, kind = self._places[0]
        numbers = self._into.numbers[at : at + math.prod(shape)].copy()
        if (numbers == NOT_THERE).any():
            return None
        return numbers.view(kind).reshape(shape)

    def read(self) -> list[Numbers]:
        """Returns the numbers of each array; called only once, after `done` was evaluated."""
        arrays = []
        for at, shape, kind in self._places:
            size = math.prod(shape)
            arrays.append(self._into.numbers[at : at + size].view(kind).reshape(shape).copy())
        self._owner.give_back(self._into)
        return arrays


@cache
def works() -> bool:
    """Returns whether uploads and downloads work here; the first call tries them."""
    return kernel_works("numbers of passes", _is_right)


def _is_right() -> bool:
    uploads, downloads = Uploads(), Downloads()
    uploads.begin()
    numbers = np.arange(8, dtype=np.float32).reshape(2, 4)
    download = downloads.begin([uploads(numbers) * 2])
    mx.eval(download.done)
    return bool((download.read()[0] == numbers * 2).all())


def write_to(numbers: mx.array, target: mx.array) -> mx.array:
    """Copies 4-byte numbers to `target`; the copy is complete when the result is evaluated."""
    inputs = [mx.contiguous(numbers.reshape(-1)), target]
    return write_in_place(_write_kernel(), inputs, numbers.size)


@cache
def _write_kernel() -> Any:
    return build_kernel("host_write", ["numbers", "shared_numbers"], ["done"], {})
