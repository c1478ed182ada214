"""The prefix-cache store for rows with their own arrays (Metal, CPU): it copies tokens.

`fill` copies a cached prefix into a new row. `keep` copies new tokens out of a row. So cached
prefixes never share memory with rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.attention.row_shape import Arrays
from mlxpool.worker.attention.stored_arrays import (
    DeviceArray,
    arrays_of,
    device_array,
    device_arrays,
)
from mlxpool.worker.caches.kinds import (
    CacheKind,
    FullCache,
    LayeredRow,
    RecurrentRow,
    StateCache,
    can_rewind,
    lowest_rewind,
)
from mlxpool.worker.prefix.paths import Part
from mlxpool.worker.prefix_disk.reading import ReadRecord

R = TypeVar("R", bound=LayeredRow[mx.array])
Kept = tuple[Arrays, ...]  # keys and values [1, KV, n, D] of each FullCache layer


class LayerStates(Struct, frozen=True):
    """A snapshot, after `end` tokens, of the layers whose kind is not FullCache."""

    end: int
    layers: tuple[Arrays, ...]


class RowStore(Generic[R]):
    """A Store (prefix/store.py) of rows with layers of the kinds `kinds`."""

    join_copies = True

    def __init__(self, new_row: Callable[[], R], kinds: Sequence[CacheKind]) -> None:
        self.new_row = new_row
        self.nbytes = 0
        self._kinds = tuple(kinds)
        self._full = tuple(kind for kind in kinds if isinstance(kind, FullCache))
        self._whole = tuple(kind for kind in kinds if not isinstance(kind, FullCache))
        self.stateful = bool(self._whole)

    def release(self, row: R) -> None:
        """Frees the row; prefixes cached from it stay."""
        row.release()

    def rewind(self, row: R, to: int) -> bool:
        """Trims the row to `to` tokens; returns False if a layer cannot be trimmed.

        In this case the row does not change.
        """
        if not all(can_rewind(kind, row.offset, to) for kind in self._kinds):
            return False
        row.trim(to)
        return True

    def fill(
        self,
        row: R,
        kept: Sequence[tuple[Kept, int]],
        state: LayerStates | None,
        tokens: int,
        capacity: int,
    ) -> None:
        """Fills an empty row with `tokens` tokens: copies of the cached pieces and the state.

        `kept`: pieces, each with the number of its tokens to use. `capacity`: the number of tokens
        for which the row has space.
        """
        for index, kind in enumerate(self._full):
            row.put(kind.layer, [_head(held[index], count) for held, count in kept], capacity)
        if state is not None:
            for whole, arrays in zip(self._whole, state.layers, strict=True):
                _put_whole(row, whole, arrays, state.end, tokens, capacity)
        row.advance(tokens)
        _evaluate(tuple(row.arrays()))

    def fit(self, row: R, start: int, end: int, free: int) -> int:
        """Returns the position in [start, end] up to which `free` bytes suffice for `keep`."""
        each = sum(_nbytes(row.part(kind.layer, 0, 1)) for kind in self._full) if end else 0
        return end if each == 0 else min(end, start + free // each)

    def keep(self, row: R, start: int, end: int) -> Kept:
        """Returns copies of the row's tokens [start, end) for the prefix cache."""
        kept = tuple(_owned(row.part(kind.layer, start, end)) for kind in self._full)
        return self._kept(kept)

    def state_bytes(self, row: R) -> int:
        """Returns the bytes that `keep_state` would use."""
        return sum(_nbytes(arrays) for arrays in self._states(row))

    def keep_state(self, row: R) -> LayerStates:
        """Returns a snapshot of the row's windows and states, as copies."""
        return LayerStates(
            row.offset, self._kept(tuple(_owned(arrays) for arrays in self._states(row)))
        )

    def lowest(self, state: LayerStates) -> int:
        """Returns the fewest tokens to which the snapshot can be shortened."""
        return max(lowest_rewind(kind, state.end) for kind in self._whole)

    def cut(self, held: Kept, at: int) -> tuple[Kept, Kept]:
        """Splits a cached piece after its first `at` tokens, into two copies."""
        left = tuple(_owned(tuple(a[:, :, :at] for a in arrays)) for arrays in held)
        right = tuple(_owned(tuple(a[:, :, at:] for a in arrays)) for arrays in held)
        _evaluate(*left, *right)
        return left, right

    def join(self, left: Kept, right: Kept) -> Kept:
        """Joins two neighbouring cached pieces into one copy."""
        joined = tuple(
            tuple(mx.concatenate(list(pair), axis=2) for pair in zip(first, other, strict=True))
            for first, other in zip(left, right, strict=True)
        )
        _evaluate(*joined)
        return joined

    def free(self, held: Kept) -> None:
        """Subtracts the bytes of a cached piece from `nbytes`; the caller drops the piece."""
        self.nbytes -= sum(_nbytes(arrays) for arrays in held)

    def free_state(self, state: LayerStates) -> None:
        """Subtracts the bytes of a snapshot from `nbytes`; the caller drops the snapshot."""
        self.free(state.layers)

    # ---- the disk tier, see stored_arrays.py -----------------------------------------------------

    def stored(self, parts: Sequence[Part[Kept]]) -> list[DeviceArray]:
        """Returns the arrays of one block of tokens for the disk tier.

        Cached pieces never change, so they are not copied.
        """
        return device_arrays(
            (
                f"{kind.layer}.{number}",
                tuple(
                    (part.held[index][number], part.low - part.start, part.high - part.start)
                    for part in parts
                ),
            )
            for index, kind in enumerate(self._full)
            for number in range(len(parts[0].held[index]))
        )

    def stored_state(self, state: LayerStates) -> list[DeviceArray]:
        """Returns the arrays of a snapshot in the form for the disk tier."""
        arrays_by_name = (
            (f"{kind.layer}.{number}", ((array, 0, 0),))
            for kind, arrays in zip(self._whole, state.layers, strict=True)
            for number, array in enumerate(arrays)
        )
        return device_arrays(arrays_by_name, axis=0)

    def bytes_of(self, record: ReadRecord, start: int, end: int) -> int:
        """Returns the most bytes that `restored` allocates for tokens [start, end)."""
        whole = sum(place.nbytes for place in record.header.arrays)
        return whole * (end - start) // record.header.tokens

    def restored(self, record: ReadRecord, start: int, end: int) -> Kept:
        """Returns a record's tokens [start, end) as a piece for the prefix cache."""
        low, high = start - record.header.start, end - record.header.start
        arrays = arrays_of(record)
        return self._kept(
            tuple(
                tuple(device_array(dtype, array[None, :, low:high]) for dtype, array in of_layer)
                for of_layer in (_of_layer(arrays, kind.layer) for kind in self._full)
            )
        )

    def restored_state(self, record: ReadRecord) -> LayerStates:
        """Returns the snapshot of a record from the disk tier."""
        arrays = arrays_of(record)
        layers = tuple(
            tuple(device_array(dtype, array) for dtype, array in _of_layer(arrays, kind.layer))
            for kind in self._whole
        )
        return LayerStates(record.header.end, self._kept(layers))

    def _states(self, row: R) -> list[Arrays]:
        return [
            _recurrent(row).state(kind.layer)
            if isinstance(kind, StateCache)
            else row.part(kind.layer, kind.first(row.offset), row.offset)
            for kind in self._whole
        ]

    def _kept(self, arrays: tuple[Arrays, ...]) -> tuple[Arrays, ...]:
        _evaluate(*arrays)
        self.nbytes += sum(_nbytes(layer) for layer in arrays)
        return arrays


def _of_layer(
    arrays: Mapping[str, tuple[str, np.ndarray[Any, Any]]], layer: int
) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Returns the stored arrays of a layer in their order."""
    stored, number = [], 0
    while (array := arrays.get(f"{layer}.{number}")) is not None:
        stored.append(array)
        number += 1
    return stored


def _put_whole(
    row: LayeredRow[mx.array], kind: CacheKind, arrays: Arrays, end: int, tokens: int, capacity: int
) -> None:
    if isinstance(kind, StateCache):
        _recurrent(row).put_state(kind.layer, arrays)
    else:
        row.put(kind.layer, [_head(arrays, arrays[0].shape[2] - (end - tokens))], capacity)


def _recurrent(row: LayeredRow[mx.array]) -> RecurrentRow[mx.array]:
    """Returns the row, which must have recurrent layers, as a RecurrentRow."""
    return cast("RecurrentRow[mx.array]", row)


def _head(arrays: Arrays, count: int) -> Arrays:
    """Returns views of the first `count` tokens."""
    return arrays if count == arrays[0].shape[2] else tuple(a[:, :, :count] for a in arrays)


def _owned(arrays: Arrays) -> Arrays:
    """Returns copies: a view would keep its whole base array alive."""
    return tuple(mx.contiguous(array) for array in arrays)


def _evaluate(*arrays: Arrays) -> None:
    """Computes the copies now; on a GPU does not wait for the computation.

    An unevaluated copy refers to its source. MLX would then copy the source before the next write.
    """
    if mx.default_device().type == mx.DeviceType.gpu:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
    else:
        mx.eval(*arrays)


def _nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays)
