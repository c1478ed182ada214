"""The interface between the prefix cache and the memory of KV rows: copies or shared blocks. Pure.

`R` is the KV row of a running sequence, `E` the cached content of a range of tokens, `S` a snapshot
of the layers that cannot be divided by tokens. Positions count tokens from the start of the
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class PrefixRow(Protocol):
    """The attributes of a KV row that the prefix cache reads."""

    @property
    def offset(self) -> int:
        """The number of tokens in the KV row."""

    @property
    def nbytes(self) -> int:
        """The allocated bytes."""


E = TypeVar("E")
S = TypeVar("S")
R = TypeVar("R", bound=PrefixRow)
S_contra = TypeVar("S_contra", contravariant=True)


class PieceStore(Protocol[E, S_contra]):
    """The store operations that the tree uses: cut, join and free cached pieces."""

    @property
    def stateful(self) -> bool:
        """Whether a prefix can be restored only at a position with a snapshot."""

    @property
    def join_copies(self) -> bool:
        """Whether `join` copies the tokens."""

    def cut(self, held: E, at: int) -> tuple[E, E]:
        """Splits the piece `held` after its first `at` tokens; returns both parts.

        `held` can no longer be used.
        """

    def join(self, left: E, right: E) -> E:
        """Joins two neighbouring pieces; returns the joined piece.

        `left` and `right` can no longer be used.
        """

    def free(self, held: E) -> None:
        """Frees the memory of the piece `held`."""

    def free_state(self, state: S_contra) -> None:
        """Frees the memory of the snapshot `state`."""


class Store(PieceStore[E, S], Protocol[R, E, S]):
    """The store operations of the prefix cache: make and fill KV rows, cache their tokens."""

    @property
    def nbytes(self) -> int:
        """The bytes of all cached contents."""

    def new_row(self) -> R:
        """Returns an empty KV row."""

    def release(self, row: R) -> None:
        """Frees the KV row; contents cached from it stay."""

    def rewind(self, row: R, to: int) -> bool:
        """Removes the tokens from `to` on; if a layer cannot, does nothing and returns False."""

    def fill(
        self, row: R, kept: Sequence[tuple[E, int]], state: S | None, tokens: int, capacity: int
    ) -> None:
        """Fills an empty KV row with the first `tokens` tokens of a sequence, from cached pieces.

        `kept`: the consecutive pieces, each with the number of its first tokens that are used.
        `state`: the snapshot after these tokens; None: the row needs none. `capacity`: the number
        of tokens that the row will soon have.
        """

    def fit(self, row: R, start: int, end: int, free: int) -> int:
        """Returns the position in [start, end] up to which `free` bytes suffice for `keep`."""

    def keep(self, row: R, start: int, end: int) -> E:
        """Returns the cached contents of a KV row's tokens [start, end).

        The contents do not depend on the row any more.
        """

    def state_bytes(self, row: R) -> int:
        """Returns the bytes that `keep_state` would use."""

    def keep_state(self, row: R) -> S:
        """Returns a snapshot at the row's offset; it does not depend on the row any more."""

    def lowest(self, state: S) -> int:
        """Returns the fewest tokens to which the snapshot can be shortened."""
