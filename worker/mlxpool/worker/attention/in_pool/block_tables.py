"""The block tables of running rows on the device; a pass sends only changed entries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.kernels.kernel_builder import build_kernel, write_in_place
from mlxpool.worker.prefix.shared_blocks import BlockRow
from mlxpool.worker.transfers.uploads import Upload

LEAST_UPDATES = 32  # the least entries of an update; larger updates are padded to a power of two
NO_ENTRY = -1


class BlockTables:
    """A table [rows, entries] of blocks: `array` on the device, `numbers` on the host.

    A sequence (row) owns a line of the table from its first pass on, until the row is released and
    another row needs a line.
    """

    def __init__(self, rows: int, entries: int, upload: Upload) -> None:
        self.entries = entries
        self.numbers = np.zeros((rows, entries), dtype=np.int32)
        self.array = mx.zeros((rows * entries,), dtype=mx.int32)
        mx.eval(self.array)
        self._upload = upload
        self._lines: dict[BlockRow, int] = {}
        self._free = list(range(rows))

    def lines_of(self, rows: Sequence[BlockRow]) -> npt.NDArray[np.int32]:
        """Returns each row's line in the table; a row that has no line gets a line.

        The rows must have blocks. There are at most as many rows as lines.
        """
        lines = self._lines
        return np.array(
            [lines[row] if row in lines else self._enter(row, set(rows)) for row in rows],
            dtype=np.int32,
        )

    def update(self, rows: Sequence[BlockRow], lines: npt.NDArray[np.int32]) -> mx.array | None:
        """Copies changed entries to the device for a new pass over `rows`, which own `lines`.

        Returns None if no entry has changed. Otherwise returns an array whose value is 0: readers
        of `array` must use it, so that they run after the copy, see worker/kernels.
        """
        places: list[int] = []
        blocks: list[int] = []
        for number, row in enumerate(rows):
            first, table = row.changed, row.table
            if first < len(table):
                at = int(lines[number]) * self.entries
                fresh = table[first:]
                places += range(at + first, at + len(table))
                blocks += fresh
                self.numbers[lines[number], first : len(table)] = fresh
                row.changed = len(table)
        if not places:
            return None
        padded = max(LEAST_UPDATES, 1 << (len(places) - 1).bit_length())
        updates = np.full((2, padded), NO_ENTRY, dtype=np.int32)
        updates[0, : len(places)], updates[1, : len(places)] = places, blocks
        return write_in_place(_update_kernel(), [self.array, self._upload(updates)], padded)

    def _enter(self, row: BlockRow, now: set[BlockRow]) -> int:
        """Gives a row a free line of the table; returns the index of the line.

        If no line is free, first frees the lines of released rows that are not in `now`, the rows
        of this pass.
        """
        if not self._free:
            left = [other for other in self._lines if not other.table and other not in now]
            self._free += [self._lines.pop(other) for other in left]
        line = self._lines[row] = self._free.pop()
        row.changed = 0
        return line


@cache
def _update_kernel() -> Any:
    return build_kernel("table_update", ["tables", "updates"], ["done"], {})
