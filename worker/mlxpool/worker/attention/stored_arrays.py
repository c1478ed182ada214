"""Arrays of kept prefixes as the disk tier stores them, and back.

A stored array of tokens is [heads, tokens, size], whatever the layout; items are raw numbers, for
NumPy has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.prefix.paths import Part
from mlxpool.worker.prefix_disk.reading import ReadRecord
from mlxpool.worker.prefix_disk.writing import NamedArray

E = TypeVar("E")
S = TypeVar("S")

# MLX's dtypes by name, and the NumPy dtype of the same size that stands for those it lacks.
DTYPES: Mapping[str, mx.Dtype] = {
    "bool": mx.bool_,
    "int8": mx.int8,
    "uint8": mx.uint8,
    "int16": mx.int16,
    "uint16": mx.uint16,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
    "uint32": mx.uint32,
    "float32": mx.float32,
    "int64": mx.int64,
    "uint64": mx.uint64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RAW = {"bfloat16": "uint16"}


DeviceParts = tuple[tuple[mx.array, int, int], ...]


class DeviceArray(Struct, frozen=True):
    """An array to store, on the device: of each part [heads, tokens, size] or [1, heads, tokens,
    size] the tokens [low, high).

    The axis is 0 for what is no array of tokens, of which there is one part, used as it is. `dtype`
    is MLX's name; items that NumPy lacks are raw numbers here.
    """

    name: str
    dtype: str
    parts: DeviceParts
    axis: int = 1


class PortableStore(Protocol[E, S]):
    """What a store of kept prefixes has beside prefix/store.py, so that the disk can have them."""

    def stored(self, parts: Sequence[Part[E]]) -> list[DeviceArray]:
        """Returns the arrays of the tokens of one block of 256, in neighbouring parts.

        Their evaluation is submitted; they are independent of what happens to the parts.
        """

    def stored_state(self, state: S) -> list[DeviceArray]:
        """Returns the arrays of a snapshot."""

    def bytes_of(self, record: ReadRecord, start: int, end: int) -> int:
        """Returns the bytes that `restored` needs, at most."""

    def restored(self, record: ReadRecord, start: int, end: int) -> E:
        """Returns a kept piece of tokens [start, end), which a record has."""

    def restored_state(self, record: ReadRecord) -> S:
        """Returns the snapshot that a record has."""


def device_arrays(found: Iterable[tuple[str, DeviceParts]], *, axis: int = 1) -> list[DeviceArray]:
    """Returns arrays to store, by name, whose evaluation is submitted: `host_arrays` computes
    nothing when that is done, and does not wait for passes that were submitted later.
    """
    arrays: list[DeviceArray] = []
    views: list[mx.array] = []
    for name, parts in found:
        dtype = _NAMES[parts[0][0].dtype]
        if raw := _RAW.get(dtype):
            parts = tuple((array.view(DTYPES[raw]), low, high) for array, low, high in parts)
            views += [array for array, _, _ in parts]
        arrays.append(DeviceArray(name, dtype, parts, axis))
    if views:
        mx.async_eval(*views)  # type: ignore[no-untyped-call]
    return arrays


def stored_bytes(arrays: Sequence[DeviceArray]) -> int:
    """Returns the bytes that arrays have on the disk."""
    return sum(
        array.nbytes if one.axis == 0 else array.nbytes * (high - low) // array.shape[-2]
        for one in arrays
        for array, low, high in one.parts
    )


def host_arrays(arrays: Sequence[DeviceArray]) -> tuple[NamedArray, ...]:
    """Returns arrays as NumPy has them, without copies where host and device share memory."""
    return tuple(
        NamedArray(
            one.name,
            one.dtype,
            tuple(
                _on_host(array) if one.axis == 0 else _tokens(_on_host(array), low, high)
                for array, low, high in one.parts
            ),
            one.axis,
        )
        for one in arrays
    )


def _on_host(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array, copy=False)


def _tokens(array: np.ndarray[Any, Any], low: int, high: int) -> np.ndarray[Any, Any]:
    return array.reshape(array.shape[-3:])[:, low:high]


def arrays_of(record: ReadRecord) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Returns the arrays of a record by name, each with MLX's name of its dtype."""
    found = {}
    for place in record.header.arrays:
        data = record.arrays[place.offset : place.offset + place.nbytes]
        typed = data.view(_RAW.get(place.dtype, place.dtype)).reshape(place.shape)
        found[place.name] = place.dtype, typed
    return found


def device_array(dtype: str, array: np.ndarray[Any, Any]) -> mx.array:
    """Returns a copy of an array of raw numbers as one of MLX with this dtype."""
    copied = mx.array(array)
    return copied.view(DTYPES[dtype]) if dtype in _RAW else copied
