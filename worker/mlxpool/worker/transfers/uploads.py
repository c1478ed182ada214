"""The transfer of a pass's inputs from the host."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.transfers.shared_array import LEAST_NUMBERS, SETS, Numbers, SharedArray, aligned

MIN_HEAD = 256  # the fewest numbers of the head before a table
_DTYPES = {"i": mx.int32, "u": mx.uint32, "f": mx.float32}


class Upload(Protocol):
    """A function that makes a device array of 4-byte numbers; the pass evaluates the array."""

    def __call__(self, numbers: Numbers, /) -> mx.array:
        """Returns the device array of `numbers`."""


def upload_copy(numbers: Numbers) -> mx.array:
    """Copies numbers into a new array of MLX: the Upload without a CUDA GPU."""
    return mx.array(numbers)


class Uploads:
    """Makes device arrays of host numbers for passes. Used by one thread."""

    def __init__(self, size: int = LEAST_NUMBERS) -> None:
        """`size`: the count of numbers that a pass is expected to upload.

        If a pass uploads more numbers, more memory is allocated.
        """
        self._sets = [SharedArray(size) for _ in range(SETS)]
        self._newest = 0
        self._used = 0  # numbers used in the newest array

    def begin(self) -> None:
        """Begins the uploads of the next pass."""
        self._newest = (self._newest + 1) % SETS
        self._used = 0

    def take(self, count: int) -> tuple[npt.NDArray[np.int32], mx.array]:
        """Returns the host's array and the device's array of the same memory for `count` numbers.

        The host must write the numbers before the device's array is evaluated. The pass copies the
        device's array from this shared memory into memory of the device.
        """
        first, end = self._used, self._used + count
        if end > self._sets[self._newest].numbers.size:
            # Earlier arrays of the pass keep their memory.
            self._sets[self._newest] = SharedArray(2 * end)
            first, end = 0, count
        self._used = aligned(end)
        of_pass = self._sets[self._newest]
        return of_pass.numbers[first:end], of_pass.array[first:end]

    def __call__(self, numbers: Numbers, /) -> mx.array:
        """Returns the device array of int32, uint32 or float32 numbers of any shape; see Upload."""
        into, array = self.take(numbers.size)
        into[:] = numbers.reshape(-1).view(np.int32)
        return (array + 0).view(_DTYPES[numbers.dtype.kind]).reshape(numbers.shape)

    def table(self, head: Numbers, lines: Numbers) -> mx.array:
        """Returns one array: the numbers of `head`, then of the table `lines`; see upload_table."""
        into, array = self.take(head.size + lines.size)
        into[: head.size] = head
        into[head.size :] = lines.reshape(-1)
        return array + 0


class SharedTable:
    """A table of int32 numbers, in memory that the host writes and the device reads.

    Other numbers (the `head`) are in front of the table.
    """

    def __init__(self, lines: int, width: int) -> None:
        """`lines`: the most lines (table rows), of `width` numbers each.

        The head has room for as many numbers as there are lines, and for at least MIN_HEAD numbers.
        """
        self._head = aligned(max(lines, MIN_HEAD))
        self._memory = SharedArray(self._head + lines * width)
        self.lines = self._memory.numbers[self._head :].reshape(lines, width)

    def with_head(self, head: Numbers, used: int) -> mx.array | None:
        """Returns an array of `head` and the first `used` lines; None if `head` is too long.

        The array must be evaluated before the memory is written again.
        """
        if head.size > self._head:
            return None
        first = self._head - head.size
        self._memory.numbers[first : self._head] = head
        end = self._head + used * self.lines.shape[1]
        return self._memory.array[first:end] + 0


def upload_table(
    upload: Upload, head: Numbers, lines: Numbers, shared: SharedTable | None = None
) -> mx.array:
    """Returns int32 numbers: `head` [n] int32, then the numbers of `lines` [_, width] int32.

    The numbers are copied once if the device addresses the host's memory. The host does not copy
    `lines` if they are in `shared`.
    """
    if shared is not None:
        array = shared.with_head(head, len(lines))
        if array is not None:
            return array
    if isinstance(upload, Uploads):
        return upload.table(head, lines)
    return upload(np.concatenate([head, lines.reshape(-1)]))
