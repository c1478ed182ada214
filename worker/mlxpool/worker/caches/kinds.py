"""The kinds of a layer's cache that later prompts can reuse: full, window or state. No I/O.

The cache of full attention is stored token by token. A sliding window and a recurrent state are
stored as snapshots at some positions, because a row drops their earlier contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

A = TypeVar("A")  # an array; keys and values have their tokens on axis 2


class LayeredRow(Protocol[A]):
    """The operations on a row, which has a cache for each layer.

    Returned arrays may be views of the row's memory. The row may write into arrays that it gets.
    """

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def part(self, layer: int, start: int, end: int) -> tuple[A, ...]:
        """Returns the keys and values of tokens [start, end)."""

    def put(self, layer: int, parts: Sequence[tuple[A, ...]], capacity: int) -> None:
        """Fills an empty layer with consecutive results of `part`; `capacity` is in tokens."""

    def advance(self, count: int) -> None:
        """Counts `count` more tokens in every layer."""

    def trim(self, to: int) -> None:
        """Drops the tokens from `to` on."""

    def release(self) -> None:
        """Frees the memory of the row."""

    def arrays(self) -> list[A]:
        """Returns all arrays of the row."""


class RecurrentRow(LayeredRow[A], Protocol[A]):
    """The further operations on a row with layers of kind StateCache."""

    def state(self, layer: int) -> tuple[A, ...]:
        """Returns the state after `offset` tokens."""

    def put_state(self, layer: int, state: tuple[A, ...]) -> None:
        """Fills an empty layer with a result of `state`."""


class FullCache(Struct, frozen=True):
    """Keys and values of every token: any prefix of the tokens can be reused."""

    layer: int


class WindowCache(Struct, frozen=True):
    """Keys and values of the last tokens: a token sees itself and `size` - 1 earlier tokens."""

    layer: int
    size: int

    def first(self, end: int) -> int:
        """Returns the first token that the token at `end` sees."""
        return max(0, end - self.size + 1)


class StateCache(Struct, frozen=True):
    """A recurrent state; it can be reused only after exactly the tokens it was computed from."""

    layer: int


CacheKind = FullCache | WindowCache | StateCache


def lowest_rewind(kind: CacheKind, end: int) -> int:
    """Returns the shortest length to which a cache of `end` tokens can be trimmed.

    A window that has dropped no token yet can be trimmed to 0.
    """
    if isinstance(kind, FullCache):
        return 0
    return 0 if isinstance(kind, WindowCache) and kind.first(end) == 0 else end


def can_rewind(kind: CacheKind, offset: int, to: int) -> bool:
    """Returns whether a row of `offset` tokens can be trimmed to `to` tokens."""
    return to >= offset or lowest_rewind(kind, offset) <= to
