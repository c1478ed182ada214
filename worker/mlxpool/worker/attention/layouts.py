"""How the rows of an engine lie in memory: each by itself, in slabs, or in a pool with the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import mlx.core as mx

from mlxpool.worker.attention.attention import AnyRow, Span, Step
from mlxpool.worker.attention.contiguous import BLOCKS, SlabRow, Slabs
from mlxpool.worker.attention.decode_batch import Batch
from mlxpool.worker.attention.deterministic import ExactStep
from mlxpool.worker.attention.kernel_trials import kernels_read, writes
from mlxpool.worker.attention.paged import (
    CHUNKS,
    ENTERING,
    Pool,
    PoolBatch,
    PoolRow,
    PoolStore,
    lines_for,
    padded,
)
from mlxpool.worker.attention.row_cache import Row, RowShape
from mlxpool.worker.kernels.kernel_builder import HALVES
from mlxpool.worker.layers.cache_kinds import CacheKind, FullCache, StateCache, WindowCache
from mlxpool.worker.layers.cache_specs import RecurrentSpec
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.prefix.row_copies import RowStore
from mlxpool.worker.scheduling.block_manager import BLOCK, blocks_of

# Keys that the lines of a short chunk look at, each its own; else they are read together.
LOOKED_AT = 2**19

TABLES = 2**16  # blocks in the tables of a pass over several rows: each line has one

LAYOUTS = ("rows", "slabs", "pool")


class Layout(Protocol):
    """What the engine asks of it. Rows are those of its own store."""

    name: str  # for operators
    store: Any  # a Store (prefix/store.py)
    spare: int  # bytes of the capacity that may be allocated and not used
    together: bool  # whether a pass that fails half-way may have spoilt every row
    holds_tree: bool  # whether what the prefix cache keeps lies in it, too
    blocks: int  # it has, where it holds the tree

    def left(self, rows: Iterable[AnyRow], whole: int) -> int:
        """Bytes of a capacity of `whole` that rows have not taken; these are all there are."""

    def reserve(self, row: Any, tokens: int) -> None:
        """Memory for so many tokens, where it is not taken anyway."""

    def forward(self, spans: Sequence[Span], ids: mx.array, *, logits: bool) -> mx.array:
        """Builds one pass over `ids` [T]; rows are longer from here on, nothing is computed yet."""

    def enter(self, row: Any, ids: mx.array) -> mx.array | None:
        """Builds one pass over a row's new tokens `ids` [T] that gives logits [1, vocabulary] of
        the last; None: not here. The row is longer then.
        """

    @property
    def joins(self) -> int:
        """How many rows `enter_all` takes at most; 0: there is no such pass."""

    def fitting(self, spans: Sequence[Span]) -> int:
        """How many of these, `joins` at most, it takes in one pass, from the first on."""

    def enter_all(
        self, parts: Sequence[tuple[Any, Sequence[int]]], enter: Sequence[int]
    ) -> mx.array:
        """Builds one pass over rows and their new tokens; these rows are longer then. Logits
        [E, vocabulary] of the last token of those numbered in `enter`.
        """

    def decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """Logits [R, vocabulary] of one token `ids` [R] for each row."""

    def warm(self, rows: int, context: int, moved: Callable[[], None]) -> None:
        """Compiles what longer rows will need than those that warm up."""

    def spoil(self) -> None:
        """A pass failed half-way: what it wrote into may not be used again."""

    def close(self) -> None:
        """Gives its memory back now; it is not used any more."""


class InRows:
    """Each row has arrays of its own; every kind of layer."""

    name = "rows"
    spare = 0
    together = False
    holds_tree = False
    blocks = 0

    def __init__(self, shape: RowShape, model: Model, *, exact: bool) -> None:
        self._model = model
        self._step = ExactStep if exact else Step
        self._fixed = shape.fixed_bytes
        self._exact = exact
        self.store: Any = RowStore(partial(Row, shape), kinds_of(shape))

    def left(self, rows: Iterable[AnyRow], whole: int) -> int:
        """See Layout."""
        return whole - sum(max(0, row.nbytes - self._fixed) for row in rows)

    def reserve(self, row: AnyRow, tokens: int) -> None:
        """See Layout."""

    def forward(self, spans: Sequence[Span], ids: mx.array, *, logits: bool) -> mx.array:
        """See Layout."""
        step = self._step(spans, logits=logits)
        out = self._model(ids, step)
        step.done()
        return out

    def enter(self, row: Any, ids: mx.array) -> mx.array | None:
        """See Layout. Not where a token that leaves before its first could not be taken back, nor
        so many that computing the end of the last layer for all of them takes longer than a step.
        """
        count = ids.shape[0]
        if self._exact or self.store.stateful or count > CHUNKS[-1]:
            return None
        return self.forward([Span(row, count)], ids, logits=True)

    @property
    def joins(self) -> int:
        """See Layout. Rows that are attended to one by one gain little from each other."""
        return 0

    def fitting(self, spans: Sequence[Span]) -> int:
        """See Layout."""
        return 0

    def enter_all(
        self, parts: Sequence[tuple[Any, Sequence[int]]], enter: Sequence[int]
    ) -> mx.array:
        """See Layout."""
        raise NotImplementedError(f"{self.name} take one chunk at a time")

    def decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """See Layout."""
        return self.forward([Span(row, 1) for row in rows], ids, logits=True)

    def warm(self, rows: int, context: int, moved: Callable[[], None]) -> None:
        """See Layout."""

    def spoil(self) -> None:
        """See Layout."""

    def close(self) -> None:
        """See Layout."""


class InSlabs(InRows):
    """Blocks of rows beside each other, for the CPU: see slabs.py."""

    name = "slabs"
    together = True

    def __init__(self, shape: RowShape, model: Model, *, exact: bool) -> None:
        super().__init__(shape, model, exact=exact)
        self.slabs = Slabs(shape)
        self.store = RowStore(partial(SlabRow, self.slabs), kinds_of(shape))
        # Of the last slab, one block may be in use.
        self.spare = (BLOCKS - 1) * BLOCK * shape.token_bytes
        self._batch = Batch(model)

    def left(self, rows: Iterable[AnyRow], whole: int) -> int:
        """See Layout. Of what is there with the slabs' unused ends, too."""
        return min(super().left(rows, whole), whole + self.spare - self.slabs.nbytes)

    def reserve(self, row: Any, tokens: int) -> None:
        """See Layout."""
        row.reserve(tokens)
        mx.eval(row.arrays())

    def decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """See Layout."""
        return super().decode(rows, ids) if self._exact else self._batch(rows, ids)

    def spoil(self) -> None:
        """See Layout."""
        self.slabs.spoil()


class InPool(InRows):
    """Blocks that rows and tree share, for CUDA: see pool.py."""

    holds_tree = True

    def __init__(
        self, shape: RowShape, model: Model, blocks: int, *, exact: bool, in_place: bool
    ) -> None:
        super().__init__(shape, model, exact=exact)
        reads = in_place and kernels_read(shape)
        self.pool = Pool(shape, blocks, in_place=in_place, reads=reads)
        self.store = PoolStore(self.pool)
        self.name = "pool, own kernels" if reads else "pool"
        self.together = not in_place
        self.blocks = blocks
        self.lined = reads and not exact and shape.dtype in HALVES
        self.batch = PoolBatch(model, self.pool)

    def forward(self, spans: Sequence[Span], ids: mx.array, *, logits: bool) -> mx.array:
        """See Layout. Short chunks go through the compiled pass."""
        if logits or not self._in_lines(spans):
            return super().forward(spans, ids, logits=logits)
        return self.batch.chunk(cast(PoolRow, spans[0].row), ids)

    def enter(self, row: Any, ids: mx.array) -> mx.array | None:
        """See Layout."""
        if not self._in_lines([Span(row, ids.shape[0])]):
            return super().enter(row, ids)
        return self.batch.chunk(row, ids, logits=True)

    @property
    def joins(self) -> int:
        """See Layout."""
        return ENTERING if self.lined and not self.batch.gathers else 0

    def fitting(self, spans: Sequence[Span]) -> int:
        """See Layout. Short chunks: longer ones keep a GPU busy alone."""
        lines = looked_at = longest = number = 0
        for span in spans:
            end = span.row.offset + span.count
            lines, longest = lines + padded(span.count), max(longest, end)
            looked_at += span.count * end
            if lines_for(lines) > self.batch.most or looked_at > LOOKED_AT:
                break
            if lines * blocks_of(longest) > TABLES:
                break
            number += 1
        return number

    def enter_all(
        self, parts: Sequence[tuple[Any, Sequence[int]]], enter: Sequence[int]
    ) -> mx.array:
        """See Layout."""
        return self.batch.chunks(parts, enter)

    def _in_lines(self, spans: Sequence[Span]) -> bool:
        return self.lined and not self.batch.gathers and _short(spans)

    def decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """See Layout."""
        return super().decode(rows, ids) if self._exact else self.batch(rows, ids)

    def warm(self, rows: int, context: int, moved: Callable[[], None]) -> None:
        """See Layout."""
        self.pool.copy(self.pool.spare, self.pool.spare)
        moved()
        if self.lined:
            self.batch.warm(rows, context, moved)

    def spoil(self) -> None:
        """See Layout."""
        self.pool.pending.clear()  # writes that nobody has begun
        if self.together:
            self.pool.renew()

    def close(self) -> None:
        """See Layout."""
        self.pool.arrays = []


def _short(spans: Sequence[Span]) -> bool:
    """Whether this is one chunk whose lines look at few keys, all in all."""
    if len(spans) != 1:
        return False
    count, end = spans[0].count, spans[0].row.offset + spans[0].count
    return count <= CHUNKS[-1] and count * end <= LOOKED_AT


def named(name: str | None, shape: RowShape, *, exact: bool, on_gpu: bool) -> tuple[str, RowShape]:
    """This layout's name; None: a pool of blocks on a CUDA GPU, slabs on a CPU, for models that
    can have them, and rows. And what it keeps of each sequence. Windows are for a pool only where
    our kernels read it: nothing else reads as little of a row.
    """
    if name is None:
        name = "rows"
        if shape.plain and not on_gpu:
            name = "slabs"
        elif not exact and _in_place(shape, on_gpu):
            name = "pool" if not shape.windowed or kernels_read(shape) else "rows"
    return name, replace(shape, whole=name == "pool")


def layout_of(
    name: str, shape: RowShape, model: Model, blocks: int, *, exact: bool, on_gpu: bool
) -> Layout:
    """The layout of this name; a pool has `blocks`."""
    if name == "pool":
        in_place = _in_place(shape, on_gpu)
        return InPool(shape, model, blocks, exact=exact, in_place=in_place)
    return (InSlabs if name == "slabs" else InRows)(shape, model, exact=exact)


def _in_place(shape: RowShape, on_gpu: bool) -> bool:
    return shape.paged and on_gpu and mx.cuda.is_available() and writes(shape)


def kinds_of(shape: RowShape) -> list[CacheKind]:
    """How the prefix cache keeps each layer."""
    return [_kind(shape, layer) for layer in range(len(shape.caches))]


def _kind(shape: RowShape, layer: int) -> CacheKind:
    if isinstance(shape.caches[layer], RecurrentSpec):
        return StateCache(layer)
    window = shape.window(layer)
    return WindowCache(layer, window) if window else FullCache(layer)
