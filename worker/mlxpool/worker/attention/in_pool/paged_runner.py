"""Compiled forward passes over rows of the block pool."""

from __future__ import annotations

from array import array as Numbers
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedRow
from mlxpool.worker.attention.in_pool.paged_batch import PagedBatch
from mlxpool.worker.attention.row_shape import Arrays
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels import kernel_cache, paged_attention
from mlxpool.worker.kernels.compiled_passes import CompiledPasses
from mlxpool.worker.kernels.paged_attention import parts_for
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.prefix.shared_blocks import BlockRow
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.transfers.uploads import Upload, upload_copy

CHUNK_WIDTHS = (16, 48, 128)  # tokens of the passes over a chunk of one row
MIN_BATCH_WIDTH = 64  # tokens of the smallest pass over chunks of several rows
MAX_PREFILL_ROWS = 32  # of one pass over chunks, each of which may get logits
MAX_COMPILED_PASSES = 128  # the host of a GPU has the memory for so many
# The kinds of passes.
DECODE, CHUNK, CHUNK_WITH_LOGITS = "decode", "chunk", "chunk with logits"
# Blocks; the width of block tables is a multiple of it, so that few passes are compiled.
TABLE_WIDTH_STEP = 8


class PagedRunner:
    """Runs passes of a model over rows of a pool, compiled once for each of a few widths.

    Padding tokens write into the spare block of the pool and read it.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        upload: Upload = upload_copy,
        *,
        notice: Callable[[], None] = lambda: None,
        keeps_states: bool = False,
    ) -> None:
        """`notice` is called before a pass is compiled.

        `keeps_states`: passes over decode rows give the states of their inputs.
        """
        self._keeps_states = keeps_states
        self._model, self._pool, self._upload = model, pool, upload
        self._heads = min(arrays[0].shape[1] for arrays in pool.arrays)
        self._padding_row = BlockRow(0, table=[pool.spare])
        # Tokens of the largest pass over several rows: it needs no more memory than a chunk does.
        self.max_width = max(MIN_BATCH_WIDTH, pool.shape.chunk)
        self.passes = CompiledPasses(self._one_pass, notice, max_passes=MAX_COMPILED_PASSES)
        self.gathers = False  # whether chunk passes copy the blocks of a row for each token

    def decode(self, rows: Sequence[PagedRow], ids: mx.array) -> PassOutput:
        """Returns logits [R, vocabulary] of one token `ids` [R] for each row; advances the rows."""
        lines = padded_width(len(rows))
        for row in rows:
            row.reserve(row.offset + 1)
        at = [row.offset for row in rows]
        logits, *states = self._computed(rows, at, lines, ids, max(at) + 1, None)
        for row in rows:
            row.advance(1)
        kept = states[0][: len(rows)] if states else None
        return PassOutput(logits[: len(rows)], states=kept)

    def chunk(self, row: PagedRow, ids: mx.array, *, logits: bool = False) -> mx.array:
        """Computes tokens `ids` [n] of one row and advances it; n <= CHUNK_WIDTHS[-1].

        Each token attends by itself: for few tokens one compiled pass costs less than the many
        operations of a chunk. Returns logits [1, vocabulary] of the last token when `logits` is
        set, else an array to evaluate.
        """
        count = ids.shape[0]
        lines = next(lines for lines in CHUNK_WIDTHS if lines >= count)
        end = row.offset + count
        row.reserve(end)
        at, last = list(range(row.offset, end)), [count - 1] if logits else []
        (found,) = self._computed([row] * count, at, lines, ids, end, last)
        self._pool.pending.append(found)
        row.advance(count)
        return found

    def chunks(
        self, parts: Sequence[tuple[PagedRow, int]], ids: mx.array, last: Sequence[int]
    ) -> mx.array:
        """Computes new tokens `ids` [T] of up to MAX_PREFILL_ROWS rows and advances the rows.

        `parts` are rows with their numbers of tokens, at most `max_width` in all once padded.
        Returns logits [E, vocabulary] of the last token of each part whose index is in `last`.
        """
        rows: list[BlockRow] = []
        at: list[int] = []
        places: list[int] = []  # of the padded tokens in `ids`
        ends = []
        begin = 0
        for row, count in parts:
            row.reserve(row.offset + count)
            spare = padded_tokens(count) - count
            ends.append(len(rows) + count - 1)
            rows += [row] * count + [self._padding_row] * spare
            at += [*range(row.offset, row.offset + count), *[0] * spare]
            places += [*range(begin, begin + count), *[0] * spare]
            begin += count
        wanted = [ends[number] for number in last]
        wanted += [0] * (MAX_PREFILL_ROWS - len(wanted)) if wanted else []
        lines = max(MIN_BATCH_WIDTH, padded_width(len(rows)))
        padded = ids[self._upload(np.array(places, dtype=np.int32))]
        (found,) = self._computed(rows, at, lines, padded, max(at) + 1, wanted)
        self._pool.pending.append(found)
        for row, count in parts:
            row.advance(count)
        return found[: len(last)]

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """Compiles the passes that up to `rows` rows of up to `context` tokens need."""
        self.compile_decode(range(1, rows + 1), context, on_progress)
        passes = list(product(CHUNK_WIDTHS, ([], [0])))
        if rows > 1:
            most = max(
                MIN_BATCH_WIDTH,
                min(self.max_width, min(rows, MAX_PREFILL_ROWS) * padded_tokens(context)),
            )
            widths = sorted({padded_width(lines) for lines in range(MIN_BATCH_WIDTH, most + 1)})
            fit = [lines for lines in widths if lines <= self.max_width]
            passes += product(fit, ([], [0] * MAX_PREFILL_ROWS))
        for (lines, last), longest in product(passes, (1, context)):
            if not self.gathers:
                self._warm(lines, longest, last)
                on_progress()

    def compile_decode(
        self, rows: Iterable[int], context: int, on_progress: Callable[[], None]
    ) -> None:
        """Compiles the decode passes of each of these numbers of rows."""
        lengths = [2**n for n in range(context.bit_length())]
        seen = set()
        for lines in sorted(set(map(padded_width, rows))):
            for longest in lengths:
                kind = paged_attention.kernel_variant(lines * self._heads, longest)
                if kind not in seen:
                    self._warm(lines, longest)
                    on_progress()
                seen.add(kind)

    def _warm(self, lines: int, longest: int, last: Sequence[int] | None = None) -> None:
        """Computes a pass of padding tokens only; while kernels are collected, it is only built."""
        nothing = mx.zeros((0,), dtype=mx.int32)
        found = self._computed([], [], lines, nothing, longest, last)
        if not kernel_cache.is_collecting():
            mx.eval(*found)

    def _computed(
        self,
        rows: Sequence[BlockRow],
        at: Sequence[int],
        lines: int,
        ids: mx.array,
        longest: int,
        last: Sequence[int] | None,
    ) -> Sequence[mx.array]:
        """Computes tokens `ids` of these rows at positions `at`, padded to `lines` tokens.

        `last` None: a decode pass; else a pass over chunks, in which these tokens get logits.
        Returns the logits, and behind them states [lines, d] where a decode pass keeps them.
        """
        kind = DECODE if last is None else CHUNK_WITH_LOGITS if last else CHUNK
        wanted = last or ()
        width = -(-blocks_for(longest) // TABLE_WIDTH_STEP) * TABLE_WIDTH_STEP
        if lines > len(rows):
            ids = mx.concatenate([ids, mx.zeros((lines - len(rows),), dtype=ids.dtype)])
        longest = self._cut(
            lines if kind == DECODE else lines // paged_attention.MAX_GROUP, longest
        )
        same = (lines, width, longest, self._pool.blocks, kind, len(wanted))
        packed = _packed_places(rows, at, lines, width, self._pool.spare, wanted)
        places = self._upload(np.frombuffer(packed, dtype=np.int32))
        found, written = self.passes(same, ids, places, width, longest, kind, self._pool.arrays)
        if not self._pool.in_place:
            self._pool.arrays = written
        return found

    def _cut(self, lines: int, longest: int) -> int:
        """Returns the least length that splits so many rows into as many parts as `longest`."""
        return paged_attention.MIN_PART_TOKENS * parts_for(lines * self._heads, longest)

    def _one_pass(
        self,
        ids: mx.array,
        places: mx.array,
        width: int,
        longest: int,
        kind: str,
        arrays: list[Arrays],
    ) -> tuple[list[mx.array], list[Arrays]]:
        lines = ids.shape[0]
        positions, slots = places[:lines], places[lines : 2 * lines]
        behind = lines * (2 + width)
        table = places[2 * lines : behind].reshape(lines, width)
        pool, last = (
            _PoolView(self._pool, arrays),
            places[behind:] if kind == CHUNK_WITH_LOGITS else None,
        )
        step = PagedBatch(pool, positions, slots, table, longest, chunk=kind != DECODE, last=last)
        if self._keeps_states and kind == DECODE:
            states = self._model.hidden_states(ids, step)
            found = [self._model.logits_of(states), states]
        else:
            found = [self._model(ids, step)]
        self.gathers = (self.gathers or step.gathers) and pool.in_place
        return found, [] if pool.in_place else pool.arrays


def padded_width(rows: int) -> int:
    """Returns the padded tokens of a pass: a power of two, or one and a half of one."""
    lines = 1 << (rows - 1).bit_length()
    return lines * 3 // 4 if rows <= lines * 3 // 4 and lines >= 4 else lines


def padded_tokens(tokens: int) -> int:
    """Returns the padded tokens of one row in a pass over several rows."""
    return -(-tokens // paged_attention.MAX_GROUP) * paged_attention.MAX_GROUP


def _packed_places(
    rows: Sequence[BlockRow],
    offsets: Sequence[int],
    lines: int,
    width: int,
    spare: int,
    last: Sequence[int],
) -> Numbers[int]:
    """Packs the inputs of a pass into one array.

    They are positions [lines], slots [lines] and block tables [lines, width] of the new tokens, and
    the tokens that get logits. The host builds it in each step, so the work for a row is minimal.
    """
    padding_rows, size = lines - len(rows), KV_BLOCK_TOKENS
    places = Numbers("i", offsets)
    places.extend([0] * padding_rows)
    at = zip(rows, offsets, strict=True)
    places.extend([row.table[to // size] * size + to % size for row, to in at])
    places.extend([spare * size] * padding_rows)
    padding = [spare] * width
    for row in rows:
        places.extend(row.table[:width])
        places.extend(padding[len(row.table) :])
    for _ in range(padding_rows):
        places.extend(padding)
    places.extend(last)
    return places


class _PoolView(KVPool):
    """A pool with the arrays of a compiled pass."""

    def __init__(self, pool: KVPool, arrays: list[Arrays]) -> None:
        self.shape, self.in_place, self.reads = pool.shape, pool.in_place, pool.reads
        self.arrived = pool.arrived
        self.blocks = self.spare = pool.blocks
        self.arrays = [tuple(one) for one in arrays]
        self.pending = []
