"""The layouts of rows in memory: arrays of their own, slabs, or blocks of a pool.

Memory is allocated in blocks of KV_BLOCK_TOKENS tokens, see scheduling/kv_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.deterministic import exact_attention
from mlxpool.worker.attention.dot_product import causal_attention
from mlxpool.worker.attention.in_slabs.check_runner import SlabCheckRunner, check_sizes
from mlxpool.worker.attention.in_slabs.slab_batch import SlabRowBatch
from mlxpool.worker.attention.in_slabs.slab_runner import SlabRunner
from mlxpool.worker.attention.in_slabs.slabs import SLAB_BLOCKS, SlabRow, Slabs
from mlxpool.worker.attention.kernel_trials import kernels_read, kernels_write
from mlxpool.worker.attention.kv_pool import KVPool, PagedRow, PagedStore
from mlxpool.worker.attention.paged_runner import (
    CHUNK_WIDTHS,
    MAX_PREFILL_ROWS,
    PagedRunner,
    padded_tokens,
    padded_width,
)
from mlxpool.worker.attention.ragged_runner import PASS_LINES, RaggedRunner, attention_of
from mlxpool.worker.attention.row_batch import (
    CacheRow,
    Ids,
    PassOutput,
    RowBatch,
    RowSpan,
    all_plain,
    is_check,
    logit_spans,
    singles_first,
    wanted_lines,
)
from mlxpool.worker.attention.row_cache import RowCache, RowShape
from mlxpool.worker.attention.row_copies import RowStore
from mlxpool.worker.caches.kinds import CacheKind, FullCache, StateCache, WindowCache
from mlxpool.worker.caches.specs import RecurrentSpec
from mlxpool.worker.kernels.block_write import makes_tables
from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.transfers.uploads import Upload, Uploads, upload_copy

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
    _upload: Upload = staticmethod(upload_copy)
    holds_prefixes = False  # whether entries of the prefix cache share its memory
    blocks = 0  # in all, where it holds prefixes
    reads_int8 = False  # whether kernels of a GPU read keys and values as integers

    def __init__(
        self,
        shape: RowShape,
        model: Model,
        *,
        deterministic: bool,
        keeps_states: bool = False,
        keeps_drawn: bool = False,
    ) -> None:
        """`keeps_states`: passes give the states of all their inputs; `keeps_drawn`: those that
        their logits are of. See PassOutput.
        """
        self._model = model
        self._keeps_states, self._keeps_drawn = keeps_states, keeps_drawn
        self._attention = exact_attention if deterministic else causal_attention
        self._fixed = shape.fixed_bytes
        # Bytes of what integers become while a pass reads them; none where kernels read integers.
        self.read_bytes = shape.dequantised_bytes(shape.capacity)
        self._deterministic = deterministic
        self._most_drafts = 0  # that the rows of a pass check together
        self._seen: set[Hashable] = set()  # kinds of passes that were computed
        self.store = RowStore(partial(RowCache, shape), cache_kinds(shape))

    @property
    def free_blocks(self) -> int | None:
        """The blocks that no row and no prefix has; None where rows share none."""
        return None

    def blocks_of(self, row: Any) -> int:
        """Returns the blocks of a row that are not free, where rows share blocks; else 0."""
        return 0

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """Returns the bytes that all `rows` leave of a capacity of `whole` bytes."""
        return whole - sum(max(0, row.nbytes - self._fixed) for row in rows)

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """Returns the bytes of all `rows`, and those that are allocated for rows and unused."""
        return sum(row.nbytes for row in rows), 0

    def reserve(self, row: Any, tokens: int) -> None:
        """Allocates memory for so many tokens, where writing would not."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of lines for which passes are compiled; none: passes of any number."""
        return ()

    def expect_drafts(self, most: int) -> None:
        """Says that the rows of a pass check `most` drafts together at most; 0: none."""
        self._most_drafts = most

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """Returns whether a pass over these spans that wants some of them is the first."""
        lines = sum(span.count for span in spans)
        kind = (1 << (lines - 1).bit_length(), len(spans) == lines and lines)
        new = kind not in self._seen
        self._seen.add(kind)
        return new

    def step(
        self,
        spans: Sequence[RowSpan],
        ids: Ids,
        drawn: mx.array | None,
        wanted: Sequence[int],
    ) -> PassOutput:
        """Builds one pass over inputs `ids` [T] and advances the rows; computes nothing yet.

        A negative id -1 - r stands for element r of `drawn`. `wanted` are the numbers of spans that
        give something, see RowSpan: first those of one token's logits, then of several, then
        those of hidden states.
        """
        inputs = self._upload(np.array(ids, dtype=np.int32))
        if drawn is not None:
            inputs = mx.where(inputs >= 0, inputs, drawn[mx.maximum(-1 - inputs, 0)])
        return self.forward(spans, inputs, wanted)

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> PassOutput:
        """As `step`, with all ids known. The spans are of different rows.

        The evaluation of any array that is returned completes the pass.
        """
        compiled = self._compiled(spans, ids, wanted)
        if compiled is not None:
            return compiled
        given = spans
        spans, ids, wanted = singles_first(spans, ids, wanted)
        step = self.batch(spans, wanted, self._attention, every=self._keeps_states)
        found = self._outputs(ids, step, spans, wanted)
        if found.states is not None and spans is not given:
            found = found._replace(states=found.states[_places(given, spans)])
        step.done()
        made = {name: x for name, x in found._asdict().items() if x is not None}
        done = mx.depends([*made.values()], self._written([span.row for span in spans]))
        return found._replace(**dict(zip(made, done, strict=True)))

    def _outputs(
        self, ids: mx.array, step: RowBatch, spans: Sequence[RowSpan], wanted: Sequence[int]
    ) -> PassOutput:
        """Returns what a pass gives, without what it writes."""
        some = logit_spans(spans, wanted)
        nothing = mx.zeros(1)  # if none is wanted, no more of the last layer than what it writes
        embeds = len(some) < len(wanted)
        if not embeds and not self._keeps_states and not (some and self._keeps_drawn):
            found = self._model(ids, step)
            return PassOutput(found if wanted else nothing)
        every = states = self._model.hidden_states(ids, step)
        if self._keeps_states:
            states = step.logit_rows(every)
        count = wanted_lines(spans, some)
        drawn = states[:count] if embeds else states
        return PassOutput(
            self._model.logits_of(drawn) if some else nothing,
            states[count:].astype(mx.float32) if embeds else None,
            every if self._keeps_states else None,
            drawn if self._keeps_drawn and some else None,
        )

    def _compiled(
        self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]
    ) -> PassOutput | None:
        """As `forward`, by a compiled pass; None where there is none for these spans."""
        return None

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """Returns the arrays whose evaluation completes all writes of a pass over `rows`."""
        every = (array for row in rows for array in row.arrays())
        return list({id(array): array for array in every}.values())  # rows share those of states

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """Computes passes for `rows` rows of `context` tokens that have no place in `sizes`."""

    def invalidate(self) -> None:
        """Discards the arrays that a failed pass may have damaged."""

    def close(self) -> None:
        """Frees the memory; the layout is not used afterwards."""


class SlabLayout(Layout):
    """Rows share slabs of blocks, for the CPU: see in_slabs/slabs.py."""

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
        # At worst the last slab has one block in use.
        self.spare = (SLAB_BLOCKS - 1) * KV_BLOCK_TOKENS * shape.token_bytes
        self._runner = SlabRunner(model, shape, states=keeps_drawn)
        self._check_runner = SlabCheckRunner(model, shape, states=keeps_drawn)
        self._compiles = not deterministic and not keeps_states
        read = max(shape.capacity, SLAB_BLOCKS * KV_BLOCK_TOKENS)
        self.read_bytes = shape.dequantised_bytes(read)

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """See Layout. The unused blocks of slabs count as used."""
        return min(super().left(rows, whole), whole + self.spare - self.slabs.nbytes)

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """See Layout."""
        used = sum(row.nbytes for row in rows)
        return used, max(0, self.slabs.nbytes - used)

    def reserve(self, row: Any, tokens: int) -> None:
        """See Layout."""
        row.reserve(tokens)
        mx.eval(row.arrays())

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """See Layout."""
        checked = self._checked(spans)
        compiles = checked is not None and self._check_runner.compiles(*checked)
        return super().is_new(spans, wanted) or compiles

    def _compiled(
        self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]
    ) -> PassOutput | None:
        """See Layout."""
        if not self._compiles:
            return None
        if is_plain_decode(spans, wanted):
            rows = [cast(SlabRow, span.row) for span in spans]
            return self._runner(rows, ids)
        checked = self._checked(spans)
        if checked is None or list(wanted) != [0] or not self._check_runner.serves(*checked):
            return None
        return self._check_runner(checked[0], ids)

    def _checked(self, spans: Sequence[RowSpan]) -> tuple[SlabRow, int] | None:
        """Returns the row that checks drafts alone, and its inputs; None: the spans are others."""
        if not self._compiles or len(spans) > 1 or not is_check(spans[0]):
            return None
        return cast(SlabRow, spans[0].row), spans[0].count

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """See Layout. Compiles the passes of a short row that checks drafts alone."""
        if not self._compiles or not self._most_drafts:
            return
        row = SlabRow(self.slabs)
        for lines in check_sizes(self._most_drafts):
            if lines > context:
                break
            found = self._check_runner(row, mx.zeros(lines, dtype=mx.int32))
            mx.eval(*(one for one in found if one is not None), self._written([row]))
            row.trim(0)
            on_progress()
        row.release()

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """See Layout."""
        slabs = {slab: None for row in rows for slab, _ in row.table}
        return [array for slab in slabs for array in slab.arrays()]

    def invalidate(self) -> None:
        """See Layout."""
        self.slabs.invalidate()


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
    ) -> None:
        """`rows`: the most rows of a pass. `uploads` None: MLX copies the numbers of a pass.

        `images`: passes may have spans that are not plain, see RowSpan. `keeps_states`: see Layout.
        """
        super().__init__(shape, model, deterministic=deterministic, keeps_states=keeps_states)
        reads = in_place and kernels_read(shape)
        self.pool = KVPool(shape, blocks, in_place=in_place, reads=reads)
        self.store = self._make_store()
        self.name = "pool, own kernels" if reads else "pool"
        self.shares_arrays = not in_place
        self.blocks = blocks
        # No compiled pass over chunks gives the states of all inputs.
        exact = deterministic or keeps_states
        self.compiles_chunks = reads and not exact and shape.dtype in HALF_DTYPES
        self._upload = uploads or upload_copy
        makes_tables()  # tried here because nothing can be tried while a pass is traced
        self.runner = PagedRunner(model, self.pool, self._upload, keeps_states=keeps_states)
        self.ragged = None
        if self.compiles_chunks and uploads is not None:
            self.ragged = self._ragged_runner(rows, uploads)
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
            self._model, store, self.pool, rows, found, uploads, lines=self.pass_lines
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """See Layout."""
        return () if self.ragged is None else self.ragged.sizes

    def expect_drafts(self, most: int) -> None:
        """See Layout."""
        if self.ragged is not None:
            self.ragged.drafts = most

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
        self.pool.pending.clear()  # writes that were not started
        if self.shares_arrays:
            self.pool.renew()

    def close(self) -> None:
        """See Layout."""
        self.pool.arrays = []


def _places(given: Sequence[RowSpan], ordered: Sequence[RowSpan]) -> mx.array:
    """Returns the number of each token of the spans `given` where these are `ordered`."""
    ends = accumulate(span.count for span in ordered)
    first = {id(one): end - one.count for one, end in zip(ordered, ends, strict=True)}
    lines = [first[id(one)] + line for one in given for line in range(one.count)]
    return mx.array(lines, dtype=mx.int32)


def is_plain_decode(spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
    """Returns whether every span is one token that gets logits, in the order of the spans.

    Its position is its number in the row.
    """
    if list(wanted) != list(range(len(spans))) or spans[-1].hidden:
        return False
    return all(span.count == 1 and span.plain for span in spans)


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
    name: str,
    shape: RowShape,
    model: Model,
    blocks: int,
    *,
    rows: int,
    deterministic: bool,
    on_gpu: bool,
    uploads: Uploads | None = None,
    images: bool = False,
    keeps_states: bool = False,
    keeps_drawn: bool = False,
) -> Layout:
    """Makes the layout of this name for `rows` rows at most; a pool has `blocks` blocks.

    `uploads` give the passes of a pool their numbers; None: MLX copies them. `images`: the model
    reads images. `keeps_states`, `keeps_drawn`: see Layout; a pool keeps no drawn ones.
    """
    if name == "pool":
        return PagedLayout(
            shape,
            model,
            blocks,
            rows=rows,
            deterministic=deterministic,
            in_place=writes_in_place(shape, on_gpu),
            uploads=uploads,
            images=images,
            keeps_states=keeps_states,
        )
    kind = SlabLayout if name == "slabs" else Layout
    return kind(
        shape,
        model,
        deterministic=deterministic,
        keeps_states=keeps_states,
        keeps_drawn=keeps_drawn,
    )


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
