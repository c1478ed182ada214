"""How the memory of one layer is kept for later prompts: full, window or state. Pure.

Full attention is kept token by token. A sliding window and a recurrent state are kept whole, at
chosen places: what they held earlier is gone from the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

A = TypeVar("A")  # an array; keys and values have their tokens on axis 2


class LayeredRow(Protocol[A]):
    """What the kinds ask of a row. Arrays they get may be views; arrays they put are owned."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def part(self, layer: int, start: int, end: int) -> tuple[A, ...]:
        """Keys and values of tokens [start, end), in this order."""

    def put(self, layer: int, parts: Sequence[tuple[A, ...]], room: int) -> None:
        """What `part` gave, one behind the other, into an empty layer with space for `room`."""

    def advance(self, count: int) -> None:
        """Every layer has `count` tokens more."""

    def trim(self, to: int) -> None:
        """Forgets the tokens from `to` on."""

    def release(self) -> None:
        """Gives back all it has."""

    def arrays(self) -> list[A]:
        """Every array it has a part in."""


class RecurrentRow(LayeredRow[A], Protocol[A]):
    """What is asked besides where some layers are of the kind State."""

    def state(self, layer: int) -> tuple[A, ...]:
        """The state after `offset` tokens."""

    def put_state(self, layer: int, state: tuple[A, ...]) -> None:
        """What `state` gave, into an empty layer."""


@dataclass(frozen=True, slots=True)
class FullCache:
    """Keys and values of every token: any prefix can be had."""

    layer: int


@dataclass(frozen=True, slots=True)
class WindowCache:
    """Keys and values of the last tokens: a token sees itself and `size` - 1 before it."""

    layer: int
    size: int

    def first(self, end: int) -> int:
        """Of the tokens that the token at `end` still sees."""
        return max(0, end - self.size + 1)


@dataclass(frozen=True, slots=True)
class StateCache:
    """A recurrent state: good for exactly the tokens that made it."""

    layer: int


CacheKind = FullCache | WindowCache | StateCache


def lowest_rewind(kind: CacheKind, end: int) -> int:
    """How far back a whole state of `end` tokens can be cut: a window that lost nothing, to 0."""
    if isinstance(kind, FullCache):
        return 0
    return 0 if isinstance(kind, WindowCache) and kind.first(end) == 0 else end


def can_rewind(kind: CacheKind, offset: int, to: int) -> bool:
    """Whether a row of `offset` tokens can forget those from `to` on."""
    return to >= offset or lowest_rewind(kind, offset) <= to
