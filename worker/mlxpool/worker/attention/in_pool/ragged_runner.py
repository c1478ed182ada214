"""Runs one compiled pass of a model over spans of rows in the block pool (CUDA)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias, cast

import mlx.core as mx
import numpy as np
from msgspec import Struct, field

from mlxpool.worker.attention.in_pool.block_tables import BlockTables
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedRow, PagedStore
from mlxpool.worker.attention.in_pool.plan_shape import ITEM, Int32s, PassMemory, PlanShape
from mlxpool.worker.attention.in_pool.ragged_batch import AttentionProbe, RaggedBatch
from mlxpool.worker.attention.rotary import frequencies_of
from mlxpool.worker.attention.row_spans import (
    Ids,
    PassOutput,
    RowSpan,
    checks_drafts,
    logit_spans,
    wanted_lines,
)
from mlxpool.worker.decode_pass import choice
from mlxpool.worker.decode_pass.kernel import MAX_LINES
from mlxpool.worker.kernels import kernel_cache, ragged_attention
from mlxpool.worker.kernels.compiled_passes import ComputedKinds
from mlxpool.worker.kernels.device import evaluate_in_own_memory
from mlxpool.worker.kernels.sampling import known_tokens
from mlxpool.worker.kernels.work_list import HIGH, Spans, WorkLists
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.transfers.uploads import Uploads, upload_copy

# The numbers of lines of compiled passes; 1,024 lines keep a large GPU busy. From 256 lines on, the
# time of a pass grows with its lines, so padding costs as much as tokens of prompts.
PASS_LINES = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 576, 640,
    704, 768, 896, 1024,
)  # fmt: skip
# With a small model, or a model that is divided among GPUs, a pass of 1,024 lines is so short that
# the host hardly keeps up.
LONG_PASS_LINES = (*PASS_LINES, 1280, 1536, 1792, 2048)
NOT_WRITTEN = -1  # the slot of a padding line
# Lines of the block tables beyond one for each row of a pass: a released row keeps its line for a
# while.
SPARE_TABLES = 2

# Computes a pass from its numbers and the tokens in flight. Returns the pass's results, and the
# last array of each part of the pass.
OnePass: TypeAlias = Callable[[mx.array, mx.array], tuple[list[mx.array], list[mx.array]]]


class DecodingRows(Struct):
    """The common state of passes over the same `spans`, all single tokens with logits.

    `lines` [R]: each row's line in the block tables. `seen`: the tokens that the spans see; a pass
    that only increments `counting` does not update `seen.ends`. `numbers`: the numbers that
    describe the newest pass. `counting`: the parts of `numbers` that count tokens, and so grow by 1
    in each pass. `bounds` [R]: the capacity of each row's blocks, in tokens. `left`: the number of
    further passes in which no row exceeds its bound. The state is valid while `changes` equals the
    store's `changes`; before the second pass `changes` is -1.
    """

    spans: Sequence[RowSpan]
    rows: list[PagedRow]
    shape: PlanShape
    lines: Int32s
    seen: Spans
    numbers: Int32s
    bounds: Int32s
    counting: list[Int32s] = field(default_factory=list)
    left: int = 0
    changes: int = -1

    @classmethod
    def of(
        cls, spans: Sequence[RowSpan], shape: PlanShape, lines: Int32s, seen: Spans
    ) -> DecodingRows:
        """Returns the state of a pass that was just built, for later passes over the same rows."""
        rows = [cast(PagedRow, span.row) for span in spans]
        numbers = np.zeros((shape.size,), dtype=np.int32)
        return cls(spans, rows, shape, lines, seen, numbers, np.zeros_like(lines))

    @property
    def slots(self) -> Int32s:
        """The pool's slots of the new tokens, a view of `numbers`."""
        return self.shape.of_lines(self.numbers)[2, : len(self.rows)]

    @property
    def stops(self) -> Int32s:
        """The number of tokens of each row after the pass, a view of `numbers`."""
        return self.shape.of_lines(self.numbers)[4, : len(self.rows)]


class RaggedRunner:
    """Runs passes of a model over rows of a pool; a pass is compiled once for each of `sizes`.

    A pass has at most `rows` spans. Padding lines write nothing and see nothing.
    """

    def __init__(
        self,
        model: Model,
        store: PagedStore,
        pool: KVPool,
        rows: int,
        attention: AttentionProbe,
        uploads: Uploads | None,
        *,
        lines: Sequence[int] = PASS_LINES,
        keeps_states: bool = False,
        keeps_drawn: bool = False,
    ) -> None:
        """`lines`: the possible numbers of lines of a pass, up to the pool's chunk.

        `uploads`: sends the index arrays of a pass to the device; None: MLX copies these arrays.
        `keeps_states`: passes return the states of all inputs. `keeps_drawn`: passes return the
        states of their logits. At most one of the two is True.
        """
        self._model, self._pool, self._rows, self._uploads = model, pool, rows, uploads
        self._keeps_states, self._keeps_drawn = keeps_states, keeps_drawn
        self._store = store
        self._tiles = tuple(sorted(attention.shapes, key=repr))
        self._chunk_tiles = tuple(sorted(attention.chunk_shapes, key=repr))
        self._work = {tiles: WorkLists(tiles) for tiles in (*self._tiles, *self._chunk_tiles)}
        entries = blocks_for(pool.shape.capacity)
        self._tables = BlockTables(rows + SPARE_TABLES, entries, uploads or upload_copy)
        most = max(rows, min(lines[-1], pool.shape.chunk))
        self.sizes = tuple(sorted({*(n for n in lines if n < most), most}))
        pairs = max(tile.kv_heads for tile in self._tiles)
        self._memory = PassMemory(
            self._tables.array,
            ragged_attention.counters(pairs),
            ragged_attention.part_sums(*attention.part_sums),
        )
        layers = range(len(pool.arrays))
        windows = [pool.shape.window(layer) for layer in layers]
        self._one_kernel = None
        if not keeps_states:  # the single kernel returns states only for lines with logits
            self._one_kernel = choice.decode_pass_of(
                model, pool.shape.dtype, pool.arrays, windows, self._tables.array, frequencies_of
            )
        self._none = mx.zeros((rows,), dtype=mx.int32)
        evaluate_in_own_memory([self._none, self._memory.arrived, self._memory.partial])
        self.passes: dict[PlanShape, OnePass] = {}  # the compiled passes
        self.kinds = ComputedKinds()
        self._decoding: DecodingRows | None = None  # None: the newest pass did not only decode
        self.drafts = 0  # the most drafts that the rows of a pass check together; 0: not known
        self.begins_parts = True  # passes may begin while they are built

    @property
    def follow_lines(self) -> int:
        """The most lines of a pass that only checks drafts and that a single kernel computes.

        0: no single kernel computes such passes. They are compiled separately from other passes.
        """
        if self._one_kernel is None:
            return 0
        return max((size for size in self.sizes if size <= MAX_LINES), default=0)

    def decodes(self, spans: Sequence[RowSpan]) -> bool:
        """Returns True if the newest pass decoded these spans, which must be the same object."""
        return self._decoding is not None and self._decoding.spans is spans

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """Returns True if the coming pass over these spans is the first pass of its kind."""
        if self.decodes(spans):
            return False
        return self.kinds.is_new(self.shape_of(spans, wanted))

    def step(
        self,
        spans: Sequence[RowSpan],
        ids: Ids,
        drawn: mx.array | None,
        wanted: Sequence[int],
    ) -> PassOutput:
        """Builds one pass over the inputs `ids` [T] and advances the rows; see Layout.step.

        If `spans` is the same object as in the previous pass, it must still contain the same spans.
        """
        if self._decoding is not None and self._decoding.spans is spans:
            return self._decode_again(self._decoding, ids, drawn)
        shape = self.shape_of(spans, wanted)
        if shape.follow:
            spans, ids = in_order(spans, ids, wanted)
            wanted = range(len(spans))
        rows = [cast(PagedRow, span.row) for span in spans]
        ends = [row.offset + span.count for row, span in zip(rows, spans, strict=True)]
        for number in self._store.short(rows, ends):
            rows[number].reserve(ends[number])
        numbers, plan = self._numbers(shape.size)
        written = self._write_plan(numbers, shape, rows, spans, ids, wanted)
        outputs = self._outputs(shape, mx.array(numbers) if plan is None else plan, written, drawn)
        for span in spans:
            span.row.advance(span.count)
        if shape.drawn is None:
            count = len(wanted) if shape.single else wanted_lines(spans, wanted)
            return self._given(outputs[0][:count] if wanted else outputs[0], outputs[1:], len(ids))
        count = wanted_lines(spans, logit_spans(spans, wanted))
        hidden = outputs[0][count : wanted_lines(spans, wanted)]
        logits = outputs[1][:count] if count else hidden
        return self._given(logits, outputs[2 if count else 1 :], len(ids))._replace(hidden=hidden)

    def _numbers(self, size: int) -> tuple[Int32s, mx.array | None]:
        """Returns host memory for a pass's numbers, and a device array of the same memory.

        Without `uploads` the array is None: the caller copies the numbers into an array after it
        has written them.
        """
        if self._uploads is None:
            return np.zeros((size,), dtype=np.int32), None
        return self._uploads.take(size)

    def _given(self, logits: mx.array, states: Sequence[mx.array], lines: int) -> PassOutput:
        """Returns the output of a pass over `lines` lines.

        `states`: one array of the states that the pass keeps, or nothing. After the pass's lines,
        the array may have lines of padding.
        """
        if not states:
            return PassOutput(logits)
        if self._keeps_states:
            return PassOutput(logits, states=states[0][:lines])
        return PassOutput(logits, drawn=states[0])

    def _decode_again(self, decoding: DecodingRows, ids: Ids, drawn: mx.array | None) -> PassOutput:
        """Builds one more pass over the spans of the previous pass."""
        rows, shape = decoding.rows, decoding.shape
        same = decoding.changes == self._store.changes
        if same and all(self._work[tiles].repeats() for tiles in shape.tiles):
            written = self._count_on(decoding)
        else:
            written = self._number_again(decoding, ids)
        numbers, plan = self._numbers(shape.size)
        numbers[:] = decoding.numbers
        numbers[: len(rows)] = ids
        outputs = self._outputs(shape, mx.array(numbers) if plan is None else plan, written, drawn)
        for row in rows:
            row.offset += 1
        return self._given(outputs[0][: len(rows)], outputs[1:], len(rows))

    def _count_on(self, decoding: DecodingRows) -> mx.array | None:
        """Increments by 1 those numbers of the previous pass that count tokens.

        Also sends changed entries of the block tables to the device. Returns an array with the
        value 0, which the caller adds to the pass's numbers, so that the pass runs after this copy.
        Returns None if no entry has changed.
        """
        for part in decoding.counting:
            part += 1
        if decoding.left:
            decoding.left -= 1
            return None
        rows, stops, slots, bounds = (
            decoding.rows,
            decoding.stops,
            decoding.slots,
            decoding.bounds,
        )
        crossing = np.flatnonzero(stops > bounds).tolist()  # rows that begin a new block
        for number in crossing:
            row, end = rows[number], int(stops[number])
            row.reserve(end)
            slots[number] = row.slot(end - 1)
            bounds[number] += KV_BLOCK_TOKENS
        decoding.left = int((bounds - stops).min())
        return self._tables.update([rows[number] for number in crossing], decoding.lines[crossing])

    def _number_again(self, decoding: DecodingRows, ids: Ids) -> mx.array | None:
        """Writes all numbers that describe one more pass over the same rows, changed or not.

        Also sends changed entries of the block tables to the device. Returns an array with the
        value 0, which the caller adds to the pass's numbers, so that the pass runs after this copy.
        Returns None if no entry has changed.
        """
        rows, shape, lines, numbers = (
            decoding.rows,
            decoding.shape,
            decoding.lines,
            decoding.numbers,
        )
        offsets = np.array([row.offset for row in rows], dtype=np.int32)
        ends = np.add(offsets, 1, out=decoding.seen.ends)
        for number in self._store.short(rows, ends.tolist()):
            rows[number].reserve(int(ends[number]))
        written = self._tables.update(rows, lines)
        self._write_lines(numbers, shape, ids, offsets, lines)
        self._write_items(numbers, shape, decoding.seen)
        decoding.bounds = (offsets // KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS
        decoding.left = int((decoding.bounds - ends).min())
        decoding.counting = [shape.of_lines(numbers)[1:3, : len(rows)], decoding.stops]
        at = 5 * shape.lines + shape.wanted
        for tiles in shape.tiles:
            items = numbers[at : at + shape.capacity(tiles) * ITEM].reshape(-1, ITEM)
            decoding.counting.append(items[: self._work[tiles].ends, HIGH])
            at += items.size
        decoding.changes = self._store.changes
        return written

    def _outputs(
        self, shape: PlanShape, plan: mx.array, written: mx.array | None, drawn: mx.array | None
    ) -> list[mx.array]:
        """Returns the arrays of a pass's results.

        `plan`: the numbers that describe the pass. `written`: an array with the value 0, on which
        the pass must depend; None: no such array. If no token is in flight (`drawn` is None), a
        pass over chunks is submitted part by part, so that the device is not idle while the host
        builds the pass.
        """
        single = shape.single and choice.serves(shape.lines)
        if self._one_kernel is not None and (single or shape.follow):
            plan = plan if written is None else plan + written
            drawn = self._none if drawn is None else drawn
            states = self._one_kernel(plan, drawn, shape.lines, follow=shape.follow)
            return [self._model.logits_of(states), *([states] if self._keeps_drawn else ())]
        plan = plan + (0 if written is None else written)
        outputs, parts = self._compiled(shape)(plan, self._padded(drawn))
        if drawn is None and self.begins_parts and not kernel_cache.is_collecting():
            begin(parts)
        return outputs

    def _compiled(self, shape: PlanShape) -> OnePass:
        if shape not in self.passes:
            self.passes[shape] = mx.compile(partial(self._one_pass, shape))
        return self.passes[shape]

    def shape_of(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> PlanShape:
        """Returns the shape of a pass over `spans` with results of the spans `wanted`."""
        lines = sum(span.count for span in spans)
        padded = next((size for size in self.sizes if size >= lines), lines)
        hidden = bool(wanted) and spans[wanted[-1]].hidden
        if len(wanted) == lines and not hidden:  # every span is a single line with logits
            return PlanShape(padded, 0, self._tiles)
        most, count = min(padded, self._rows), wanted_lines(spans, wanted)
        if count == lines <= self.follow_lines and not hidden:
            return PlanShape(padded, 0, self._tiles, follow=True)
        if checks_drafts(spans, wanted) and not hidden:
            # To compile few passes, this shape is also for passes with chunks of prompts.
            return PlanShape(padded, self._named(padded, count), self._tiles, spans=self._rows)
        named = most if count <= most else padded
        if not hidden:
            return PlanShape(padded, named, self._chunk_tiles, chunks=True, spans=self._rows)
        drawn = wanted_lines(spans, logit_spans(spans, wanted))
        if drawn:  # rounded, to compile few passes
            drawn = most if drawn <= most else named
        return PlanShape(
            padded, named, self._chunk_tiles, chunks=True, drawn=drawn, spans=self._rows
        )

    def _named(self, padded: int, count: int) -> int:
        """Returns the most lines with results for which a pass of `padded` lines is compiled.

        The number is at least `count`, the lines with results of this pass. It may be less than
        `padded`: beside a long chunk few lines have results, and each of these lines needs memory
        for its logits.
        """
        if count <= self._rows:
            return min(padded, self._rows)
        most = self._rows + self.drafts
        if count > most:
            return padded
        return min(padded, next((size for size in self.sizes if size >= most), padded))

    def _padded(self, drawn: mx.array | None) -> mx.array:
        """Returns the tokens in flight as an array [rows], padded or cut off.

        Only tokens of checked drafts, which come last, are cut off.
        """
        if drawn is None:
            return self._none
        if drawn.shape[0] > self._rows:
            return drawn[: self._rows]
        missing = self._rows - drawn.shape[0]
        return mx.concatenate([drawn, self._none[:missing]]) if missing else drawn

    def _write_plan(
        self,
        numbers: Int32s,
        shape: PlanShape,
        rows: Sequence[PagedRow],
        spans: Sequence[RowSpan],
        ids: Ids,
        wanted: Sequence[int],
    ) -> mx.array | None:
        """Writes a pass's ids, positions, slots and work lists, in the order of PlanShape.arrays.

        Also sends changed entries of the block tables to the device. Returns an array with the
        value 0, which the caller adds to the pass's numbers, so that the pass runs after this copy.
        Returns None if no entry has changed.
        """
        lines = self._tables.lines_of(rows)
        written = self._tables.update(rows, lines)
        offsets = np.array([row.offset for row in rows], dtype=np.int32)
        counts = np.array([span.count for span in spans], dtype=np.int32)
        behind = np.cumsum(counts, dtype=np.int32)
        used, first = len(ids), behind - counts
        tables, ends = lines * self._tables.entries, offsets + counts
        seen = Spans(first, counts, tables, ends, np.zeros_like(counts))
        self._decoding = DecodingRows.of(spans, shape, lines, seen) if shape.single else None
        if used > len(rows):
            lines = np.repeat(lines, counts)
            offsets = np.repeat(offsets - first, counts) + np.arange(used, dtype=np.int32)
        if shape.follow:  # each line has its own work items
            first, ones = np.arange(used, dtype=np.int32), np.ones((used,), dtype=np.int32)
            seen = Spans(first, ones, lines * self._tables.entries, offsets + 1, 0 * ones)
        self._write_lines(numbers, shape, ids, offsets, lines)
        if shape.wanted:
            named = behind[list(wanted)] - 1
            if wanted and spans[wanted[-1]].wide:
                several = [np.arange(behind[n] - spans[n].lines, behind[n]) for n in wanted]
                named = np.concatenate(several)
            at = 5 * shape.lines
            numbers[at : at + len(named)] = named
        self._write_items(numbers, shape, seen)
        return written

    def _write_lines(
        self, numbers: Int32s, shape: PlanShape, ids: Ids, positions: Int32s, lines: Int32s
    ) -> None:
        """Writes each input's numbers: its id, position, slot, and the end of its visible tokens.

        `lines` [T]: the lines of the inputs' rows in the block tables. Other numbers become 0.
        """
        numbers.fill(0)
        used = len(ids)
        inputs, rotated, slots, _, stops = shape.of_lines(numbers)
        inputs[:used], rotated[:used] = ids, positions
        np.add(positions, 1, out=stops[:used])
        blocks = self._tables.numbers[lines, positions // KV_BLOCK_TOKENS]
        slots[:used] = blocks * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS
        slots[used:] = NOT_WRITTEN

    def _write_items(self, numbers: Int32s, shape: PlanShape, seen: Spans) -> None:
        """Writes the work list of each shape of tiles."""
        at = 5 * shape.lines + shape.wanted
        for tiles in shape.tiles:
            lists = self._work[tiles]
            items_of = lists.items_once if shape.follow else lists.items
            items = items_of(seen, shape.lines, shape.capacity(tiles)).reshape(-1)
            numbers[at : at + items.size] = items
            at += items.size

    def _one_pass(
        self, shape: PlanShape, plan: mx.array, drawn: mx.array
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Returns the results of a pass, and the last array of each part of the pass.

        A pass over chunks of prompts can be submitted part by part. Without wanted hidden states,
        the first result is logits [E, vocabulary]. Otherwise it is the wanted hidden states [E, d],
        and the logits follow, if any span wants logits. The last result is the states that the
        runner keeps: with `keeps_states` the states [T, d] of all lines. With `keeps_drawn`, if no
        span wants hidden states, it is the states [E, d] of the logits.
        """
        ids, arrays = shape.arrays(plan, self._memory)
        ids = known_tokens(ids, drawn)
        batch = RaggedBatch(self._pool, arrays, every=self._keeps_states)
        if shape.drawn is None and not (self._keeps_states or self._keeps_drawn):
            return [self._model(ids, batch)], batch.parts
        all_states = states = self._model.hidden_states(ids, batch)
        if self._keeps_states:
            states = batch.logit_rows(all_states)
        kept = (
            [all_states]
            if self._keeps_states or (self._keeps_drawn and shape.drawn is None)
            else []
        )
        if shape.drawn is None:
            return [self._model.logits_of(states), *kept], batch.parts
        logits = [self._model.logits_of(states[: shape.drawn])] if shape.drawn else []
        return [states.astype(mx.float32), *logits, *kept], batch.parts


def in_order(
    spans: Sequence[RowSpan], ids: Ids, order: Sequence[int]
) -> tuple[Sequence[RowSpan], Ids]:
    """Returns spans and their ids in `order`, a permutation of the spans' numbers."""
    if all(number == place for place, number in enumerate(order)):
        return spans, ids
    behind = [*accumulate(span.count for span in spans)]
    parts = [ids[behind[number] - spans[number].count : behind[number]] for number in order]
    return [spans[number] for number in order], np.concatenate(parts)


def begin(parts: Sequence[mx.array]) -> None:
    """Submits a pass to the device in parts, given by their last arrays, one after the other.

    Otherwise MLX would submit a hundred kernels at a time. For a small model the host takes as long
    to build a hundred kernels as the device to compute them, and meanwhile the device would be
    idle.
    """
    for part in parts:
        mx.async_eval(part)  # type: ignore[no-untyped-call]
