"""The layouts of rows in memory: arrays of their own, slabs, or blocks of a pool.

Memory is allocated in blocks of KV_BLOCK_TOKENS tokens, see scheduling/kv_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mlxpool.worker.attention.deterministic import exact_attention
from mlxpool.worker.attention.dot_product import causal_attention
from mlxpool.worker.attention.kernel_trials import kernels_read, kernels_write
from mlxpool.worker.attention.kv_pool import KVPool, PagedRow, PagedStore
from mlxpool.worker.attention.paged_runner import (
    CHUNK_WIDTHS,
    MAX_PREFILL_ROWS,
    PagedRunner,
    padded_tokens,
    padded_width,
)
from mlxpool.worker.attention.row_batch import CacheRow, RowBatch, RowSpan, singles_first
from mlxpool.worker.attention.row_cache import RowCache, RowShape
from mlxpool.worker.attention.row_copies import RowStore
from mlxpool.worker.attention.slab_batch import SlabRowBatch, SlabRunner
from mlxpool.worker.attention.slabs import SLAB_BLOCKS, SlabRow, Slabs
from mlxpool.worker.caches.kinds import CacheKind, FullCache, StateCache, WindowCache
from mlxpool.worker.caches.specs import RecurrentSpec
from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

# Query-key pairs of a chunk that is computed token by token; larger ones read keys together.
MAX_CHUNK_PAIRS = 2**19

# Entries in the block tables of a pass over several rows: one table a token.
MAX_TABLE_BLOCKS = 2**16

LAYOUTS = ("rows", "slabs", "pool")


class Layout:
    """Builds forward passes over rows of its own store.

    Here each row has arrays of its own, which supports every kind of layer; the subclasses share
    memory between rows.
    """

    name = "rows"  # that operators see
    store: Any  # a prefix.store.Store
    spare = 0  # bytes that may be allocated for unused blocks
    batch = RowBatch  # that describes a pass to the model
    shares_arrays = False  # whether a failed pass may have damaged all rows
    holds_prefixes = False  # whether entries of the prefix cache share its memory
    blocks = 0  # in all, where it holds prefixes

    def __init__(self, shape: RowShape, model: Model, *, deterministic: bool) -> None:
        self._model = model
        self._attention = exact_attention if deterministic else causal_attention
        self._fixed = shape.fixed_bytes
        self._deterministic = deterministic
        self.store = RowStore(partial(RowCache, shape), cache_kinds(shape))

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """Returns the bytes that all `rows` leave of a capacity of `whole` bytes."""
        return whole - sum(max(0, row.nbytes - self._fixed) for row in rows)

    def reserve(self, row: Any, tokens: int) -> None:
        """Allocates memory for so many tokens, where writing would not."""

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> mx.array:
        """Builds one pass over the tokens `ids` [T] of all spans and advances the rows.

        The spans are of different rows, in any mixture of single tokens and chunks. Returns logits
        [E, vocabulary] of the last tokens of the spans whose numbers are in `wanted`, in that
        order; without any, an array without meaning. Nothing is computed yet: the evaluation of
        what is returned completes the pass.
        """
        if self._is_decode(spans, wanted):
            return self._decode([span.row for span in spans], ids)
        spans, ids, wanted = singles_first(spans, ids, wanted)
        step = self.batch(spans, wanted, self._attention)
        out = self._model(ids, step)
        step.done()
        # Without logits nothing of the last layer is needed but what it writes.
        found = out if wanted else mx.zeros(1)
        written = self._written([span.row for span in spans])
        complete: list[mx.array] = mx.depends([found], written)
        return complete[0]

    def _is_decode(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """Returns whether `_decode` computes the pass: one token of each row, with logits."""
        return False

    def _decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """Builds a pass over one token `ids` [R] of each row; returns logits [R, vocabulary]."""
        raise NotImplementedError

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """Returns the arrays whose evaluation completes all writes of a pass over `rows`."""
        return [array for row in rows for array in row.arrays()]

    def prefill_last(self, row: Any, ids: mx.array) -> mx.array | None:
        """Builds the pass over the last prompt tokens `ids` [T] of a row and advances the row.

        Returns logits [1, vocabulary] of the last token, or None where this is not supported: with
        recurrent states, which could not drop the last token again, and for more tokens than a step
        computes in the same time.
        """
        count = ids.shape[0]
        if self._deterministic or self.store.stateful or count > CHUNK_WIDTHS[-1]:
            return None
        return self.forward([RowSpan(row, count)], ids, [0])

    @property
    def max_batch_rows(self) -> int:
        """The most rows that `prefill_rows` takes; 0: it is not supported.

        Where attention goes row by row, batching would save little.
        """
        return 0

    def batch_size(self, spans: Sequence[RowSpan]) -> int:
        """Returns how many of these spans, from the first on, fit into one pass."""
        return 0

    def prefill_rows(
        self, parts: Sequence[tuple[Any, Sequence[int]]], last: Sequence[int]
    ) -> mx.array:
        """Builds one pass over rows with their new tokens and advances the rows.

        Returns logits [E, vocabulary] of the last token of each row whose index is in `last`.
        """
        raise NotImplementedError(f"{self.name} take one chunk at a time")

    def decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """Builds one pass over one token `ids` [R] of each row and advances the rows.

        Returns logits [R, vocabulary].
        """
        return self.forward([RowSpan(row, 1) for row in rows], ids, range(len(rows)))

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """Compiles the passes that up to `rows` rows of up to `context` tokens need."""

    def invalidate(self) -> None:
        """Discards the arrays that a failed pass may have damaged."""

    def close(self) -> None:
        """Frees the memory; the layout is not used afterwards."""


class SlabLayout(Layout):
    """Rows share slabs of blocks, for the CPU: see slabs.py."""

    name = "slabs"
    batch = SlabRowBatch
    shares_arrays = True

    def __init__(self, shape: RowShape, model: Model, *, deterministic: bool) -> None:
        super().__init__(shape, model, deterministic=deterministic)
        self.slabs = Slabs(shape)
        self.store = RowStore(partial(SlabRow, self.slabs), cache_kinds(shape))
        # At worst the last slab has one block in use.
        self.spare = (SLAB_BLOCKS - 1) * KV_BLOCK_TOKENS * shape.token_bytes
        self._runner = SlabRunner(model)

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """See Layout. The unused blocks of slabs count as used."""
        return min(super().left(rows, whole), whole + self.spare - self.slabs.nbytes)

    def reserve(self, row: Any, tokens: int) -> None:
        """See Layout."""
        row.reserve(tokens)
        mx.eval(row.arrays())

    def _is_decode(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """See Layout."""
        return not self._deterministic and is_plain_decode(spans, wanted)

    def _decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """See Layout."""
        return self._runner(rows, ids)

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """See Layout."""
        slabs = {slab: None for row in rows for slab, _ in row.table}
        return [array for slab in slabs for array in (*slab.keys, *slab.values)]

    def invalidate(self) -> None:
        """See Layout."""
        self.slabs.invalidate()


class PagedLayout(Layout):
    """Rows and prefix cache share blocks of a pool, for CUDA: see kv_pool.py."""

    holds_prefixes = True

    def __init__(
        self, shape: RowShape, model: Model, blocks: int, *, deterministic: bool, in_place: bool
    ) -> None:
        super().__init__(shape, model, deterministic=deterministic)
        reads = in_place and kernels_read(shape)
        self.pool = KVPool(shape, blocks, in_place=in_place, reads=reads)
        self.store = PagedStore(self.pool)
        self.name = "pool, own kernels" if reads else "pool"
        self.shares_arrays = not in_place
        self.blocks = blocks
        self.compiles_chunks = reads and not deterministic and shape.dtype in HALF_DTYPES
        self.runner = PagedRunner(model, self.pool)

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> mx.array:
        """See Layout. A short chunk is computed by a compiled pass."""
        if self._is_decode(spans, wanted) or not self._token_by_token(spans):
            return super().forward(spans, ids, wanted)
        return self.runner.chunk(cast(PagedRow, spans[0].row), ids, logits=bool(wanted))

    def _is_decode(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """See Layout."""
        return not self._deterministic and is_plain_decode(spans, wanted)

    def _decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """See Layout."""
        return self.runner(rows, ids)

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """See Layout. The rows share the arrays of the pool."""
        return self.pool.written()

    @property
    def max_batch_rows(self) -> int:
        """See Layout."""
        return MAX_PREFILL_ROWS if self.compiles_chunks and not self.runner.gathers else 0

    def batch_size(self, spans: Sequence[RowSpan]) -> int:
        """See Layout. Only short chunks: longer ones keep a GPU busy by themselves."""
        tokens = pairs = longest = number = 0
        for span in spans:
            end = span.row.offset + span.count
            tokens, longest = tokens + padded_tokens(span.count), max(longest, end)
            pairs += span.count * end
            if padded_width(tokens) > self.runner.max_width or pairs > MAX_CHUNK_PAIRS:
                break
            if tokens * blocks_for(longest) > MAX_TABLE_BLOCKS:
                break
            number += 1
        return number

    def prefill_rows(
        self, parts: Sequence[tuple[Any, Sequence[int]]], last: Sequence[int]
    ) -> mx.array:
        """See Layout."""
        return self.runner.chunks(parts, last)

    def _token_by_token(self, spans: Sequence[RowSpan]) -> bool:
        return self.compiles_chunks and not self.runner.gathers and _short(spans)

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """See Layout."""
        self.pool.copy(self.pool.spare, self.pool.spare)
        on_progress()
        if self.compiles_chunks:
            self.runner.compile_ahead(rows, context, on_progress)

    def invalidate(self) -> None:
        """See Layout."""
        self.pool.pending.clear()  # writes that were not started
        if self.shares_arrays:
            self.pool.renew()

    def close(self) -> None:
        """See Layout."""
        self.pool.arrays = []


def is_plain_decode(spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
    """Returns whether every span is one token that gets logits, in the order of the spans."""
    return list(wanted) == list(range(len(spans))) and all(span.count == 1 for span in spans)


def _short(spans: Sequence[RowSpan]) -> bool:
    """Returns whether this is one chunk with few tokens and few query-key pairs."""
    if len(spans) != 1:
        return False
    count, end = spans[0].count, spans[0].row.offset + spans[0].count
    return count <= CHUNK_WIDTHS[-1] and count * end <= MAX_CHUNK_PAIRS


def choose_layout(
    name: str | None, shape: RowShape, *, deterministic: bool, on_gpu: bool
) -> tuple[str, RowShape]:
    """Returns the name of the layout and its row shape.

    `name` None: a pool on a CUDA GPU and slabs on a CPU, for models that support them, else rows.
    A model with windows gets a pool only where our kernels read it: MLX's operations would read
    whole rows.
    """
    if name is None:
        name = "rows"
        if shape.all_full_attention and not on_gpu:
            name = "slabs"
        elif not deterministic and writes_in_place(shape, on_gpu):
            name = "pool" if not shape.has_windows or kernels_read(shape) else "rows"
    return name, replace(shape, keeps_all=name == "pool")


def make_layout(
    name: str, shape: RowShape, model: Model, blocks: int, *, deterministic: bool, on_gpu: bool
) -> Layout:
    """Makes the layout of this name; a pool has `blocks` blocks."""
    if name == "pool":
        in_place = writes_in_place(shape, on_gpu)
        return PagedLayout(shape, model, blocks, deterministic=deterministic, in_place=in_place)
    return (SlabLayout if name == "slabs" else Layout)(shape, model, deterministic=deterministic)


def writes_in_place(shape: RowShape, on_gpu: bool) -> bool:
    """Returns whether our kernels write new tokens into the blocks of a pool."""
    return shape.fits_blocks and on_gpu and mx.cuda.is_available() and kernels_write(shape)


def cache_kinds(shape: RowShape) -> list[CacheKind]:
    """Returns how the prefix cache keeps each layer."""
    return [_cache_kind(shape, layer) for layer in range(len(shape.caches))]


def _cache_kind(shape: RowShape, layer: int) -> CacheKind:
    if isinstance(shape.caches[layer], RecurrentSpec):
        return StateCache(layer)
    window = shape.window(layer)
    return WindowCache(layer, window) if window else FullCache(layer)
