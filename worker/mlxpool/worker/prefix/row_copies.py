"""The prefix cache's store where each row has arrays of its own (Metal, CPU): it copies.

Entering copies the path once into a new row; leaving copies what is new, so that nothing kept
shares memory with a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import mlx.core as mx

from mlxpool.worker.layers.cache_kinds import (
    CacheKind,
    FullCache,
    LayeredRow,
    RecurrentRow,
    StateCache,
    can_rewind,
    lowest_rewind,
)

R = TypeVar("R", bound=LayeredRow[mx.array])
Arrays = tuple[mx.array, ...]
Kept = tuple[Arrays, ...]  # for each full layer: keys and values [1, KV, n, D]


@dataclass(frozen=True, slots=True)
class Whole:
    """States of all layers that are not full, after `end` tokens."""

    end: int
    layers: tuple[Arrays, ...]


class RowStore(Generic[R]):
    """A Store (prefix/store.py) of rows whose layers are of these kinds."""

    joins_copy = True

    def __init__(self, new_row: Callable[[], R], kinds: Sequence[CacheKind]) -> None:
        self.new_row = new_row
        self.nbytes = 0
        self._kinds = tuple(kinds)
        self._full = tuple(kind for kind in kinds if isinstance(kind, FullCache))
        self._whole = tuple(kind for kind in kinds if not isinstance(kind, FullCache))
        self.stateful = bool(self._whole)

    def release(self, row: R) -> None:
        """See Store."""
        row.release()

    def rewind(self, row: R, to: int) -> bool:
        """See Store."""
        if not all(can_rewind(kind, row.offset, to) for kind in self._kinds):
            return False
        row.trim(to)
        return True

    def fill(
        self, row: R, kept: Sequence[tuple[Kept, int]], state: Whole | None, tokens: int, room: int
    ) -> None:
        """See Store."""
        for index, kind in enumerate(self._full):
            row.put(kind.layer, [_head(held[index], count) for held, count in kept], room)
        if state is not None:
            for whole, arrays in zip(self._whole, state.layers, strict=True):
                _put_whole(row, whole, arrays, state.end, tokens, room)
        row.advance(tokens)
        _start(tuple(row.arrays()))

    def fit(self, row: R, start: int, end: int, free: int) -> int:
        """See Store."""
        each = sum(_nbytes(row.part(kind.layer, 0, 1)) for kind in self._full) if end else 0
        return end if each == 0 else min(end, start + free // each)

    def keep(self, row: R, start: int, end: int) -> Kept:
        """See Store."""
        kept = tuple(_owned(row.part(kind.layer, start, end)) for kind in self._full)
        return self._kept(kept)

    def state_bytes(self, row: R) -> int:
        """See Store."""
        return sum(_nbytes(arrays) for arrays in self._states(row))

    def keep_state(self, row: R) -> Whole:
        """See Store."""
        return Whole(row.offset, self._kept(tuple(_owned(one) for one in self._states(row))))

    def lowest(self, state: Whole) -> int:
        """See Store."""
        return max(lowest_rewind(kind, state.end) for kind in self._whole)

    def cut(self, held: Kept, at: int) -> tuple[Kept, Kept]:
        """See Pieces."""
        left = tuple(_owned(tuple(a[:, :, :at] for a in arrays)) for arrays in held)
        right = tuple(_owned(tuple(a[:, :, at:] for a in arrays)) for arrays in held)
        _start(*left, *right)
        return left, right

    def join(self, left: Kept, right: Kept) -> Kept:
        """See Pieces."""
        joined = tuple(
            tuple(mx.concatenate(list(pair), axis=2) for pair in zip(one, other, strict=True))
            for one, other in zip(left, right, strict=True)
        )
        _start(*joined)
        return joined

    def free(self, held: Kept) -> None:
        """See Pieces."""
        self.nbytes -= sum(_nbytes(arrays) for arrays in held)

    def free_state(self, state: Whole) -> None:
        """See Pieces."""
        self.free(state.layers)

    def _states(self, row: R) -> list[Arrays]:
        return [
            _recurrent(row).state(kind.layer)
            if isinstance(kind, StateCache)
            else row.part(kind.layer, kind.first(row.offset), row.offset)
            for kind in self._whole
        ]

    def _kept(self, arrays: tuple[Arrays, ...]) -> tuple[Arrays, ...]:
        _start(*arrays)
        self.nbytes += sum(_nbytes(one) for one in arrays)
        return arrays


def _put_whole(
    row: LayeredRow[mx.array], kind: CacheKind, arrays: Arrays, end: int, tokens: int, room: int
) -> None:
    if isinstance(kind, StateCache):
        _recurrent(row).put_state(kind.layer, arrays)
    else:
        row.put(kind.layer, [_head(arrays, arrays[0].shape[2] - (end - tokens))], room)


def _recurrent(row: LayeredRow[mx.array]) -> RecurrentRow[mx.array]:
    """Rows of models with recurrent layers are such rows."""
    return cast("RecurrentRow[mx.array]", row)


def _head(arrays: Arrays, count: int) -> Arrays:
    """The first `count` tokens, as views."""
    return arrays if count == arrays[0].shape[2] else tuple(a[:, :, :count] for a in arrays)


def _owned(arrays: Arrays) -> Arrays:
    """Copies: a view would keep the whole array alive that it looks into."""
    return tuple(mx.contiguous(array) for array in arrays)


def _start(*arrays: Arrays) -> None:
    """Computes now: until then a copy holds what it copies, and MLX would copy that to write it.

    On a GPU the step in flight is not waited for.
    """
    if mx.default_device().type == mx.DeviceType.gpu:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
    else:
        mx.eval(*arrays)


def _nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays)
