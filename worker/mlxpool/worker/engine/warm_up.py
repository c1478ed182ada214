"""What an engine does at load: measures the memory of a pass, compiles, computes each kind once."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from itertools import pairwise
from time import monotonic

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from mlxpool.common.options import Options
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.prediction_heads.head_drafts import HeadDrafts
from mlxpool.worker.attention.row_spans import CacheRow, Ids, RowSpan
from mlxpool.worker.constraints.mask_table import MaskTable, new_table, words_of_mask
from mlxpool.worker.engine.image_encoder import ImageEncoder
from mlxpool.worker.engine.measurements import KeptMeasurement, Measurement
from mlxpool.worker.engine.pass_kinds import PassKind, compiled_kinds, first_and_last
from mlxpool.worker.engine.pass_spans import PassSpans
from mlxpool.worker.engine.prompt_logprobs import lines_at_a_time, logit_bytes
from mlxpool.worker.engine.row_engine import RowEngine
from mlxpool.worker.engine.token_draws import TokenDraws
from mlxpool.worker.kernels import device, kernel_cache
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import ALL_OPTIONS, SamplerOutput, SamplingBatch, TokenMasks
from mlxpool.worker.sampling.row_masks import NO_MASKS, Mask, RowMasks
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, activation_bytes, blocks_for
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import StepTarget
from mlxpool.worker.speculation.mtp import FIRST_CHANCES
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.transfers.downloads import Download
from mlxpool.worker.transfers.shared_array import SETS
from mlxpool.worker.transfers.uploads import Uploads, upload_copy, upload_table

CPU_WARM_UP_CHUNKS = (64, 256)  # tokens of the chunks that are measured at load
GPU_WARM_UP_CHUNKS = (256, 1024)  # the same
WARM_UP_PASSES = 2  # of each size; the first compiles
UNLIMITED_TOKENS = 10**9
MASK_TABLES = 2  # for the next draw, and for rows that read forced tokens before they draw
LONG_PASSES_LEAVE = 7 / 8  # of the blocks, at least: otherwise passes stay short
DECODE_STEPS = 12  # of one row, whose time decides about the time of all passes

log = logging.getLogger("mlxpool.worker")


class WarmedEngine(RowEngine[CacheRow]):
    """The part of ModelEngine that runs at load; a subclass sets the attributes listed here."""

    _layout: Layout
    _lookahead: bool
    _pairs: int  # of a query and a key, that a pass has at most
    _image_encoder: ImageEncoder | None
    _uploads: Uploads | None
    _predictions: HeadDrafts | None
    _draws: TokenDraws
    _mask_tables: list[MaskTable]
    _target: StepTarget
    _step_seconds: float
    _dtype: mx.Dtype  # of logits
    _long_passes = False  # whether passes in which nothing decodes have twice the lines
    _keeps_measurement = False  # whether a later load on a CPU may take the figures of this one
    _most_drafts = 0  # that the rows of a pass check together; 0: no drafts are checked

    @abstractmethod
    def _make_layout(self, blocks: int | None = None) -> tuple[Layout, PrefixCache[CacheRow]]:
        """Makes the layout and its prefix cache."""

    @abstractmethod
    def _pool_blocks(self) -> int:
        """Returns how many blocks a pool has: enough for all rows and prefixes, if they fit."""

    @abstractmethod
    def _bound_passes(self) -> None:
        """Bounds the inputs of a pass by those of the longest that the layout compiles."""

    @abstractmethod
    def _inputs(self, wants: PassSpans) -> tuple[Ids, mx.array | None]:
        """Returns the ids of a pass, and the tokens in flight that negative ids stand for."""

    @abstractmethod
    def _results(
        self, logits: mx.array, sampled: SamplerOutput | None, hidden: mx.array | None
    ) -> tuple[tuple[mx.array, ...], Download | None]:
        """Returns the arrays whose evaluation ends a pass, and the download of its results."""

    @abstractmethod
    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        """See Engine.forward."""

    @abstractmethod
    def draw(self, masks: RowMasks) -> None:
        """See Engine.draw."""

    def expect_drafts(self, most: int) -> None:
        """See Engine.expect_drafts."""
        self._most_drafts = most
        self._layout.expect_drafts(most)

    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """See Engine.warm_up. Also measures the memory of a prefill chunk and of draws.

        On a CPU it measures, and computes passes, unless an earlier load has kept its figures.
        """
        LOAD.enter("memory")
        if device.on_gpu():  # above this limit MLX waits for steps in flight
            mx.set_memory_limit(self._limit)
        kept = self._kept_measurement()
        known = None if kept is None else kept.find()
        if known is None:
            self._measure_memory(on_progress)
        else:
            log.info("an earlier load has measured the memory and times of passes")
            self._activation_bytes, self._largest_image = known.step, known.image
        if self._is_pooled:
            self._remake_layout()
            self._require_min_blocks()
        if device.on_gpu():
            self._compile_kernels(self._kinds_of_passes(), on_progress)
        LOAD.enter("warm_up")
        self._warm_up_passes(on_progress, known)
        self._layout.evaluated()
        if self._predictions is not None:
            self._warm_up_head(self._predictions)
            on_progress()
        # Not of the cost model, which predicts other passes from those that it saw last.
        if self._target.least < self._target.most:
            self._step_seconds = self._target.seconds(self._decode_seconds())
        self._finish_warm_up(0 if known is None else known.process)
        if kept is not None and known is None:
            process = self._process_bytes_at_start
            step, image = self._activation_bytes, self._largest_image
            kept.keep(Measurement(step, image, process, self.cost.observed))
        kernel_cache.log_mlx_kernels(LOAD.times.total)

    @property
    def _is_pooled(self) -> bool:
        """Whether the measurement decides about the blocks of a pool."""
        return self._layout.holds_prefixes and self._fixed_blocks is None

    def _kept_measurement(self) -> KeptMeasurement | None:
        """Returns the file of this engine's figures; None: each load measures them."""
        if not self._keeps_measurement or device.on_gpu() or self.draft is not None:
            return None
        return KeptMeasurement(
            {
                **self._kept_rules(),
                "model": self.digest,
                "weights": self._weights,
                "context": self.context,
                "batch": self.batch,
                "chunk": self.chunk,
                "pairs": self._pairs,
                "sequences": self._max_sequences,
                "blocks": self._fixed_blocks,
                "block": self._block_bytes,
                "row": self._row_bytes,
                "read": self._layout.read_bytes,
                "drafts": self._most_drafts,
                "lookahead": self._lookahead,
            }
        )

    def _measure_memory(self, on_progress: Callable[[], None]) -> None:
        """Measures the bytes of a pass at its peak."""
        sizes = [
            min(n, self.context - 3)
            for n in (GPU_WARM_UP_CHUNKS if device.on_gpu() else CPU_WARM_UP_CHUNKS)
        ]
        if self._is_pooled:  # a small pool leaves memory for the measurement
            self._remake_layout(blocks_for(sizes[-1] + 3))
        if self.draft is not None:
            self.draft.warm_up(on_progress)
        small, large = self._measure_chunks(sizes, on_progress)
        on_progress()
        self._choose_long_passes(small, large)
        one_pass = self._pass_bytes(small, large, self.chunk, self._pairs)
        if self._most_drafts:
            one_pass = max(one_pass, self._draw_bytes(self._most_logits()))
        self._activation_bytes = (1 + self._lookahead) * one_pass + self._layout.read_bytes
        if self._image_encoder is not None:  # it may run beside a pass in flight
            taken, self._largest_image = self._image_encoder.measure()
            beside = self._lookahead * one_pass + self._layout.read_bytes + taken
            self._activation_bytes = max(self._activation_bytes, beside)
            on_progress()

    def _remake_layout(self, blocks: int | None = None) -> None:
        tell = self._layout.notice.tell
        self._layout.close()
        mx.clear_cache()
        self._layout, self._prefix = self._make_layout(blocks)
        self._layout.notice.tell = tell
        self._layout.expect_drafts(self._most_drafts)
        self.blocks.capacity = self._capacity()

    def _measure_chunks(
        self, sizes: Many[int], on_progress: Callable[[], None]
    ) -> list[tuple[int, int]]:
        """Returns what `_measure_chunk` does for each size; compiles their kernels together."""
        if self._layout.sizes and device.on_gpu():
            kinds = [PassKind(unread=size) for size in sizes]
            self._compile_kernels(kinds, on_progress)
            LOAD.enter("memory")
        return [self._measure_chunk(size) for size in sizes]

    def _measure_chunk(self, size: int) -> tuple[int, int]:
        """Computes a chunk of `size` tokens; returns `size` and the bytes of its activations."""
        (seq,) = self._dummy_rows(1, max(size, 1) + 2)  # so that the chunk is not its last
        self._layout.reserve(self._rows[seq], seq.length)  # its memory is not activation memory
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with self._layout.whole_passes():
            self.step([Span(seq, 0, size, draws=0)])
        peak = mx.get_peak_memory() - before
        self._drop_rows([seq])
        return size, peak

    def _pass_bytes(
        self, small: tuple[int, int], large: tuple[int, int], lines: int, pairs: int
    ) -> int:
        """Returns the bytes of a pass of so many inputs and query-key pairs at most.

        `small` and `large` are what `_measure_chunk` has returned: inputs and bytes of a chunk.
        """
        one_pass = activation_bytes(small, large, lines, pairs)
        # In place of a pass that has ended.
        return max(one_pass, logit_bytes(self.vocab_size, lines))

    def _choose_long_passes(self, small: tuple[int, int], large: tuple[int, int]) -> None:
        """Makes a layout of long passes, if they pay and are allowed.

        They have twice the inputs of the `large` chunk, which is the longest of the layout. They
        pay for small models, of which the host takes as long to build a pass as the device to
        compute it. They are allowed if they end within the step target's upper bound, so that
        requests that arrive are not delayed, and leave LONG_PASSES_LEAVE of the blocks.
        """
        size, most = large[0], min(self.batch, self.context)
        if self._layout.sizes[-1:] != (size,) or most <= size or self._fixed_blocks is not None:
            return
        if self._image_encoder is not None:  # passes with images are not compiled, and keep scores
            return
        if 2 * self._chunk_seconds(size) > self._target.most:
            return
        short, long = (
            self._blocks_beside((1 + self._lookahead) * self._pass_bytes(small, large, n, n * n))
            for n in (size, min(most, 2 * size))
        )
        if long and long >= LONG_PASSES_LEAVE * short:
            self._long_passes = True
            self._remake_layout(blocks_for(size + 3))
            self._bound_passes()

    def _blocks_beside(self, step: int) -> int:
        """Returns the blocks that a pool would have if a step took so many bytes."""
        before, self._activation_bytes = self._activation_bytes, step + self._layout.read_bytes
        try:
            return self._pool_blocks()
        finally:
            self._activation_bytes = before

    def _chunk_seconds(self, size: int) -> float:
        """Returns the time of a chunk of `size` tokens, for which the pass is compiled."""
        (seq,) = self._dummy_rows(1, size + 1)
        began = monotonic()
        self.step([Span(seq, 0, size, draws=0)])
        taken = monotonic() - began
        self._drop_rows([seq])
        return taken

    def _most_logits(self) -> int:
        """Returns how many lines of logits a pass with drafts has, with those of padding."""
        most = self._max_sequences + self._most_drafts
        return next((size for size in self._layout.sizes if size >= most), most)

    def _draw_bytes(self, lines: int) -> int:
        """Returns the memory of so many lines of logits and of their draws, with every option."""
        part = min(lines, lines_at_a_time(self.vocab_size))
        # Some rows with a top-k and some without, for which top-p looks at all tokens.
        options = [ALL_OPTIONS, replace(ALL_OPTIONS, top_k=0)] * part
        batch = SamplingBatch(options[:part], [0] * part, self.vocab_size)
        words = self._whole_mask(part).view(np.int32)
        numbers = upload_table(upload_copy, np.arange(part, dtype=np.int32), words)
        logits = mx.zeros((part, self.vocab_size), dtype=self._dtype)
        mx.eval(logits, numbers)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        masks, histories = TokenMasks(numbers, part), [(0,)] * part
        found = sampler.sample_batch(logits, batch, range(part), histories, masks=masks)
        mx.eval(found.arrays())
        taken = mx.get_peak_memory() - before
        return taken + lines * self.vocab_size * self._dtype.size

    def _warm_up_passes(
        self, on_progress: Callable[[], None], known: Measurement | None = None
    ) -> None:
        """Computes a pass of each kind that is compiled, and one with every sampling option.

        The second pass of a kind shows the cost model its time. Where times are `known`, one pass
        shows that the model computes.
        """
        if known is not None:
            for load, seconds in known.passes:
                self.cost.observe(load, seconds)
            self._warm_up(PassKind((1,)), on_progress, times=1)
            return
        held = self._hold_rows()
        self._warm_up(PassKind((1,)), on_progress, ALL_OPTIONS)
        if self._uploads is not None:
            self._warm_up_masks(1, ALL_OPTIONS)
            self._warm_up_masks(self._most_rows())
        for kind in self._kinds_of_passes():
            self._warm_up(kind, on_progress)
        self._drop_rows(held)

    def _hold_rows(self) -> list[Sequence]:
        """Returns a row that keeps the arrays of rows allocated while passes are warmed.

        Elsewhere than in a pool they are freed with the last row that has a place in them, and each
        pass would write hundreds of MB of zeros.
        """
        if self._layout.holds_prefixes:
            return []
        held = self._dummy_rows(1, 1)
        self._layout.reserve(self._rows[held[0]], 1)
        return held

    def _kinds_of_passes(self) -> Iterator[PassKind]:
        """Yields the spans of each pass that is computed at load."""
        rows = self._most_rows()
        for count in self._decode_sizes(rows):
            yield PassKind((1,) * count)
        longest = min(self.context - 1, self.chunk)
        if self._layout.sizes:  # in a pool, of which each row may leave a part of a block unused
            longest = min(longest, (self._layout.blocks - 1) * KV_BLOCK_TOKENS)
        drafts, alone = self._most_drafts, self._layout.follow_lines
        yield from compiled_kinds(self._layout.sizes, rows, longest, drafts, alone)

    def _warm_up_head(self, head: HeadDrafts) -> None:
        """Has the model's head draft for one row, and the row check it."""
        (seq,) = self._dummy_rows(1, 1)
        for _ in range(min(WARM_UP_PASSES, self.context // 4)):  # of four inputs at most
            seq.ids += [one.token for one in self.step([Span(seq, seq.submitted, 1, 1)]).drawn]
            drafts = head.drafts({seq: 1})
            found = self.step([Span.check(seq, drafts.get(seq, (0,)))])
            seq.ids += [one.token for one in found.drawn]
            if self._most_drafts and head.ready(seq):
                most = min(self._most_rows(), self._most_drafts)
                head.compile_ahead(seq, most, len(FIRST_CHANCES))
        self._drop_rows([seq])

    def _most_rows(self) -> int:
        """Returns how many rows a pass has at most."""
        most = self._layout.blocks if self._layout.holds_prefixes else self._max_sequences
        return min(self._max_sequences, most)

    def _warm_up_masks(self, count: int, options: Options | None = None) -> None:
        """Draws tokens of so many rows with masks, and allocates the memory that they are in."""
        rows = self._dummy_rows(count, 1, options)
        given = [self.mask_memory(count) for _ in range(MASK_TABLES)]
        self._mask_tables = [one for one in given if one is not None]
        table = given[0] or new_table(count, words_of_mask(self.vocab_size))
        table.masks[:] = self._whole_mask()
        masks = RowMasks(table, count, {seq: line for line, seq in enumerate(rows)})
        for _ in range(SETS):
            self.forward([Span(seq, 0, 1, draws=1) for seq in rows])
            self.draw(masks)
            self.collect()
            for seq in rows:
                seq.submitted = 0
                self._rows[seq].trim(0)
        self._drop_rows(rows)

    def _whole_mask(self, draws: int = 1) -> Mask:
        """Returns a mask that allows every token in so many draws."""
        return np.full((draws, -(-self.vocab_size // 32)), 2**32 - 1, dtype=np.uint32)

    def _compile_kernels(self, kinds: Iterable[PassKind], on_progress: Callable[[], None]) -> None:
        """Compiles our kernels of passes of these kinds together; computes none of them.

        What was built of a pass stays compiled, so that the warm-up does not build it again.
        """
        LOAD.enter("passes")
        with kernel_cache.collecting() as jobs:
            if self._uploads is not None:
                self._uploads.begin()
            # Elsewhere a pass replaces the arrays of rows, which nothing may compute here.
            in_place = self._layout.holds_prefixes and not self._layout.shares_arrays
            for kind in kinds if in_place else ():
                self._build_pass(kind)
                on_progress()
        LOAD.enter("kernels")
        kernel_cache.compile_together(jobs, on_progress)

    def _build_pass(self, kind: PassKind) -> None:
        """Builds a pass over new rows and its draws, without masks and with; computes nothing."""
        spans = self._dummy_spans(kind)
        if self._uploads is not None:
            self._uploads.begin()
        given = [RowSpan(self._rows[span.sequence], span.count) for span in spans]
        wants = PassSpans.of(spans, rewinds=True)
        wants.widen(given)
        found = self._layout.step(given, *self._inputs(wants), wants.wanted)
        if wants.asking:
            sampled = self._draws.draw(wants.asking, found.logits, None, NO_MASKS)
            self._results(found.logits, sampled, None)
            first = wants.asking[0]
            masks = RowMasks.of({first.sequence: self._whole_mask(first.draws)})
            self._draws.draw(wants.asking, found.logits, None, masks)
            self._draws.forget()  # its arrays are not computed
        self._drop_rows([span.sequence for span in spans])

    def _decode_seconds(self) -> float:
        """Returns the time of a decode step of one row, one after the other as requests have it."""
        (seq,) = self._dummy_rows(1, 1)
        ends = []
        for _ in range(DECODE_STEPS):
            self.submit([Span(seq, seq.submitted, 1, draws=1)])
            if self.in_flight > self._lookahead:
                seq.ids += [drawn.token for drawn in self.collect().drawn]
                ends.append(monotonic())
        while self.in_flight:
            self.collect()
        self._drop_rows([seq])
        return min(end - begin for begin, end in pairwise(ends))

    def _decode_sizes(self, rows: int) -> list[int]:
        """Returns the numbers of rows for which decode passes are warmed."""
        sizes = [size for size in self._layout.sizes if size <= rows]
        return sizes or first_and_last(list(range(1, rows + 1)), on_gpu=device.on_gpu())

    def _warm_up(
        self,
        kind: PassKind,
        on_progress: Callable[[], None],
        options: Options | None = None,
        times: int = WARM_UP_PASSES,
    ) -> None:
        """Computes passes over the first inputs of new rows, then frees the rows."""
        spans = self._dummy_spans(kind, options)
        rows = [span.sequence for span in spans]
        LOAD.count("warm_up_passes", times)
        for _ in range(times):
            self.step(spans)
            for seq in rows:
                seq.submitted = 0
                self._rows[seq].trim(0)
            on_progress()
        self._drop_rows(rows)

    def _dummy_spans(self, kind: PassKind, options: Options | None = None) -> list[Span]:
        """Returns the spans of a pass over new rows."""
        rows = [seq for count in kind.counts for seq in self._dummy_rows(1, count, options)]
        spans = [Span(seq, 0, seq.length, draws=1) for seq in rows]
        if kind.drafts:
            (seq,) = self._dummy_rows(1, 1, options)
            spans.append(Span.check(seq, (0,) * kind.drafts))
        if kind.unread:
            (seq,) = self._dummy_rows(1, kind.unread + 1, options)
            spans.append(Span(seq, 0, kind.unread, draws=0))
        return spans

    def _dummy_rows(
        self, count: int, tokens: int, options: Options | None = None
    ) -> list[Sequence]:
        """Returns sequences of `tokens` tokens, each with an empty row."""
        every = [_dummy_sequence(tokens, options) for _ in range(count)]
        for seq in every:
            self._rows[seq] = self._layout.store.new_row()
        return every

    def _drop_rows(self, rows: Many[Sequence]) -> None:
        for seq in rows:
            self._layout.store.release(self._rows.pop(seq))
            if self._predictions is not None:
                self._predictions.release(seq)


def _dummy_sequence(tokens: int, options: Options | None = None) -> Sequence:
    """Returns a running sequence for warm-up and measurement."""
    return Sequence(
        b"", 0, (0,) * tokens, options or Options(), 0, UNLIMITED_TOKENS, phase=Phase.RUNNING
    )
