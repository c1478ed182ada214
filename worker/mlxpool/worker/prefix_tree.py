"""What finished sequences leave behind for later prompts that begin alike.

"single" keeps the row of the last finished sequence; "off" keeps nothing. No MLX here: a row is
whatever has an offset, a size and `trim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MODES = ("single", "off")


class TrimmableRow(Protocol):
    """What the prefix cache needs of a row."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def trim(self, to: int) -> None: ...


R = TypeVar("R", bound=TrimmableRow)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[R]):
    row: R
    tokens: tuple[int, ...]  # as many as row.offset


class PrefixCache(Generic[R]):
    """One entry at most. A row belongs either to the entry or to the one sequence it was begun for.

    Counters since the start: `hits` and `misses` of `begin`, `tokens` it found.
    """

    def __init__(self, new_row: Callable[[], R], mode: str = "single") -> None:
        if mode not in MODES:
            raise ValueError(f"prefix cache mode is {mode!r}, must be one of {', '.join(MODES)}")
        self._new_row = new_row
        self._keeps = mode == "single"
        self._entry: _Entry[R] | None = None
        self.hits = 0
        self.misses = 0
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the entry's row."""
        return self._entry.row.nbytes if self._entry else 0

    def begin(self, prompt: Sequence[int]) -> tuple[R, int]:
        """A row for `prompt`, which may not be empty, and how many of its tokens it holds.

        At least the last token is left to compute: its logits are what the caller is after.
        The entry is taken even when nothing of it fits.
        """
        entry, self._entry = self._entry, None
        cached = _common(entry.tokens, prompt) if entry else 0
        cached = min(cached, len(prompt) - 1)
        self._count(cached)
        if entry is None or cached == 0:
            return self._new_row(), 0
        entry.row.trim(cached)
        return entry.row, cached

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """The sequence is over, at whatever point: its written part becomes the entry.

        `tokens` are prompt and completion; what the row holds beyond them is forgotten.
        """
        row.trim(len(tokens))
        if self._keeps and row.offset > 0:
            self._entry = _Entry(row, tuple(tokens[: row.offset]))

    def clear(self) -> int:
        """Gives up the entry; returns the bytes it had."""
        freed, self._entry = self.nbytes, None
        return freed

    def _count(self, cached: int) -> None:
        self.hits += cached > 0
        self.misses += cached == 0
        self.tokens += cached


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
