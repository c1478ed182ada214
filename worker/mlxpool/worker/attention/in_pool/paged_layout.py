"""The layout of rows that share the blocks of a pool with the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx

from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedRow, PagedStore
from mlxpool.worker.attention.in_pool.ragged_batch import attention_of
from mlxpool.worker.attention.in_pool.ragged_runner import (
    LONG_PASS_LINES,
    PASS_LINES,
    RaggedRunner,
)
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import (
    CacheRow,
    Ids,
    PassOutput,
    RowSpan,
    all_plain,
)
from mlxpool.worker.kernels.block_write import makes_tables
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.transfers.uploads import Uploads, upload_copy


class PagedLayout(Layout):
    """Rows and prefix cache share blocks of a pool, for CUDA: see kv_pool.py.

    A pass is one compiled ragged pass. Those with images are computed as in Layout, row by row, and
    so are all where our kernels do not serve the model: in a group of devices, and in tests.
    """

    holds_prefixes = True

    def __init__(
        self,
        shape: RowShape,
        model: Model,
        blocks: int,
        *,
        rows: int,
        deterministic: bool,
        in_place: bool,
        uploads: Uploads | None = None,
        images: bool = False,
        keeps_states: bool = False,
        keeps_drawn: bool = False,
        long_passes: bool = False,
    ) -> None:
        """`rows`: the most rows of a pass. `uploads` None: MLX copies the numbers of a pass.

        `images`: passes may have spans that are not plain, see RowSpan. `keeps_states`,
        `keeps_drawn`: see Layout. `long_passes`: ragged passes have up to 2,048 lines.
        """
        super().__init__(
            shape,
            model,
            deterministic=deterministic,
            keeps_states=keeps_states,
            keeps_drawn=keeps_drawn,
        )
        self.pool = KVPool(shape, blocks, in_place=in_place)
        self.store = self._make_store()
        self.shares_arrays = not in_place
        self.blocks = blocks
        self._upload = uploads or upload_copy
        makes_tables()  # tried here because nothing can be tried while a pass is traced
        self.ragged: RaggedRunner | None = None
        found = attention_of(model, shape.dtype, quantised=shape.quantised) if in_place else None
        if found is not None and found.supported and not deterministic:
            self.ragged = RaggedRunner(
                model,
                cast(PagedStore, self.store),
                self.pool,
                rows,
                found,
                uploads,
                lines=LONG_PASS_LINES if long_passes else PASS_LINES,
                keeps_states=keeps_states,
                keeps_drawn=keeps_drawn,
            )
            self._compiling.append(self.ragged.kinds)
        self.name = "pool" if self.ragged is None else "pool, own kernels"
        self.reads_int8 = self.ragged is not None
        if self.reads_int8:
            self.read_bytes = 0
        if shape.quantised and images:  # MLX's operations read the rows of spans with images
            length = shape.capacity
            self.read_bytes = shape.gathered_bytes(length) + shape.dequantised_bytes(length)

    def _make_store(self) -> PagedStore:
        return PagedStore(self.pool)

    @property
    def free_blocks(self) -> int | None:
        """See Layout."""
        return cast(PagedStore, self.store).free_blocks

    def blocks_of(self, row: Any) -> int:
        """See Layout."""
        return cast(PagedStore, self.store).blocks_of(row)

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """See Layout. A block that a row shares with a prefix is left to the prefix."""
        store = cast(PagedStore, self.store)
        unusable = self.blocks * store.block_bytes - whole
        return store.nbytes + store.free_blocks * store.block_bytes - unusable

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """See Layout. A block that a row shares with a prefix is the prefix's."""
        store = cast(PagedStore, self.store)
        used = store.own_bytes(cast(Iterable[PagedRow], rows))
        return used, self.pool.nbytes - store.nbytes - used

    @property
    def sizes(self) -> tuple[int, ...]:
        """See Layout."""
        return () if self.ragged is None else self.ragged.sizes

    @property
    def follow_lines(self) -> int:  # type: ignore[override]
        """See Layout."""
        return 0 if self.ragged is None else self.ragged.follow_lines

    def expect_drafts(self, most: int) -> None:
        """See Layout."""
        if self.ragged is not None:
            self.ragged.drafts = most

    @contextmanager
    def whole_passes(self) -> Iterator[None]:
        """See Layout."""
        if self.ragged is None:
            yield
            return
        self.ragged.begins_parts = False
        try:
            yield
        finally:
            self.ragged.begins_parts = True

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """See Layout."""
        ragged = self._ragged_for(spans)
        return super().is_new(spans, wanted) if ragged is None else ragged.is_new(spans, wanted)

    def _ragged_for(self, spans: Sequence[RowSpan]) -> RaggedRunner | None:
        """Returns the runner of ragged passes if it computes a pass over these spans."""
        if self.ragged is None or self.ragged.decodes(spans) or all_plain(spans):
            return self.ragged
        return None

    def step(
        self,
        spans: Sequence[RowSpan],
        ids: Ids,
        drawn: mx.array | None,
        wanted: Sequence[int],
    ) -> PassOutput:
        """See Layout."""
        ragged = self._ragged_for(spans)
        if ragged is None:
            return super().step(spans, ids, drawn, wanted)
        return ragged.step(spans, ids, drawn, wanted)

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """See Layout. The rows share the arrays of the pool."""
        return self.pool.written()

    def invalidate(self) -> None:
        """See Layout."""
        super().invalidate()
        self.pool.pending.clear()  # writes that were not started
        if self.shares_arrays:
            self.pool.renew()

    def close(self) -> None:
        """See Layout."""
        self.pool.arrays = []
