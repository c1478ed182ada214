"""A record that is to be written: what it has, and the bytes of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxpool.worker.prefix_disk.pacing import Pace
from mlxpool.worker.prefix_disk.records import ArrayPlace, Kind, payload_bytes
from mlxpool.worker.prefix_disk.segments import Bytes


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array of a record in parts, which are joined on `axis`; items are raw numbers.

    `dtype` is MLX's name: NumPy has no bfloat16, whose items are uint16 here.
    """

    name: str
    dtype: str
    parts: tuple[np.ndarray[Any, Any], ...]
    axis: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all parts together."""
        shape = list(self.parts[0].shape)
        if shape:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to write: what is kept of inputs `ids`, of which the first has number `start`."""

    kind: Kind
    start: int
    parent: bytes
    key: bytes
    ids: tuple[int, ...]
    arrays: tuple[NamedArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.nbytes for array in self.arrays for part in array.parts)


def payload_of(
    record: NewRecord,
    places: Sequence[ArrayPlace],
    into: Bytes | None = None,
    pace: Pace | None = None,
) -> Bytes:
    """Returns the arrays of a record as they are stored, in `into`, which has as many bytes, or in
    new memory.
    """
    whole = np.empty(payload_bytes(places), dtype=np.uint8) if into is None else into
    end = 0
    for array, place in zip(record.arrays, places, strict=True):
        whole[end : place.offset] = 0  # what aligns the array
        end = place.offset + place.nbytes
        target = whole[place.offset : end]
        typed = target.view(array.parts[0].dtype).reshape(place.shape)
        if len(array.parts) == 1:
            np.copyto(typed, array.parts[0])
        else:
            np.concatenate(array.parts, axis=array.axis, out=typed)
        if pace is not None:
            pace.rest()
    whole[end:] = 0
    return whole
