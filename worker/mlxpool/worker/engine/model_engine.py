"""The engine of our own model code: computes prefill chunks and decode steps.

On a GPU decode runs one step ahead: step n+1 is started with the tokens of step n before the host
has read these. A sequence that ends or is preempted in between loses its token in flight, and its
row is trimmed to the tokens of the sequence. On the CPU the host waits for nothing, so there is no
lookahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx

from mlxpool.common.options import Options
from mlxpool.worker.attention.dot_product import pairs_in_memory
from mlxpool.worker.attention.layouts import Layout, choose_layout, make_layout
from mlxpool.worker.attention.row_batch import CacheRow, RowSpan
from mlxpool.worker.attention.row_cache import RowShape
from mlxpool.worker.engine.description import require_deterministic
from mlxpool.worker.engine.engine import PrefillShare
from mlxpool.worker.engine.row_engine import MIN_BLOCKS, PrefillChunk, RowEngine
from mlxpool.worker.kernels import device
from mlxpool.worker.prefix import cache as prefix_cache
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import (
    ALL_OPTIONS,
    Rows,
    SamplingBatch,
    StepOutput,
    last_token,
    penalty_history,
    sampled_tokens,
    select_rows,
)
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, activation_bytes, blocks_for
from mlxpool.worker.scheduling.scheduler import pair_budget
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.weights.load import LoadedModel

CLEAR_INTERVAL = 256  # decode steps after which freed buffers are given back
CPU_WARM_UP_CHUNKS = (64, 256)  # tokens of the chunks that are measured at load
GPU_WARM_UP_CHUNKS = (256, 1024)  # the same; above paged_runner.CHUNK_WIDTHS


class ModelEngine(RowEngine[CacheRow]):
    """The Engine of a loaded model; used by one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        text: ChatTokenizer | TokenTable | None = None,
        *,
        context: int | None = None,
        prefix: str = "tree",
        prefix_bytes: int = 0,
        lookahead: bool | None = None,
        layout: str | None = None,
        max_sequences: int = 8,
        limit: int = 0,
        blocks: int | None = None,
    ) -> None:
        """Makes an engine; `context` bounds the context length of the model.

        `lookahead` None: only on a GPU. `layout` None: the best one, see layouts.choose_layout.
        `limit` bounds the bytes of the process, see device.memory_limit. `blocks` None: as many as
        the limit leaves. `prefix_bytes` 0: a quarter of what the weights leave of the limit.
        """
        folder = loaded.folder
        super().__init__(
            folder,
            text,
            weights=loaded.weight_bytes,
            context=context,
            prefix_bytes=prefix_bytes,
            max_sequences=max_sequences,
            limit=limit,
            blocks=blocks,
        )
        if loaded.deterministic:
            require_deterministic(folder, on_gpu=device.on_gpu())
        self._loaded = loaded
        self._model = loaded.model
        shape = RowShape(folder.plan.caches, loaded.dtype, self.context, self.chunk)
        name, shape = choose_layout(
            layout, shape, deterministic=loaded.deterministic, on_gpu=device.on_gpu()
        )
        self._set_row_sizes(shape)
        if layout is None and shape.keeps_all and shape.has_windows and not self._holds_a_context():
            # Rows keep only the tokens inside a window, so more sequences fit.
            name, shape = "rows", replace(shape, keeps_all=False)
            self._set_row_sizes(shape)
        pairs = pair_budget(self.chunk)
        self._pairs = pairs if loaded.deterministic else pairs_in_memory(shape, pairs)
        self._layout_request = name, shape, prefix
        self._layout, self._prefix = self._make_layout()
        self._spare = self._layout.spare
        self.blocks = self._capacity()
        self._lookahead = device.on_gpu() if lookahead is None else lookahead
        self._in_flight: StepOutput | None = None
        self._prefill_logits: dict[Sequence, mx.array] = {}  # [1, V] that a last chunk gave
        self._last_batch: tuple[list[Sequence], SamplingBatch] | None = None
        self._steps = 0

    def _set_row_sizes(self, shape: RowShape) -> None:
        self._block_bytes = KV_BLOCK_TOKENS * max(shape.token_bytes, 1)
        self._row_bytes = shape.fixed_bytes

    def _holds_a_context(self) -> bool:
        return (self._fixed_blocks or self._blocks_in_budget()) >= blocks_for(self.context)

    @property
    def layout(self) -> str:
        """See Engine.layout."""
        return self._layout.name

    def _make_layout(self, blocks: int | None = None) -> tuple[Layout, PrefixCache[CacheRow]]:
        """Makes the layout and its prefix cache.

        A pool has `blocks`; None: enough for all sequences and prefixes, if the memory suffices.
        """
        name, shape, prefix = self._layout_request
        if blocks is None:
            prefixes = 0 if prefix == "off" else self._prefix_bytes // self._block_bytes
            most = self._max_sequences * blocks_for(self.context) + prefixes
            blocks = (
                self._fixed_blocks
                if self._fixed_blocks is not None
                else min(most, self._blocks_in_budget())
            )
        layout = make_layout(
            name,
            shape,
            self._model,
            max(blocks, MIN_BLOCKS),
            deterministic=self._loaded.deterministic,
            on_gpu=device.on_gpu(),
        )
        return layout, prefix_cache.make_prefix_cache(prefix, layout.store, self._prefix_bytes)

    def _compute(self, row: CacheRow, ids: list[int]) -> None:
        tokens = mx.array(ids, dtype=mx.int32)
        self._layout.forward([RowSpan(row, len(ids))], tokens, logits=False)
        mx.eval(row.arrays())

    def _prefill_last(self, seq: Sequence, row: CacheRow, ids: list[int]) -> bool:
        logits = self._layout.prefill_last(row, mx.array(ids, dtype=mx.int32))
        if logits is None:
            return False
        mx.eval(logits, *row.arrays())
        self._prefill_logits[seq] = logits
        return True

    def prefill_batch_size(self, shares: Many[PrefillShare]) -> int:
        """See Engine.prefill_batch_size."""
        spans = []
        for seq, budget in shares[: self._layout.max_batch_rows]:
            row = self._rows[seq]
            if seq.prefill_alone or row.offset < seq.prefilled:
                break  # it is prefilled alone, so that its failure concerns no other sequence
            spans.append(RowSpan(row, self._chunk(seq, budget).tokens))
        return max(1, self._layout.batch_size(spans))

    def _prefilled(self, chunks: Many[PrefillChunk[CacheRow]]) -> None:
        if len(chunks) < 2:
            super()._prefilled(chunks)
            return
        parts = [
            (one.row, one.seq.token_range(one.start, one.start + one.tokens)) for one in chunks
        ]
        last = [number for number, chunk in enumerate(chunks) if chunk.is_last]
        logits = self._layout.prefill_rows(parts, last)
        mx.eval(logits, *chunks[0].row.arrays())  # all rows share the pool's arrays
        for row, number in enumerate(last):
            self._prefill_logits[chunks[number].seq] = logits[row : row + 1]

    def decode(self, rows: Many[Sequence]) -> list[SampledToken]:
        """See Engine.decode. Raises SequenceFailed when logits are not numbers."""
        with self._discard_on_failure(rows):
            outputs = self._outputs_for(rows)
            self._in_flight = self._start_next_step(outputs, rows) if self._lookahead else None
            for output, _ in outputs:
                mx.eval(*output.sampled.arrays())
        self._clear_buffers()
        found = [
            one for output, rows_of in outputs for one in sampled_tokens(output.sampled, rows_of)
        ]
        if len(outputs) == 1:
            return found
        by_sequence = {one.sequence: one for one in found}
        return [by_sequence[seq] for seq in rows]

    def release(self, seq: Sequence) -> None:
        """See Engine.release."""
        self._last_batch = None
        self._prefill_logits.pop(seq, None)
        if self._in_flight is not None:
            self._in_flight = self._in_flight.without(seq)
        row = self._rows.get(seq)
        if row is not None:
            # The row may hold a token in flight. A preempted sequence starts again with its last
            # token, so a recurrent state must not include that one.
            row.trim(seq.length - 1 if self._layout.store.stateful else seq.length)
        super().release(seq)

    def _bytes_left(self) -> int:
        return self._layout.left(self._rows.values(), self.blocks * self._block_bytes)

    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """See Engine.warm_up. Also measures the activation memory of a prefill chunk."""
        sizes = [
            min(n, self.context - 3)
            for n in (GPU_WARM_UP_CHUNKS if device.on_gpu() else CPU_WARM_UP_CHUNKS)
        ]
        if device.on_gpu():  # above this limit MLX waits for steps in flight
            mx.set_memory_limit(self._limit)
        pooled = self._layout.holds_prefixes and self._fixed_blocks is None
        if pooled:  # a small pool leaves memory for the measurement
            self._remake_layout(blocks_for(sizes[-1] + 3))
        small, large = map(self._measure_chunk, sizes)
        on_progress()
        self._activation_bytes = activation_bytes(small, large, self.chunk, self._pairs)
        if pooled:
            self._remake_layout()
            self._require_min_blocks()
        self._warm_up_decode(on_progress)
        self._layout.compile_ahead(self._max_sequences, self.context, on_progress)
        self._finish_warm_up()

    def _remake_layout(self, blocks: int | None = None) -> None:
        self._layout.close()
        mx.clear_cache()
        self._layout, self._prefix = self._make_layout(blocks)
        self.blocks = self._capacity()

    def _measure_chunk(self, size: int) -> tuple[int, int]:
        """Computes a chunk of `size` tokens; returns `size` and the bytes of its activations."""
        seq = _dummy_sequence(max(size, 1) + 2)  # so that the chunk is not its last
        row = self._rows[seq] = self._layout.store.new_row()
        self._layout.reserve(row, seq.length)  # the row's memory is not activation memory
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self.prefill(seq, size)
        peak = mx.get_peak_memory() - before
        self._layout.store.release(self._rows.pop(seq))
        return size, peak

    def _warm_up_decode(self, on_progress: Callable[[], None]) -> None:
        """Computes a decode step of each batch size that fits, and one with every option."""
        most = self._layout.blocks if self._layout.holds_prefixes else self._max_sequences
        plain = [_dummy_sequence(1) for _ in range(min(self._max_sequences, most))]
        for rows in ([_dummy_sequence(1, ALL_OPTIONS)], plain):
            for seq in rows:
                self._rows[seq] = self._layout.store.new_row()
            for width in range(1, len(rows) + 1):
                self.decode(rows[:width])
                on_progress()
            for seq in rows:
                self._layout.store.release(self._rows.pop(seq))
            self._in_flight = None

    def _capacity(self) -> int:
        if self._fixed_blocks is not None:
            return self._fixed_blocks
        blocks = self._blocks_in_budget()
        return min(blocks, self._layout.blocks) if self._layout.holds_prefixes else blocks

    @property
    def yields_cores(self) -> bool:
        """See Engine.yields_cores."""
        return super().yields_cores and not self._loaded.deterministic

    def step_in_flight(self) -> bool:
        """See Engine.step_in_flight."""
        return self._in_flight is not None

    def close(self) -> None:
        """See Engine.close."""
        self._in_flight = None
        self._prefill_logits.clear()
        super().close()

    def _decode_logits(self, rows: Many[Sequence], ids: mx.array) -> mx.array:
        """Returns logits [R, vocabulary] after one token `ids` [R] of each sequence."""
        return self._layout.decode([self._rows[seq] for seq in rows], ids)

    @contextmanager
    def _discard_on_failure(self, hit: Many[Sequence]) -> Iterator[None]:
        """See RowEngine. Where rows share arrays, a failed pass damages all of them.

        Sequences that were not in the pass find their tokens lost at their next step.
        """
        try:
            yield
        except Exception:
            self._in_flight = None
            for seq in list(self._rows) if self._layout.shares_arrays else hit:
                self._rows[seq].release()
                self._prefill_logits.pop(seq, None)
            if self._layout.shares_arrays and self._layout.holds_prefixes:
                self._prefix.clear()
            self._layout.invalidate()
            raise

    def _outputs_for(self, rows: Many[Sequence]) -> list[tuple[StepOutput, Rows]]:
        """Returns the outputs that have the next tokens of these sequences.

        A token is in the step in flight, or is sampled from the logits of a last prefill chunk, or
        needs a new step.
        """
        here = {} if self._in_flight is None else self._in_flight.next_tokens(rows)
        used = [(self._in_flight, here)] if self._in_flight is not None and here else []
        if len(here) == len(rows):
            return used
        prefilled = [seq for seq in rows if seq in self._prefill_logits and seq not in here]
        if prefilled:
            logits = mx.concatenate([self._prefill_logits.pop(seq) for seq in prefilled])
            used.append(self._sample(prefilled, logits, ahead=0).all_rows())
        fresh = [seq for seq in rows if seq not in here and seq not in prefilled]
        if fresh:
            used.append(self._step(fresh).all_rows())
        return used

    def _step(self, rows: Many[Sequence]) -> StepOutput:
        """Builds a decode step from the newest tokens that the host has."""
        for seq in rows:
            self._rows[seq].trim(seq.length - 1)  # drops a token in flight that was never read
            assert self._rows[seq].offset == seq.length - 1, "decode before prefill was done"
        ids = mx.array([last_token(seq) for seq in rows], dtype=mx.int32)
        return self._sample(rows, self._decode_logits(rows, ids), ahead=0)

    def _start_next_step(
        self, outputs: Many[tuple[StepOutput, Rows]], rows: Many[Sequence]
    ) -> StepOutput | None:
        """Starts the step after `outputs` on the device, without sequences that certainly end."""
        going = {seq for seq in rows if self._continues(seq)}
        order: list[Sequence] = []
        parts: list[mx.array] = []
        for output, rows_of in outputs:
            here = [seq for seq in rows_of if seq in going]
            if here:
                order += here
                parts.append(select_rows(output.sampled.tokens, [rows_of[seq] for seq in here]))
        if not order:
            return None
        ids = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        logits = self._decode_logits(order, ids)
        ahead = self._sample(order, logits, ahead=1, pending=ids)
        mx.async_eval(*ahead.sampled.arrays())  # type: ignore[no-untyped-call]
        return ahead

    def _continues(self, seq: Sequence) -> bool:
        """Returns whether a token may follow the one that is being sampled."""
        made = len(seq.ids) + 1
        return made < seq.max_tokens and len(seq.prompt) + made < self.context

    def _sample(
        self, rows: Many[Sequence], logits: mx.array, *, ahead: int, pending: mx.array | None = None
    ) -> StepOutput:
        batch = self._sampling_batch(rows)
        positions = [len(seq.ids) + ahead for seq in rows] if batch.any_random else ()
        histories = list(map(penalty_history, rows)) if batch.any_penalties else ()
        sampled = sampler.sample_batch(logits, batch, positions, histories, pending)
        lengths = tuple([seq.length + ahead for seq in rows])
        return StepOutput(dict(zip(rows, range(len(rows)), strict=True)), lengths, sampled)

    def _sampling_batch(self, rows: Many[Sequence]) -> SamplingBatch:
        """Returns the batch of the last step while it has the same sequences."""
        if self._last_batch is None or self._last_batch[0] != rows:
            options, seeds = [seq.options for seq in rows], [seq.seed for seq in rows]
            self._last_batch = list(rows), SamplingBatch(options, seeds, self.vocab_size)
        return self._last_batch[1]

    def _clear_buffers(self) -> None:
        """Frees MLX's cached buffers periodically, and on a CPU the C heap: some 4 ms.

        Compiled passes that were dropped leave holes in the heap. Arrays of rows, which otherwise
        have pages of their own, would be allocated there, and the heap would grow for later passes.
        """
        self._steps += 1
        if self._steps % CLEAR_INTERVAL == 0:
            mx.clear_cache()
            if not device.on_gpu():
                device.trim_heap()


def _dummy_sequence(tokens: int, options: Options | None = None) -> Sequence:
    """Returns a sequence for warm-up and measurement."""
    return Sequence(b"", 0, (0,) * tokens, options or Options(), 0, 1)
