"""What the prefix cache asks of whoever keeps the memory: rows by copies, or shared blocks. Pure.

`R` is a running sequence's memory, `E` what is kept of some tokens, `S` a whole state of the layers
that cannot be cut by tokens. Positions count tokens from the beginning of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class PrefixRow(Protocol):
    """What the prefix cache itself needs of a row."""

    @property
    def offset(self) -> int:
        """Tokens it holds."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""


E = TypeVar("E")
S = TypeVar("S")
R = TypeVar("R", bound=PrefixRow)
S_contra = TypeVar("S_contra", contravariant=True)


class Pieces(Protocol[E, S_contra]):
    """What the tree itself asks: how to cut, join and give back what is kept."""

    @property
    def stateful(self) -> bool:
        """Whether a prefix can be restored only where a whole state was kept."""

    @property
    def joins_copy(self) -> bool:
        """Whether `join` costs as much as it is long."""

    def cut(self, held: E, at: int) -> tuple[E, E]:
        """The first `at` tokens and the others; `held` is used up."""

    def join(self, left: E, right: E) -> E:
        """Neighbours as one; both are used up."""

    def free(self, held: E) -> None:
        """Nobody needs `held` any more."""

    def free_state(self, state: S_contra) -> None:
        """Nobody needs `state` any more."""


class Store(Pieces[E, S], Protocol[R, E, S]):
    """What the prefix cache asks: rows, and the way into the tree and out of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept and not yet freed."""

    def new_row(self) -> R:
        """An empty row."""

    def release(self, row: R) -> None:
        """The row is over; what was kept of it does not need it."""

    def rewind(self, row: R, to: int) -> bool:
        """Forgets the tokens from `to` on; False, and nothing done, where a layer cannot."""

    def fill(
        self, row: R, kept: Sequence[tuple[E, int]], state: S | None, tokens: int, room: int
    ) -> None:
        """An empty row gets `tokens` tokens: the first so many of each kept, and the state.

        `room` is how many tokens the row will have to hold soon.
        """

    def fit(self, row: R, start: int, end: int, free: int) -> int:
        """How far `keep` from `start` gets with `free` bytes: a position in [start, end]."""

    def keep(self, row: R, start: int, end: int) -> E:
        """Tokens [start, end) of a row, which has them all; owns nothing of the row."""

    def state_bytes(self, row: R) -> int:
        """What `keep_state` would take."""

    def keep_state(self, row: R) -> S:
        """The whole state at the row's offset; owns nothing of the row."""

    def lowest(self, state: S) -> int:
        """The fewest tokens that the state can still be cut back to."""
