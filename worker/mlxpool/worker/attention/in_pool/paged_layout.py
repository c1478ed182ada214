"""The layout of rows that share the blocks of a pool with the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx

from mlxpool.worker.attention.in_pool.gathered_decode import GatheredDecode
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
    logit_spans,
)
from mlxpool.worker.kernels import kernel_cache
from mlxpool.worker.kernels.block_write import makes_tables
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.transfers.uploads import Uploads, upload_copy


class PagedLayout(Layout):
    """The layout in which rows and the prefix cache share blocks of a pool (CUDA), see kv_pool.py.

    If our kernels support the model, a pass is one compiled ragged pass. Otherwise decoding rows
    have a compiled pass of MLX's operations. All other rows, and passes with images, are computed
    row by row, as in Layout.
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
        """`rows`: the most rows of a pass.

        `uploads`: sends the index arrays of a pass to the device; None: MLX copies these arrays.
        `images`: passes may have spans with images, see RowSpan. `keeps_states`: passes return the
        states of all inputs. `keeps_drawn`: passes return the states of their logits.
        `long_passes`: ragged passes have up to 2,048 tokens.
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
        makes_tables()  # tries the kernel now, because no trial is possible while a pass is traced
        self.ragged: RaggedRunner | None = None
        self._gathered: GatheredDecode | None = None
        attention = (
            attention_of(model, shape.dtype, quantised=shape.quantised) if in_place else None
        )
        if attention is not None and attention.supported and not deterministic:
            self.ragged = RaggedRunner(
                model,
                cast(PagedStore, self.store),
                self.pool,
                rows,
                attention,
                uploads,
                lines=LONG_PASS_LINES if long_passes else PASS_LINES,
                keeps_states=keeps_states,
                keeps_drawn=keeps_drawn,
            )
            self._compiling.append(self.ragged.kinds)
        elif not deterministic:
            self._gathered = GatheredDecode(
                model,
                self.pool,
                notice=self.notice,
                keeps_states=keeps_states,
                keeps_drawn=keeps_drawn,
            )
            self._compiling.append(self._gathered.passes)
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
        """The number of blocks that neither a row nor the prefix cache uses."""
        return cast(PagedStore, self.store).free_blocks

    def blocks_of(self, row: Any) -> int:
        """Returns the number of a row's blocks; see Layout."""
        return cast(PagedStore, self.store).blocks_of(row)

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """Returns the bytes that `rows` do not use, of a capacity of `whole` bytes.

        A block that a row shares with a prefix counts as free.
        """
        store = cast(PagedStore, self.store)
        unusable = self.blocks * store.block_bytes - whole
        return store.nbytes + store.free_blocks * store.block_bytes - unusable

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """Returns the bytes that `rows` use, and the allocated bytes that no row uses.

        A block of a cached prefix counts in neither number, even if a row shares the block.
        """
        store = cast(PagedStore, self.store)
        used = store.own_bytes(cast(Iterable[PagedRow], rows))
        return used, self.pool.nbytes - store.nbytes - used

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of lines of compiled passes; empty without ragged passes."""
        return () if self.ragged is None else self.ragged.sizes

    @property
    def follow_lines(self) -> int:  # type: ignore[override]
        """The most lines of a pass that only checks drafts and that a single kernel computes.

        0: no single kernel computes such passes.
        """
        return 0 if self.ragged is None else self.ragged.follow_lines

    def expect_drafts(self, most: int) -> None:
        """Sets the most drafts that the rows of a pass check together; 0: no drafts."""
        if self.ragged is not None:
            self.ragged.drafts = most

    @contextmanager
    def whole_passes(self) -> Iterator[None]:
        """Returns a context in which a pass begins only when it is evaluated; see Layout."""
        if self.ragged is None:
            yield
            return
        self.ragged.begins_parts = False
        try:
            yield
        finally:
            self.ragged.begins_parts = True

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """Returns whether a pass over `spans` is the first of its kind and so compiles."""
        ragged = self._ragged_for(spans)
        return super().is_new(spans, wanted) if ragged is None else ragged.is_new(spans, wanted)

    def _ragged_for(self, spans: Sequence[RowSpan]) -> RaggedRunner | None:
        """Returns the runner of ragged passes if it supports a pass over these spans; else None."""
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
        """Builds one pass over inputs `ids` [T] and advances the rows, see Layout.step."""
        ragged = self._ragged_for(spans)
        if ragged is None:
            return super().step(spans, ids, drawn, wanted)
        return ragged.step(spans, ids, drawn, wanted)

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> PassOutput:
        """Builds a pass with known ids, see Layout.forward.

        Decoding rows get a separate pass, if it can be compiled.
        """
        decoding = [n for n in wanted if spans[n].count == 1 and not spans[n].wide]
        ordered = bool(decoding) and decoding == sorted(decoding)
        if self._gathered is None or not ordered or not all_plain(spans):
            return super().forward(spans, ids, wanted)
        rows = [cast(PagedRow, spans[n].row) for n in decoding]
        if len(decoding) == len(spans):
            return self._gathered(rows, ids)
        ends = list(accumulate(span.count for span in spans))
        places = [ends[n] - 1 for n in decoding]
        first = self._gathered(rows, ids[mx.array(places, dtype=mx.int32)])
        others = [n for n in range(len(spans)) if n not in set(decoding)]
        if not kernel_cache.is_collecting():  # in a group, the first pass has its sums first
            done = [
                array for array in (first.logits, first.states, first.drawn) if array is not None
            ]
            mx.async_eval(*done)  # type: ignore[no-untyped-call]
        rest = mx.concatenate([ids[ends[n] - spans[n].count : ends[n]] for n in others])
        others_wanted = [others.index(n) for n in wanted if n not in set(decoding)]
        second = super().forward([spans[n] for n in others], rest, others_wanted)
        return _joined(spans, wanted, decoding, others, first, second)

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """Returns arrays of the pool, shared by all rows, whose evaluation completes all writes."""
        return self.pool.written()

    def invalidate(self) -> None:
        """Discards the arrays that a failed pass may have damaged."""
        super().invalidate()
        self.pool.pending.clear()  # writes that were not submitted
        if self.shares_arrays:
            self.pool.renew()

    def close(self) -> None:
        """Frees the memory of the pool."""
        self.pool.arrays = []


def _joined(
    spans: Sequence[RowSpan],
    wanted: Sequence[int],
    decoding: Sequence[int],
    others: Sequence[int],
    first: PassOutput,
    second: PassOutput,
) -> PassOutput:
    """Returns the results of two passes as the results of one pass over all spans.

    `first` is the output of the pass over the spans `decoding`, `second` of the pass over `others`.
    """
    drawing = logit_spans(spans, wanted)
    order = [*decoding, *(n for n in drawing if n not in set(decoding))]
    logits = _reordered(spans, order, drawing, (first.logits, second.logits), lines=True)
    states = drawn = None
    if first.states is not None and second.states is not None:
        both = first.states, second.states
        states = _reordered(spans, [*decoding, *others], range(len(spans)), both, lines=False)
    if first.drawn is not None:
        parts = (first.drawn,) if second.drawn is None else (first.drawn, second.drawn)
        drawn = _reordered(spans, order, drawing, parts, lines=True)
    done = mx.depends([logits], [second.logits])[0]  # evaluating `done` completes both
    return PassOutput(done, second.hidden, states, drawn)


def _reordered(
    spans: Sequence[RowSpan],
    given: Sequence[int],
    wanted: Sequence[int],
    arrays: Sequence[mx.array],
    *,
    lines: bool,
) -> mx.array:
    """Returns the lines (first axis) of the spans `wanted`, in the order of `wanted`.

    `arrays` have the lines of the spans `given`, in their order. With `lines`, a span has a line
    for each token with results; otherwise a span has a line for each of its tokens.
    """
    counts = [spans[n].lines if lines else spans[n].count for n in given]
    ends = dict(zip(given, accumulate(counts), strict=True))
    joined = arrays[0] if sum(counts) == len(arrays[0]) else mx.concatenate(list(arrays))
    each = ((n, spans[n].lines if lines else spans[n].count) for n in wanted)
    places = [at for n, count in each for at in range(ends[n] - count, ends[n])]
    return joined[mx.array(places, dtype=mx.int32)]
