"""Reads parts of tensors of safetensors files, without memory for the other parts.

Numbers that are contiguous in the file are read together. If a part has some columns of each row,
whole rows are read into a buffer of bounded size, and the columns are copied from the buffer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.cuts import Cut
from mlxpool.worker.weights.safetensors_header import LENGTH_BYTES

BUFFER_BYTES = 1024**2  # bytes of the buffer for whole rows; it fits into the processor's cache
RUN_BYTES = 64 * 1024  # contiguous runs of at least this size are read without the buffer
WORD = 4  # bytes of a number in the returned arrays
DTYPES = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "I8": mx.int8,
    "I16": mx.int16,
    "I32": mx.int32,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
}


class Place(Struct, frozen=True):
    """The position of a tensor in a file: the bytes [begin, end)."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorPlaces:
    """The positions of a file's tensors, from the file's current header."""

    def __init__(self, file: Path) -> None:
        """Reads the header. Raises ModelLoadFailed for an unreadable header."""
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
                self._header: Mapping[str, Mapping[str, Any]] = json.loads(opened.read(length))
        except (OSError, ValueError) as error:
            raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
        self._start = LENGTH_BYTES + length

    def find(self, name: str) -> Place | None:
        """Returns the position of a tensor; None if its name is missing or its dtype is unknown."""
        entry = self._header.get(name) if name != "__metadata__" else None
        if entry is None or entry["dtype"] not in DTYPES:
            return None
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.size:
            return None
        return Place(dtype, shape, self._start + begin, self._start + end)


class Runs(Struct, frozen=True):
    """Bytes of a file: `count` runs of `size` bytes from `begin` on, one run every `step` bytes."""

    begin: int
    size: int
    step: int
    count: int = 1

    @classmethod
    def of(cls, place: Place, cut: Cut) -> Runs:
        """Returns the runs of bytes that make up the part `cut` of the tensor at `place`."""
        outer = math.prod(place.shape[: cut.axis])
        row = (place.end - place.begin) // outer
        each = row // place.shape[cut.axis]
        size = (cut.end - cut.begin) * each
        return cls(place.begin + cut.begin * each, size, row, outer)

    @property
    def nbytes(self) -> int:
        """The total size of all runs in bytes."""
        return self.size * self.count

    def read_into(self, descriptor: int, start: int, into: memoryview) -> None:
        """Fills `into` with bytes of the joined runs, from `start` on.

        Raises OSError, or EOFError if the file ends too early.
        """
        while into:
            number, inside = divmod(start, self.size)
            rows = 0 if inside or self.size >= RUN_BYTES else len(into) // self.size
            if rows:
                rows = min(rows, max(1, BUFFER_BYTES // self.step))
                count = rows * self.size
                self._copy_rows(descriptor, number, into[:count])
            else:
                count = min(len(into), self.size - inside)
                read_into(descriptor, self.begin + number * self.step + inside, into[:count])
            start, into = start + count, into[count:]

    def _copy_rows(self, descriptor: int, number: int, into: memoryview) -> None:
        """Fills `into` with whole runs; reads the rows that contain them."""
        part = np.frombuffer(into, np.uint8).reshape(-1, self.size)
        rows = np.empty((len(part), self.step), np.uint8)
        read = (len(part) - 1) * self.step + self.size  # ends with a run: the file may end there
        start = self.begin + number * self.step
        read_into(descriptor, start, rows.reshape(-1)[:read].data)
        part[:] = rows[:, : self.size]


def read_to_host(descriptor: int, runs: Runs) -> mx.array:
    """Returns the bytes of `runs` as int32 numbers; the last number is padded with zeros.

    Raises OSError, or EOFError if the file ends too early.
    """
    numbers = np.zeros(-(-runs.nbytes // WORD), np.int32)
    runs.read_into(descriptor, 0, numbers.data.cast("B")[: runs.nbytes])
    return mx.array(numbers)


class CutReads:
    """Reads parts of the tensors of one file. Used by one thread."""

    def __init__(self, file: Path, read: Callable[[int, Runs], mx.array] = read_to_host) -> None:
        """`read` has the parameters of `read_to_host`.

        Raises ModelLoadFailed if the header cannot be read.
        """
        self._file, self._read, self._places = file, read, TensorPlaces(file)

    def read(self, name: str, shape: tuple[int, ...], cut: Cut) -> mx.array | None:
        """Reads a part of the tensor of this name and shape; None if the file lacks the tensor.

        Raises ModelLoadFailed if the part cannot be read.
        """
        place = self._places.find(name)
        if place is None or place.shape != shape:
            return None
        part_shape = cut.shape_of(shape)
        if cut.zeros or not math.prod(part_shape):
            return mx.zeros(part_shape, place.dtype)
        try:
            with self._file.open("rb", buffering=0) as opened:
                numbers = self._read(opened.fileno(), Runs.of(place, cut))
        except (OSError, EOFError) as error:
            raise ModelLoadFailed(f"{self._file} cannot be read: {error}") from error
        return numbers.view(place.dtype)[: math.prod(part_shape)].reshape(part_shape)


def read_into(descriptor: int, start: int, into: memoryview) -> None:
    """Fills `into` with a file's bytes from `start` on. Raises EOFError if the file is shorter."""
    while into:
        count = os.preadv(descriptor, [into], start)
        if not count:
            raise EOFError(f"the file ends at byte {start}")
        start, into = start + count, into[count:]
