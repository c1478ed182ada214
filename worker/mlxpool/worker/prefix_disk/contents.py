"""A record that is to be written: what it has, and the bytes of its arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from mlxpool.worker.prefix_disk.pacing import PIECE, Pace
from mlxpool.worker.prefix_disk.records import ArrayPlace, Kind, payload_bytes
from mlxpool.worker.prefix_disk.segments import Bytes


class NamedArray(Struct, frozen=True):
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


class NewRecord(Struct, frozen=True):
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
    new memory. With `pace` the thread rests between pieces of the copy.
    """
    whole = np.empty(payload_bytes(places), dtype=np.uint8) if into is None else into
    end = 0
    for array, place in zip(record.arrays, places, strict=True):
        whole[end : place.offset] = 0  # what aligns the array
        end = place.offset + place.nbytes
        target = whole[place.offset : end]
        typed = target.view(array.parts[0].dtype).reshape(place.shape)
        for part, to in zip(array.parts, _split(typed, array), strict=True):
            most = PIECE if pace is None else pace.piece
            for area in areas(part.shape, part.itemsize, most):
                to[area] = part[area]
                if pace is not None:
                    pace.rest()
    whole[end:] = 0
    return whole


def _split(whole: np.ndarray[Any, Any], array: NamedArray) -> list[np.ndarray[Any, Any]]:
    """Returns views of a whole array, one for each of the parts that it is joined of."""
    if len(array.parts) == 1:
        return [whole]
    sizes = [part.shape[array.axis] for part in array.parts]
    return np.split(whole, np.cumsum(sizes[:-1]), axis=array.axis)


def areas(shape: Sequence[int], item: int, most: int) -> Iterator[tuple[slice, ...]]:
    """Yields areas that together are an array of a shape, each of at most `most` bytes or one item.

    `item`: bytes of one item.
    """
    if not shape or math.prod(shape) * item <= most:
        yield ()
        return
    each = math.prod(shape[1:]) * item  # bytes of what one index of the first axis has
    count = max(1, most // each)
    for start in range(0, shape[0], count):
        here = slice(start, start + count)
        if each <= most:
            yield (here,)
        else:
            yield from ((here, *rest) for rest in areas(shape[1:], item, most))
