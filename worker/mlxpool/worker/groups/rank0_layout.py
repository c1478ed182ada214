"""The pool of rank 0: each operation on rows and blocks is also sent to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedRow, PagedStore
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import Ids, PassOutput, RowSpan
from mlxpool.worker.groups.collectives import Collectives
from mlxpool.worker.groups.messages import Again, CopyBlock, MakePool, Pass
from mlxpool.worker.groups.pipes import Orders
from mlxpool.worker.kernels import kernel_cache
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.prefix.shared_blocks import BlockRow
from mlxpool.worker.transfers.uploads import Uploads


class NumberedRow(PagedRow):
    """A row with a `number`, by which other ranks know it until its release."""

    __slots__ = ("number",)

    def __init__(self, pool: KVPool, store: PagedStore, number: int) -> None:
        super().__init__(pool, store)
        self.number = number


class Rank0Store(PagedStore):
    """A PagedStore that copies blocks on all ranks."""

    def __init__(self, pool: KVPool, orders: Orders) -> None:
        super().__init__(pool)
        self._pool_copy, self._orders = self._copy, orders
        self._copy = self._copy_everywhere
        self._next_number = 0
        self.left: list[int] = []  # numbers of rows that were released since the last pass

    def new_row(self) -> NumberedRow:
        """Returns an empty KV row with a new number; see Store."""
        return NumberedRow(self._memory, self, self._new_number())

    def release(self, row: BlockRow) -> None:
        """Frees the KV row and gives it a new number; see Store.

        The message of the next pass lists the old number as released.
        """
        super().release(row)
        assert isinstance(row, NumberedRow)
        self.left.append(row.number)
        row.number = self._new_number()

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _copy_everywhere(self, source: int, target: int) -> None:
        self._orders.send(CopyBlock(source, target))
        self._pool_copy(source, target)


class Rank0Layout(PagedLayout):
    """A layout that sends each pass to the other ranks before it builds the pass."""

    def __init__(
        self,
        shape: RowShape,
        model: Model,
        blocks: int,
        *,
        rows: int,
        in_place: bool,
        uploads: Uploads | None,
        orders: Orders,
        collectives: Collectives,
    ) -> None:
        """`orders`: the pipes to the other ranks. `collectives`: the operations of the group.

        See PagedLayout for the other parameters.
        """
        self._orders, self._collectives = orders, collectives
        self._fresh = True  # whether the next pass may compile something
        # The newest pass, if all its spans were single inputs: its spans, wanted spans, and rows'
        # ends.
        self._sent: tuple[Sequence[RowSpan], list[int], list[int]] | None = None
        super().__init__(
            shape,
            model,
            blocks,
            rows=rows,
            deterministic=False,
            in_place=in_place,
            uploads=uploads,
            long_passes=True,
        )
        orders.send(MakePool(blocks, rows, shape.capacity, shape.chunk, self.name, shape.kv))

    def _make_store(self) -> PagedStore:
        return Rank0Store(self.pool, self._orders)

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """Returns True if a pass over `spans` may compile something; see Layout."""
        self._fresh = super().is_new(spans, wanted)
        return self._fresh

    def step(
        self,
        spans: Sequence[RowSpan],
        ids: Ids,
        drawn: mx.array | None,
        wanted: Sequence[int],
    ) -> PassOutput:
        """Sends a pass to the other ranks, then builds the pass on this rank; see Layout.

        Raises OutOfMemory before anything is sent.
        """
        rows = [cast(NumberedRow, span.row) for span in spans]
        store = cast(Rank0Store, self.store)
        ends = [row.offset + span.count for row, span in zip(rows, spans, strict=True)]
        for number in store.short(rows, ends):
            rows[number].reserve(ends[number])
        awaited = drawn if drawn is not None and min(ids) < 0 else None
        self._send(spans, rows, ids, 0 if awaited is None else awaited.shape[0], wanted)
        if awaited is not None:
            awaited = self._collectives.from_first(awaited)
        return super().step(spans, ids, awaited, wanted)

    def _send(
        self,
        spans: Sequence[RowSpan],
        rows: Sequence[NumberedRow],
        ids: Ids,
        drawn: int,
        wanted: Sequence[int],
    ) -> None:
        store = cast(Rank0Store, self.store)
        tables = [
            (row.number, row.changed, row.table[row.changed :])
            for row in rows
            if row.changed < len(row.table)
        ]
        left, store.left = store.left, []
        tokens = np.asarray(ids).tolist()  # `ids` may have any type of numbers
        numbers, offsets = np.asarray(wanted, dtype=np.int64).tolist(), [row.offset for row in rows]
        if self._repeats(spans, numbers, offsets):
            self._orders.send(Again(tokens, tables, left, drawn))
        else:
            counts = [span.count for span in spans]
            self._orders.send(
                Pass(
                    [row.number for row in rows],
                    offsets,
                    counts,
                    [span.lines for span in spans],
                    [number for number, span in enumerate(spans) if span.hidden],
                    tables,
                    left,
                    tokens,
                    numbers,
                    drawn,
                    self._fresh,
                    kernel_cache.is_collecting(),
                )
            )
            single = len(tokens) == len(rows) and not kernel_cache.is_collecting()
            self._sent = (spans, numbers, offsets) if single else None
        if self._sent is not None:
            self._sent = spans, numbers, [offset + 1 for offset in offsets]
        if self.ragged is None:  # otherwise the block tables of `ragged` read the changes
            for row in rows:
                row.changed = len(row.table)

    def _repeats(self, spans: Sequence[RowSpan], wanted: list[int], offsets: list[int]) -> bool:
        """Returns whether a pass repeats the last pass: the same `spans`, one token later."""
        if self._sent is None or self._fresh or kernel_cache.is_collecting():
            return False
        return self._sent[0] is spans and self._sent[1:] == (wanted, offsets)
