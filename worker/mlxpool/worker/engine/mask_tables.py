"""Keeps tables of masks in host memory that the device reads directly, for the next draws."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.worker.constraints.mask_table import MaskTable, words_of_mask
from mlxpool.worker.transfers.uploads import SharedTable


class MaskTables:
    """The allocated mask tables that are not in use."""

    def __init__(self, vocab_size: int) -> None:
        self._words = words_of_mask(vocab_size)
        self._free: list[MaskTable] = []

    def take(self, lines: int, rows: int) -> MaskTable:
        """Returns a table of at least `lines` lines; allocates one if no table is large enough.

        A newly allocated table has at least `rows` lines.
        """
        for place, table in enumerate(self._free):
            if len(table.words) >= lines:
                return self._free.pop(place)
        shared = SharedTable(max(lines, rows), self._words)
        return MaskTable(shared.lines, shared)

    def give_back(self, tables: Iterable[MaskTable]) -> None:
        """Keeps tables that are no longer in use."""
        self._free += tables
