"""The layout of rows that share the blocks of a pool with the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx

from mlxpool.worker.attention.in_pool.kernel_trials import kernels_read
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedRow, PagedStore
from mlxpool.worker.attention.in_pool.paged_runner import (
    CHUNK_WIDTHS,
    MAX_PREFILL_ROWS,
    PagedRunner,
    padded_tokens,
    padded_width,
)
from mlxpool.worker.attention.in_pool.ragged_runner import (
    LONG_PASS_LINES,
    PASS_LINES,
    RaggedRunner,
    attention_of,
)
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import (
    CacheRow,
    Ids,
    PassOutput,
    RowSpan,
    all_plain,
    is_plain_decode,
    logit_spans,
)
from mlxpool.worker.kernels.block_write import makes_tables
from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import blocks_for
from mlxpool.worker.transfers.uploads import Uploads, upload_copy

# Query-key pairs of a chunk that is computed token by token; larger ones read keys together.
MAX_CHUNK_PAIRS = 2**19

# Entries in the block tables of a pass over several rows: one table a token.
MAX_TABLE_BLOCKS = 2**16


class PagedLayout(Layout):
    """Rows and prefix cache share blocks of a pool, for CUDA: see kv_pool.py.

    Where our kernels serve the model, a step is one compiled ragged pass. Elsewhere decode rows and
    short chunks have compiled passes, and every long chunk has a pass of its own.
    """

    holds_prefixes = True
    pass_lines: Sequence[int] = PASS_LINES  # of the compiled ragged passes

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
        `keeps_drawn`: see Layout; ragged passes alone keep what is drawn of. `long_passes`: ragged
        passes have up to 2,048 lines.
        """
        super().__init__(
            shape,
            model,
            deterministic=deterministic,
            keeps_states=keeps_states,
            keeps_drawn=keeps_drawn,
        )
        reads = in_place and kernels_read(shape)
        self.pool = KVPool(shape, blocks, in_place=in_place, reads=reads)
        self.store = self._make_store()
        self.name = "pool, own kernels" if reads else "pool"
        self.shares_arrays = not in_place
        self.blocks = blocks
        # No compiled pass over chunks gives the states of all inputs.
        exact = deterministic or keeps_states
        self.compiles_chunks = reads and not exact and shape.dtype in HALF_DTYPES
        if long_passes:
            self.pass_lines = LONG_PASS_LINES
        self._upload = uploads or upload_copy
        makes_tables()  # tried here because nothing can be tried while a pass is traced
        self.runner = PagedRunner(
            model, self.pool, self._upload, notice=self.notice, keeps_states=keeps_states
        )
        self.ragged = None
        if self.compiles_chunks and uploads is not None:
            self.ragged = self._ragged_runner(rows, uploads)
        self._compiling.append(self.runner.passes)
        if self.ragged is not None:
            self._compiling.append(self.ragged.kinds)
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

    def _ragged_runner(self, rows: int, uploads: Uploads) -> RaggedRunner | None:
        """Returns the runner of ragged passes; None where our kernel does not serve the model."""
        shape = self.pool.shape
        found = attention_of(self._model, shape.dtype, quantised=shape.quantised)
        if not found.supported:
            return None
        store = cast(PagedStore, self.store)
        return RaggedRunner(
            self._model,
            store,
            self.pool,
            rows,
            found,
            uploads,
            lines=self.pass_lines,
            states=self._keeps_drawn,
        )

    @property
    def gives_drawn(self) -> bool:
        """See Layout."""
        return self._keeps_drawn and self.ragged is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """See Layout."""
        return () if self.ragged is None else self.ragged.sizes

    def decode_width(self, rows: int) -> int:
        """See Layout."""
        return rows if self._deterministic else padded_width(rows)

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

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> PassOutput:
        """See Layout."""
        if self._deterministic or not all(span.plain for span in spans):
            return super().forward(spans, ids, wanted)
        found: dict[int, mx.array] = {}  # logits or hidden states
        states: dict[int, mx.array] = {}
        without: list[mx.array] = []  # of passes that give nothing
        starts = [0, *accumulate(span.count for span in spans)]
        for part in self._passes(spans, set(wanted)):
            inside = [number for number in part if number in set(wanted)]
            every = [ids[starts[number] : starts[number + 1]] for number in part]
            some = [spans[number] for number in part]
            got = self._pass(some, mx.concatenate(every), [part.index(n) for n in inside])
            if got.states is not None:
                ends = list(accumulate(span.count for span in some))
                states.update(zip(part, mx.split(got.states, ends[:-1]), strict=True))
            if not inside:
                without.append(got.logits)
            elif spans[inside[0]].wide:
                found[inside[0]] = got.logits if got.hidden is None else got.hidden
            else:
                found.update((n, got.logits[row : row + 1]) for row, n in enumerate(inside))
        drawing = logit_spans(spans, wanted)
        outputs = [mx.concatenate([found[n] for n in drawing]) if drawing else mx.zeros(1)]
        if len(drawing) < len(wanted):
            outputs.append(mx.concatenate([found[n] for n in wanted[len(drawing) :]]))
        given = PassOutput(*(mx.depends(outputs, without) if without else outputs))
        if not states:
            return given
        return given._replace(states=mx.concatenate([states[n] for n in range(len(spans))]))

    def _passes(self, spans: Sequence[RowSpan], wanted: set[int]) -> list[list[int]]:
        """Returns the indices of the spans of each pass."""
        wide = [n for n, span in enumerate(spans) if span.wide]  # no compiled pass has them
        decoding = [
            n for n, span in enumerate(spans) if span.count == 1 and n in wanted and not span.wide
        ]
        others = {*wide, *decoding}
        rest = [n for n in range(len(spans)) if n not in others]
        passes = [[number] for number in wide]
        if decoding:
            passes.append(decoding)
        while rest:
            count = max(1, self._batch_size([spans[number] for number in rest]))
            passes.append(rest[:count])
            rest = rest[count:]
        return passes

    def _pass(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> PassOutput:
        if spans[0].wide:
            return super().forward(spans, ids, wanted)
        rows = [cast(PagedRow, span.row) for span in spans]
        if is_plain_decode(spans, wanted):
            return self.runner.decode(rows, ids)
        if self.compiles_chunks and not self.runner.gathers and self._batch_size(spans):
            if len(spans) == 1 and spans[0].count <= CHUNK_WIDTHS[-1]:
                return PassOutput(self.runner.chunk(rows[0], ids, logits=bool(wanted)))
            if len(spans) > 1:
                parts = list(zip(rows, (span.count for span in spans), strict=True))
                return PassOutput(self.runner.chunks(parts, ids, wanted))
        return super().forward(spans, ids, wanted)

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """See Layout. The rows share the arrays of the pool."""
        return self.pool.written()

    def _batch_size(self, spans: Sequence[RowSpan]) -> int:
        """Returns how many short chunks, from the first on, a compiled pass has; 0: none.

        Long chunks keep a GPU busy by themselves.
        """
        if not self.compiles_chunks or self.runner.gathers:
            return 0
        tokens = pairs = longest = number = 0
        for span in spans[:MAX_PREFILL_ROWS]:
            end = span.row.offset + span.count
            tokens, longest = tokens + padded_tokens(span.count), max(longest, end)
            pairs += span.count * end
            if padded_width(tokens) > self.runner.max_width or pairs > MAX_CHUNK_PAIRS:
                break
            if tokens * blocks_for(longest) > MAX_TABLE_BLOCKS:
                break
            number += 1
        return number

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """See Layout."""
        if self.ragged is None and self.compiles_chunks:
            self.runner.compile_ahead(rows, context, on_progress)

    def invalidate(self) -> None:
        """See Layout."""
        super().invalidate()
        self.pool.pending.clear()  # writes that were not started
        if self.shares_arrays:
            self.pool.renew()

    def close(self) -> None:
        """See Layout."""
        self.pool.arrays = []
