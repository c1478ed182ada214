"""Converts arrays of cached prefixes to the form that the disk tier stores, and back.

A stored array of tokens is [heads, tokens, size] in every layout. Its items are raw numbers,
because NumPy lacks bfloat16.
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

# MLX's dtypes by name; `_RAW`: NumPy's dtypes of the same size for dtypes that NumPy lacks.
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
    """An array to store, on the device.

    `parts`: arrays [heads, tokens, size] or [1, heads, tokens, size], each with a range [low,
    high); the stored array joins the tokens [low, high) of all parts. An array without tokens has
    `axis` 0 and one part, which is stored whole. `dtype`: MLX's name of the dtype; items of a dtype
    that NumPy lacks are raw numbers here.
    """

    name: str
    dtype: str
    parts: DeviceParts
    axis: int = 1


class PortableStore(Protocol[E, S]):
    """The methods that a prefix store needs for the disk tier, besides those of prefix/store.py."""

    def stored(self, parts: Sequence[Part[E]]) -> list[DeviceArray]:
        """Returns the arrays of the tokens of one block, from neighbouring parts.

        Submits the evaluation of the arrays. Later changes of the parts do not change the arrays.
        """

    def stored_state(self, state: S) -> list[DeviceArray]:
        """Returns the arrays of a snapshot."""

    def bytes_of(self, record: ReadRecord, start: int, end: int) -> int:
        """Returns the most bytes that `restored` allocates for tokens [start, end)."""

    def restored(self, record: ReadRecord, start: int, end: int) -> E:
        """Returns a record's tokens [start, end) as a piece for the prefix cache."""

    def restored_state(self, record: ReadRecord) -> S:
        """Returns the snapshot of a record."""


def device_arrays(found: Iterable[tuple[str, DeviceParts]], *, axis: int = 1) -> list[DeviceArray]:
    """Returns the arrays to store for named parts, and submits the evaluation of these arrays.

    After this call `host_arrays` computes nothing, and does not wait for passes submitted later.
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
    """Returns the bytes of arrays on the disk."""
    return sum(
        array.nbytes if stored.axis == 0 else array.nbytes * (high - low) // array.shape[-2]
        for stored in arrays
        for array, low, high in stored.parts
    )


def host_arrays(arrays: Sequence[DeviceArray]) -> tuple[NamedArray, ...]:
    """Returns arrays as NumPy arrays, without copies if host and device share memory."""
    return tuple(
        NamedArray(
            stored.name,
            stored.dtype,
            tuple(
                _on_host(array) if stored.axis == 0 else _tokens(_on_host(array), low, high)
                for array, low, high in stored.parts
            ),
            stored.axis,
        )
        for stored in arrays
    )


def _on_host(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array, copy=False)


def _tokens(array: np.ndarray[Any, Any], low: int, high: int) -> np.ndarray[Any, Any]:
    return array.reshape(array.shape[-3:])[:, low:high]


def arrays_of(record: ReadRecord) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Returns the arrays of a record by name, each with MLX's name of its dtype."""
    arrays = {}
    for place in record.header.arrays:
        data = record.arrays[place.offset : place.offset + place.nbytes]
        typed = data.view(_RAW.get(place.dtype, place.dtype)).reshape(place.shape)
        arrays[place.name] = place.dtype, typed
    return arrays


def device_array(dtype: str, array: np.ndarray[Any, Any]) -> mx.array:
    """Returns a copy of an array of raw numbers as an MLX array of this dtype."""
    copied = mx.array(array)
    return copied.view(DTYPES[dtype]) if dtype in _RAW else copied
