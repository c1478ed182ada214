"""The layout of rows that share slabs of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mlxpool.worker.attention.in_slabs.decode_runner import SlabDecodeRunner
from mlxpool.worker.attention.in_slabs.slab_batch import SlabRowBatch
from mlxpool.worker.attention.in_slabs.slabs import SLAB_BLOCKS, SlabRow, Slabs
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.row_copies import RowStore
from mlxpool.worker.attention.row_shape import RowShape, cache_kinds
from mlxpool.worker.attention.row_spans import (
    CacheRow,
    PassOutput,
    RowSpan,
    is_plain_decode,
)
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS


class SlabLayout(Layout):
    """The layout of rows whose blocks are in shared slabs, for the CPU, see slabs.py."""

    name = "slabs"
    batch = SlabRowBatch
    shares_arrays = True

    def __init__(
        self,
        shape: RowShape,
        model: Model,
        *,
        deterministic: bool,
        keeps_states: bool = False,
        keeps_drawn: bool = False,
    ) -> None:
        super().__init__(
            shape,
            model,
            deterministic=deterministic,
            keeps_states=keeps_states,
            keeps_drawn=keeps_drawn,
        )
        self.slabs = Slabs(shape)
        self.store = RowStore(partial(SlabRow, self.slabs), cache_kinds(shape))
        # In the worst case the last slab has one block in use.
        self.spare = (SLAB_BLOCKS - 1) * KV_BLOCK_TOKENS * shape.token_bytes
        self._decode_runner = SlabDecodeRunner(model, shape, notice=self.notice, states=keeps_drawn)
        self._compiling.append(self._decode_runner.passes)
        self._compiles = not deterministic and not keeps_states
        read = max(shape.capacity, SLAB_BLOCKS * KV_BLOCK_TOKENS)
        self.read_bytes = shape.dequantised_bytes(read)

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """Returns the bytes that `rows` do not use, of a capacity of `whole` bytes.

        Free blocks of slabs count as used.
        """
        return min(super().left(rows, whole), whole + self.spare - self.slabs.nbytes)

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """Returns the bytes that `rows` use, and the bytes of slabs that no row uses."""
        used = sum(row.nbytes for row in rows)
        return used, max(0, self.slabs.nbytes - used)

    def reserve(self, row: Any, tokens: int) -> None:
        """Allocates missing blocks of a row for `tokens` tokens."""
        row.reserve(tokens)
        mx.eval(row.arrays())

    def _compiled(
        self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]
    ) -> PassOutput | None:
        """Builds a compiled pass if every span is one token with logits; otherwise returns None."""
        if not self._compiles or not is_plain_decode(spans, wanted):
            return None
        return self._decode_runner([cast(SlabRow, span.row) for span in spans], ids)

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """Returns the arrays of all slabs with blocks of `rows`."""
        slabs = {slab: None for row in rows for slab, _ in row.table}
        return [array for slab in slabs for array in slab.arrays()]

    def invalidate(self) -> None:
        """Drops all slabs after a failed pass."""
        super().invalidate()
        self.slabs.invalidate()
