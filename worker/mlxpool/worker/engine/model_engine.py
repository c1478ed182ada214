"""The engine of our own model code: one pass a step over decode rows and prompt chunks.

On a GPU a pass may be submitted while one is in flight: it takes the tokens that the other draws
from the device, before the host has read them. A sequence that ends or is preempted in between
loses its token in flight, and its row is trimmed to the tokens of the sequence. On the CPU the host
waits for nothing, so no pass is submitted ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from time import monotonic
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.attention.dot_product import pairs_in_memory
from mlxpool.worker.attention.layouts import Layout, choose_layout, make_layout
from mlxpool.worker.attention.prediction_rows import MAX_WAITING, Predictions
from mlxpool.worker.attention.row_batch import CacheRow, Ids, RowSpan
from mlxpool.worker.attention.row_cache import RowCache, RowShape
from mlxpool.worker.attention.row_states import separate, settle
from mlxpool.worker.caches.specs import ROLLBACK_STEPS
from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.constraints.mask_table import MaskTable, words_of_mask
from mlxpool.worker.engine.description import require_deterministic
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.engine.image_encoder import ImageEncoder
from mlxpool.worker.engine.image_spans import add_images
from mlxpool.worker.engine.kv_kinds import no_int8_kernels, require_kv
from mlxpool.worker.engine.pass_spans import PassSpans
from mlxpool.worker.engine.prompt_logprobs import prompt_logprobs
from mlxpool.worker.engine.row_engine import MIN_BLOCKS, Flight
from mlxpool.worker.engine.token_draws import TokenDraws
from mlxpool.worker.engine.warm_up import WarmedEngine
from mlxpool.worker.kernels import device, matmul_tiled
from mlxpool.worker.layers.model_plan import PredictingModel
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey, is_slot
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.modes import make_prefix_cache
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.sampling.batch import SamplerOutput, last_token
from mlxpool.worker.sampling.row_masks import NO_MASKS, RowMasks
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.scheduling.scheduler import StepLimits, pair_budget
from mlxpool.worker.scheduling.sequence import (
    PromptLogprobs,
    SampledToken,
    Sequence,
    SequenceFailed,
)
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import StepTarget
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.speculation.mtp import Predictor
from mlxpool.worker.transfers import downloads
from mlxpool.worker.transfers.downloads import Download, Downloads
from mlxpool.worker.transfers.uploads import SharedTable, Uploads, upload_copy
from mlxpool.worker.weights.load import LoadedModel

MAX_STATE_DRAFTS = 3  # that a row checks, where it has a state behind each
CLEAR_INTERVAL = 256  # passes after which freed buffers are given back
ROWS_STAY = (
    "its layers have states or windows here, and rows with these cannot give up wrong drafts"
)
OTHER_BITS = "deterministic is true: log-probabilities of drafts differ in their last bits"
NO_TOKEN = 0  # in place of an input that has no embedding: of an image, features replace it


class ModelEngine(WarmedEngine):
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
        step_target: float = 0.0,
        batch: int = 0,
        kv: str = AUTO,
        by_owner: bool = False,
        draft: DraftEngine | None = None,
    ) -> None:
        """Makes an engine; `context` bounds the context length of the model.

        `lookahead` None: only on a GPU. `layout` None: the best one, see layouts.choose_layout.
        `limit` bounds the bytes of the process, see device.memory_limit. `blocks` None: as many as
        the limit leaves. `prefix_bytes` 0: a quarter of what the weights leave of the limit.
        `step_target`: seconds of a pass while sequences decode; 0: the warm-up chooses it.
        `batch` bounds the tokens of a pass, see device.prefill_chunk. `kv`: what rows store, see
        caches/stored.py. `by_owner`: sequences find only the prefixes that sequences of their owner
        left. `draft`: the draft model, for whose memory room is left; it is warmed up and closed
        with this engine.
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
            batch=batch,
            kv=kv,
            by_owner=by_owner,
        )
        self.draft = draft
        require_kv(kv, folder)
        if loaded.deterministic:
            require_deterministic(folder, on_gpu=device.on_gpu())
        self._loaded = loaded
        self._model, self._dtype = loaded.model, loaded.dtype
        shape = RowShape(folder.plan.caches, loaded.dtype, self.context, self.chunk, kv=kv)
        name, shape = choose_layout(
            layout, shape, deterministic=loaded.deterministic, on_gpu=device.on_gpu()
        )
        self._predictions = self._make_predictions(shape)
        self._set_row_sizes(shape)
        integers = shape.quantised and device.on_gpu()  # of which kernels read those of pools
        windows = shape.keeps_all and shape.has_windows and not integers
        if layout is None and windows and not self._holds_a_context():
            # Rows keep only the tokens inside a window, so more sequences fit.
            name, shape = "rows", replace(shape, keeps_all=False)
            self._set_row_sizes(shape)
        pairs = pair_budget(self.chunk)
        self._pairs = pairs if loaded.deterministic else pairs_in_memory(shape, pairs)
        shared = name == "pool" and downloads.works()
        self._uploads = Uploads() if shared else None
        self._downloads = Downloads() if shared else None
        self._upload = self._uploads or upload_copy
        self._layout_request = name, shape, prefix
        self._layout, self._prefix = self._make_layout()
        if shape.quantised and device.on_gpu() and not self._layout.reads_int8:
            raise ModelLoadFailed(no_int8_kernels(folder, cuda=device.on_cuda()))
        if self._layout.sizes:  # attention of compiled passes keeps no scores
            self.chunk = min(self.chunk, self._layout.sizes[-1])
            self._pairs = self.chunk**2
        self._spare = self._layout.spare + self._waiting_bytes()
        self.blocks.capacity = self._capacity()
        self._lookahead = device.on_gpu() if lookahead is None else lookahead
        self._draws_alone = self._layout.store.stateful
        self._target = StepTarget.of_device(on_gpu=device.on_gpu())
        if step_target:
            self._target = StepTarget(step_target, step_target)
        self._step_seconds = self._target.most
        self._image_encoder = None if folder.vision is None else ImageEncoder(loaded)
        self._slot_token = NO_TOKEN
        if folder.vision is not None and folder.vision.plan.crossed:
            (self._slot_token,) = folder.vision.plan.tokens
        self._draws = TokenDraws(self.vocab_size, self._upload)
        self._mask_tables: list[MaskTable] = []  # that are allocated, and nobody has
        self._spans_before: PassSpans | None = None  # of the newest pass; None: rows have left
        self._rows_before: list[RowSpan] = []  # of that pass
        self._steps = 0

    def _make_predictions(self, shape: RowShape) -> Predictions | None:
        """Makes the drafts of the model's own head; None where it is not loaded."""
        cache = self._loaded.folder.plan.prediction_cache
        if cache is None:
            return None
        own = RowShape((cache,), shape.dtype, shape.capacity, shape.chunk)
        self._head_block_bytes = KV_BLOCK_TOKENS * own.token_bytes
        return Predictions(cast(PredictingModel, self._model).prediction, own)

    def _waiting_bytes(self) -> int:
        """Returns the bytes of states that wait for the head at most."""
        if self._predictions is None:
            return 0
        width = self._loaded.folder.plan.shapes["model.norm.weight"][0]
        return MAX_WAITING * self._max_sequences * width * self._loaded.dtype.size

    def _set_row_sizes(self, shape: RowShape) -> None:
        self._block_bytes = KV_BLOCK_TOKENS * max(shape.token_bytes, 1)
        self._row_bytes = shape.fixed_bytes
        if self._predictions is not None:  # the states behind drafts that are checked
            self._row_bytes += MAX_STATE_DRAFTS * shape.state_bytes
            if device.on_gpu():  # those of the step before stay as well, see StateSlice
                self._row_bytes += (1 + MAX_STATE_DRAFTS - ROLLBACK_STEPS) * shape.state_bytes

    def _holds_a_context(self) -> bool:
        return (self._fixed_blocks or self._blocks_in_budget()) >= blocks_for(self.context)

    @property
    def layout(self) -> str:
        """See Engine.layout."""
        name, kv = self._layout.name, self._layout_request[1].kv
        return name if kv == AUTO else f"{name}, {kv}"

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
        layout = self._new_layout(name, shape, max(blocks, MIN_BLOCKS))
        budget, by_owner = self._prefix_bytes, self._by_owner
        return layout, make_prefix_cache(prefix, layout.store, budget, by_owner=by_owner)

    @property
    def _store(self) -> Any:
        return self._layout.store

    def _kept_rules(self) -> dict[str, Any]:
        _, shape, _ = self._layout_request
        return {
            "layout": self._layout.name,
            "kv": shape.kv,
            "dtype": str(shape.dtype),
            "caches": [str(cache) for cache in shape.caches],
            "deterministic": self._loaded.deterministic,
        }

    def _new_layout(self, name: str, shape: RowShape, blocks: int) -> Layout:
        """Makes the layout of this name; a pool has `blocks` blocks."""
        return make_layout(
            name,
            shape,
            self._model,
            blocks,
            rows=self._max_sequences,
            deterministic=self._loaded.deterministic,
            on_gpu=device.on_gpu(),
            uploads=self._uploads,
            images=self._loaded.folder.vision is not None,
            keeps_states=self._predictions is not None,
        )

    @property
    def no_drafts(self) -> str:
        """See Engine.no_drafts."""
        if self._loaded.deterministic:
            return OTHER_BITS
        return "" if self._rows_go_back else ROWS_STAY

    @property
    def _rows_go_back(self) -> bool:
        """Whether rows can give up drafts that were checked.

        With a head they have the states behind few drafts, see RowCache.put_states.
        """
        return not self._layout.store.stateful or self._predictions is not None

    @property
    def predictor(self) -> Predictor | None:
        """See Engine.predictor."""
        return self._predictions

    @property
    def limits(self) -> StepLimits:
        """See Engine.limits."""
        return StepLimits(
            lines=self.chunk,
            pairs=pair_budget(self.batch),
            context=self.context,
            seconds=self._step_seconds,
            ahead=int(self._lookahead),
            sizes=self._layout.sizes,
            run_lines=matmul_tiled.MAX_TOKENS if self._layout.sizes else 0,
            drafts=MAX_STATE_DRAFTS if self._layout.store.stateful else 0,
        )

    def submit(self, spans: Many[Span]) -> bool:
        """See Engine.submit."""
        return self._start(spans, at_once=True)

    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        """See Engine.forward."""
        return self._start(spans, at_once=False, built=built)

    def draw(self, masks: RowMasks) -> None:
        """See Engine.draw."""
        flight = self._flights[-1]
        assert flight.undrawn is not None, "the newest pass has drawn its tokens"
        asking, logits = flight.undrawn
        before = self._flights[-2] if len(self._flights) > 1 else None
        with self._discard_on_failure():
            sampled = self._draws.draw(asking, logits, before, masks) if asking else None
            done, download = self._results(logits, sampled, flight.hidden, flight.states)
            mx.async_eval(*done)  # type: ignore[no-untyped-call]
        self._flights[-1] = replace(
            flight, undrawn=None, sampled=sampled, done=done, download=download
        )

    def mask_memory(self, lines: int) -> MaskTable | None:
        """See Engine.mask_memory."""
        if self._uploads is None:
            return None
        for place, table in enumerate(self._mask_tables):
            if len(table.words) >= lines:
                return self._mask_tables.pop(place)
        lines = max(lines, self._most_rows())
        shared = SharedTable(lines, words_of_mask(self.vocab_size))
        return MaskTable(shared.lines, shared)

    def drawn(self) -> list[SampledToken] | None:
        """See Engine.drawn."""
        return self._flights[0].drawn() if self._flights else None

    def withdraw(self, seq: Sequence, *, again: bool) -> None:
        """See Engine.withdraw."""
        flight = self._flights[-1]
        assert flight.undrawn is not None, "the newest pass has drawn its tokens"
        self._flights[-1] = flight.without(seq)
        span = next(one for one in flight.spans if one.sequence is seq)
        seq.awaited -= span.draws
        if again or span.drafts:
            seq.submitted = span.end - (span.draws if again else len(span.drafts))
            self._rows[seq].trim(seq.submitted)

    def _start(
        self, spans: Many[Span], *, at_once: bool, built: Callable[[], None] = lambda: None
    ) -> bool:
        """Starts one pass; unless it draws its tokens at once, its logits wait for `draw`."""
        began = monotonic()
        newest = self._flights[-1] if self._flights else None
        assert newest is None or newest.undrawn is None, "`draw` comes before the next pass"
        wants = PassSpans.of(spans, rewinds=self._rows_go_back, before=self._spans_before)
        with self._discard_on_failure(spans):
            if self._uploads is not None:
                self._uploads.begin()
            rows = self._row_spans(wants)
            self._free_states(wants, rows)
            keep = [span for span in wants.chunks if self._at_restore_point(span)]
            reads = any(not span.sequence.reads_run for span in wants.chunks)
            fresh = self._layout.is_new(rows, wants.wanted)
            found = self._layout.step(rows, *self._inputs(wants), wants.wanted)
            head: Many[mx.array] = ()  # what its head keeps of the pass
            if self._predictions is not None and found.states is not None:
                head = self._predictions.take(wants.every, found.states)
            asking, sampled = wants.asking, None
            embedded = wants.embedded() if wants.hidden else ()
            reports = bool(embedded) and all(span.sequence.reports for span, _ in embedded)
            states, hidden = (found.hidden, None) if reports else (None, found.hidden)
            if at_once and asking:
                sampled = self._draws.draw(asking, found.logits, newest, NO_MASKS)
            done, download = self._results(
                found.logits, sampled, hidden if at_once else None, states
            )
            built()
            mx.async_eval(*done, *head)  # type: ignore[no-untyped-call]
            self._submitted(spans, keep)
        self._spans_before, self._rows_before = wants, rows
        self._flights.append(
            Flight(
                tuple(spans),
                wants.first_rows,
                sampled,
                done,
                began,
                fresh,
                download,
                reads=reads,
                checks=wants.checks,
                hidden=hidden,
                embedded=embedded,
                undrawn=None if at_once else (asking, found.logits),
                states=states,
                load=wants.load,
            )
        )
        return fresh

    def _row_spans(self, wants: PassSpans) -> list[RowSpan]:
        """Returns the spans of rows, which are as long as the spans of the pass expect.

        They are the same list while the same sequences decode in the same rows.
        """
        if wants.again and self._rows_before:
            rows = self._rows_before
        else:
            held = self._rows
            rows = [RowSpan(held[span.sequence], span.count) for span in wants.every]
        offsets, starts = [row.row.offset for row in rows], [span.start for span in wants.every]
        assert offsets == starts, f"rows of {offsets} tokens, spans at {starts}"
        if wants.sequences:
            return rows
        wants.widen(rows)
        vision = self._loaded.folder.vision
        for row, span in zip(rows, wants.every, strict=True):
            if span.sequence.media:
                assert vision is not None, "only models that read images get some"
                add_images(row, span, vision, self.encoded)
        return rows

    def _free_states(self, wants: PassSpans, rows: list[RowSpan]) -> None:
        """Lets arrays of recurrent states be freed that no row of the next pass needs.

        What rows hold at most is in `_set_row_sizes`.
        """
        if wants.again or not self._layout.store.stateful:
            return
        going = [one.row for one in rows if isinstance(one.row, RowCache)]
        if self._predictions is not None and not self._flights:
            settle(going)
        inside = {span.sequence for span in wants.every}
        idle = [
            row
            for seq, row in self._rows.items()
            if seq not in inside
            and isinstance(row, RowCache)
            # A row whose last token is in flight leaves soon.
            and len(seq.ids) + seq.awaited < seq.max_tokens
        ]
        found = separate(idle, going)
        if found:
            mx.async_eval(*found)  # type: ignore[no-untyped-call]

    def _results(
        self,
        logits: mx.array,
        sampled: SamplerOutput | None,
        hidden: mx.array | None,
        states: mx.array | None = None,
    ) -> tuple[tuple[mx.array, ...], Download | None]:
        """Returns the arrays whose evaluation ends a pass, and the download of its results."""
        results = [] if sampled is None else sampled.arrays()
        if hidden is not None:
            results.append(hidden)
        kept = () if states is None else (states,)
        if self._downloads is None or not results:
            return (*results, *kept) or (logits,), None
        download = self._downloads.begin(results)
        return (*download.done, *kept), download

    def collect(self) -> StepResult:
        """See Engine.collect."""
        assert self._flights[0].undrawn is None, "`draw` comes before `collect`"
        with self._discard_on_failure():
            self._flights[0].wait()
            finished = monotonic()
            prompts, failed = self._prompt_logprobs(self._flights[0])
        flight = self._flights.popleft()
        self._collected(flight, finished)
        if prompts:
            self._last_end = monotonic()  # the next pass has waited until now
        self._clear_buffers(after_chunk=flight.reads)
        for seq in flight.rows:
            seq.awaited -= 1
        found = flight.result()
        if prompts or failed:
            found = replace(found, prompts=tuple(prompts), failed=[*found.failed, *failed])
        if flight.checks:
            self._rewind(flight.checks, found)
        return found

    def _prompt_logprobs(self, flight: Flight) -> tuple[list[PromptLogprobs], list[SequenceFailed]]:
        """Returns what a pass that has ended reports of prompts."""
        if flight.states is None:
            return [], []
        states = flight.states.astype(self._loaded.dtype)  # as they were: weights keep theirs
        return prompt_logprobs(flight.embedded, states, self._logits_of, self.vocab_size)

    def _logits_of(self, hidden: mx.array) -> mx.array:
        """Returns logits [n, vocabulary] of hidden states [n, d], outside of a pass."""
        return self._model.logits_of(hidden)

    def _rewind(self, checks: Many[Span], found: StepResult) -> None:
        """Removes wrong drafts from the rows: a row keeps as many inputs as tokens were drawn."""
        kept = Counter(one.sequence for one in found.drawn)
        for span in checks:
            seq = span.sequence
            seq.awaited -= len(span.drafts)
            seq.submitted = span.start + max(1, kept[seq])
            self._rows[seq].trim(seq.submitted)

    def _inputs(self, wants: PassSpans) -> tuple[Ids, mx.array | None]:
        """Returns the ids [T] of the spans, and the tokens in flight that negative ids stand for.

        -1 - r is the token of row r of the newest pass in flight.
        """
        newest = self._flights[-1] if self._flights else None
        drawn = None if newest is None or newest.sampled is None else newest.sampled.tokens
        if wants.again and newest is not None and newest.rows is wants.first_rows:
            return np.arange(-1, -1 - len(wants.every), -1, dtype=np.int32), drawn
        ids: list[int] = []
        for span in wants.every:
            seq = span.sequence
            if span.start >= seq.length:
                assert newest is not None
                ids.append(-1 - newest.rows[seq])
            elif span.end == seq.length and span.count == 1 and not seq.media:
                ids.append(last_token(seq))
            else:
                inputs, slot = seq.token_range(span.start, span.end), self._slot_token
                ids += [slot if is_slot(one) else one for one in inputs] if seq.media else inputs
                ids += span.drafts
        return ids, drawn

    def release(self, seq: Sequence) -> None:
        """See Engine.release."""
        self._draws.forget()
        self._spans_before = None
        self._forget_predictions([seq])
        row = self._rows.get(seq)
        if row is not None:
            # The row may hold a token in flight. A preempted sequence starts again with its last
            # token, so a recurrent state must not include that one.
            row.trim(seq.length - 1 if self._layout.store.stateful else seq.length)
        super().release(seq)

    def _forget_predictions(self, rows: Collection[Sequence]) -> None:
        if self._predictions is not None:
            for seq in rows:
                self._predictions.release(seq)

    def rewind(self, seq: Sequence, count: int) -> bool:
        """See Engine.rewind."""
        if self._layout.store.stateful or seq.awaited:
            return False
        self._draws.forget()
        self._rows[seq].trim(count)
        seq.submitted = count
        return True

    def blocks_in_use(self) -> int:
        """See BlockMemory."""
        free = self._layout.free_blocks
        return super().blocks_in_use() if free is None else self._layout.blocks - free

    def blocks_of(self, seq: Sequence) -> int:
        """See BlockMemory."""
        row = self._rows.get(seq)
        return 0 if row is None else self._layout.blocks_of(row)

    def _kv_bytes(self) -> tuple[int, int]:
        used, free = self._layout.kv_bytes(self._rows.values())
        return used + (self._predictions.nbytes if self._predictions is not None else 0), free

    def _bytes_left(self) -> int:
        return self._layout.left(self._rows.values(), self.blocks.capacity * self._block_bytes)

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        """See Engine.encode."""
        if self._image_encoder is None:
            return super().encode(image, pinned)
        features = self._image_encoder(image)
        mx.eval(features)
        self.encoded.put(image.key, features, pinned)

    def _capacity(self) -> int:
        if self._fixed_blocks is not None:
            return self._fixed_blocks
        blocks = self._blocks_in_budget()
        return min(blocks, self._layout.blocks) if self._layout.holds_prefixes else blocks

    @property
    def yields_cores(self) -> bool:
        """See Engine.yields_cores."""
        return super().yields_cores and not self._loaded.deterministic

    @contextmanager
    def _discard_on_failure(self, spans: Many[Span] = ()) -> Iterator[None]:
        """Wraps a pass over these spans; one that fails empties the rows of all passes in flight.

        Where rows share arrays it damages all of them, see `lost`.
        """
        try:
            yield
        except Exception:
            every = chain(spans, *(flight.spans for flight in self._flights))
            hit = {span.sequence for span in every} & self._rows.keys()
            self._flights.clear()
            self._draws.forget()
            self._spans_before = None
            lost = list(self._rows) if self._layout.shares_arrays else hit
            self._forget_predictions(lost)
            for seq in lost:
                self._rows[seq].release()
            if self._layout.shares_arrays and self._layout.holds_prefixes:
                self._prefix.clear()
            self._layout.invalidate()
            raise

    def _clear_buffers(self, *, after_chunk: bool) -> None:
        """Frees MLX's cached buffers and the C heap periodically on a CPU: some 4 ms.

        Compiled passes that were dropped leave holes in the heap. Arrays of rows, which otherwise
        have pages of their own, would be allocated there, and the heap would grow for later passes.
        """
        if device.on_gpu():
            return
        self._steps += 1
        periodic = self._steps % CLEAR_INTERVAL == 0
        if periodic or after_chunk:
            mx.clear_cache()
        if periodic:
            device.trim_heap()
