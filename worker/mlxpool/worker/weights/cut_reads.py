"""Reads parts of tensors of safetensors files, so that the rest never takes memory.

Numbers that are together in the file are read at once. Where a part has some columns of each row,
whole rows are read into a buffer of bounded size, and their columns copied out of it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.cuts import Cut
from mlxpool.worker.weights.tensor_places import Place, TensorPlaces

BUFFER_BYTES = 16 * 1024**2  # of whole rows
RUN_BYTES = 64 * 1024  # that are together in the file, from which on they are read by themselves

Bytes = npt.NDArray[np.uint8]


class CutReads:
    """The tensors of one file, of which parts are read. Used by one thread."""

    def __init__(self, file: Path) -> None:
        """Raises ModelLoadFailed where the file cannot be read."""
        self._file, self._places = file, TensorPlaces(file)

    def read(self, name: str, shape: tuple[int, ...], cut: Cut) -> mx.array | None:
        """Reads the part of a tensor of this shape; None where the file has no such tensor.

        Raises ModelLoadFailed where it cannot be read.
        """
        place = self._places.find(name)
        if place is None or place.shape != shape:
            return None
        wanted = cut.shape_of(shape)
        if cut.zeros or not math.prod(wanted):
            return mx.zeros(wanted, place.dtype)
        try:
            with self._file.open("rb", buffering=0) as opened:
                part = _read_part(opened.fileno(), place, cut)
        except (OSError, EOFError) as error:
            raise ModelLoadFailed(f"{self._file} cannot be read: {error}") from error
        return mx.array(part).view(place.dtype).reshape(wanted)


def _read_part(descriptor: int, place: Place, cut: Cut) -> Bytes:
    """Returns the bytes of a part, in order.

    The tensor is seen as `outer` rows of bytes, of which the part has [first, last) each.
    """
    outer = math.prod(place.shape[: cut.axis])
    row = (place.end - place.begin) // outer
    each = row // place.shape[cut.axis]
    first, last = cut.begin * each, cut.end * each
    part = np.empty((outer, last - first), np.uint8)
    if last - first >= RUN_BYTES or outer == 1:
        for number in range(outer):
            read_into(descriptor, place.begin + number * row + first, part[number].data)
        return part.reshape(-1)
    rows = max(1, BUFFER_BYTES // row)
    buffer = np.empty((min(rows, outer), row), np.uint8)
    for at in range(0, outer, rows):
        whole = buffer[: min(rows, outer - at)]
        read_into(descriptor, place.begin + at * row, whole.reshape(-1).data)
        part[at : at + len(whole)] = whole[:, first:last]
    return part.reshape(-1)


def read_into(descriptor: int, start: int, into: memoryview) -> None:
    """Fills `into` with the bytes of a file from `start` on. Raises EOFError where it ends."""
    while into:
        count = os.preadv(descriptor, [into], start)
        if not count:
            raise EOFError(f"it ends at byte {start}")
        start, into = start + count, into[count:]
