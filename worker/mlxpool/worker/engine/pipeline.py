"""The passes of an engine in flight: inputs, forward, draw, results.

On a GPU a pass may be submitted while another pass is in flight. The new pass then reads, on the
device, the tokens that the other pass draws, before the host knows these tokens. A sequence that
ends or is preempted in between loses its token in flight, and its row is trimmed to the tokens of
the sequence. A CPU gains nothing from this, so no pass is submitted ahead on a CPU.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import chain
from time import monotonic
from typing import cast

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from mlxpool.common.errors import PoolError
from mlxpool.worker.attention.prediction_heads.head_drafts import StateDrafts
from mlxpool.worker.attention.prediction_heads.prediction_rows import Predictions
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.row_spans import CacheRow, Ids, RowSpan
from mlxpool.worker.attention.row_states import keep_alone, separate, settle
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.engine.flight import Flight, PassTimes
from mlxpool.worker.engine.image_spans import add_images
from mlxpool.worker.engine.opening import NO_TOKEN, Parts
from mlxpool.worker.engine.pass_spans import PassSpans
from mlxpool.worker.engine.prompt_logprobs import prompt_logprobs
from mlxpool.worker.engine.rows import Rows
from mlxpool.worker.engine.token_draws import TokenDraws
from mlxpool.worker.kernels import device
from mlxpool.worker.media.spans import is_slot
from mlxpool.worker.sampling.batch import SamplerOutput, last_token
from mlxpool.worker.sampling.row_masks import NO_MASKS, Mask, RowMasks
from mlxpool.worker.scheduling.sequence import (
    PromptLogprobs,
    SampledToken,
    Sequence,
    SequenceFailed,
)
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.transfers.downloads import Download

log = logging.getLogger("mlxpool.worker")

CLEAR_INTERVAL = 256  # passes after which MLX's freed buffers are released


class Pipeline:
    """Builds, starts and collects the passes of an engine, over the rows in its memory.

    Implements PassQueue.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        draws: TokenDraws | None = None,
        embedding_rows: int = 0,
        clears_buffers: bool = True,
    ) -> None:
        """`draws`: draws the tokens; if it is None, a TokenDraws does.

        `clears_buffers`: the buffers that MLX caches are freed at intervals, see `_clear_buffers`.

        `embedding_rows`: the number of tokens that have an embedding; NO_TOKEN replaces other
        tokens; 0: every token has an embedding.
        """
        self._parts, self._memory = parts, parts.memory
        stateful = parts.memory.layout.store.stateful
        self.rows: Rows[CacheRow] = Rows(parts.memory, draws_alone=stateful)
        self._rewinds = parts.rows_go_back
        self._draws = draws or TokenDraws(parts.vocab_size, parts.upload)
        self._logits_of = parts.devices.logits_of(parts.loaded.model)
        self.times = PassTimes()
        self.flights: deque[Flight] = deque()
        self._spans_before: PassSpans | None = None  # of the newest pass; None: rows were released
        self._held_before: list[RowSpan] | None = None  # rows of the newest pass
        self._embedding_rows, self._slot_token = embedding_rows, parts.slot_token
        self._clears_buffers = clears_buffers
        self._steps = 0

    def start(
        self, spans: Many[Span], *, at_once: bool, built: Callable[[], None] = lambda: None
    ) -> bool:
        """Builds and starts one pass; see Passes. Returns True if the pass may compile something.

        `at_once`: the pass draws its tokens without a call of `draw`. `built` is called after the
        pass is built, before it starts.
        """
        began = monotonic()
        newest = self.flights[-1] if self.flights else None
        assert newest is None or newest.undrawn is None, "`draw` comes before the next pass"
        wants = PassSpans.of(spans, rewinds=self._rewinds, before=self._spans_before)
        with self.discard_on_failure(spans):
            if self._parts.uploads is not None:
                self._parts.uploads.begin()
            rows = self._row_spans(wants)
            self._free_states(wants, rows)
            keep = [span for span in wants.chunks if self.rows.at_restore_point(span)]
            reads = any(not span.sequence.reads_run for span in wants.chunks)
            notice = self._memory.layout.notice
            notice.given = False
            if self._memory.layout.is_new(rows, wants.wanted):
                notice()
            output = self._memory.layout.step(rows, *self._inputs(wants), wants.wanted)
            head: Many[mx.array] = ()  # the pass's arrays that the model's draft head keeps
            asking, sampled = wants.asking, None
            if isinstance(self._parts.predictions, Predictions) and output.states is not None:
                head = self._parts.predictions.take(wants.every, output.states)
            elif isinstance(self._parts.predictions, StateDrafts) and output.drawn is not None:
                self._parts.predictions.take(asking, output.drawn, again=wants.again)
                head = [output.drawn]
            embedded = wants.embedded() if wants.hidden else ()
            reports = bool(embedded) and all(span.sequence.reports for span, _ in embedded)
            states, hidden = (output.hidden, None) if reports else (None, output.hidden)
            if at_once and asking:
                sampled = self._draws.draw(asking, output.logits, newest, NO_MASKS)
            done, download = self._results(
                output.logits, sampled, hidden if at_once else None, states
            )
            built()
            mx.async_eval(*done, *head)  # type: ignore[no-untyped-call]
            self.rows.submitted(spans, keep)
            fresh = notice.given
        self._spans_before, self._held_before = wants, rows
        if fresh:  # the passes in flight are awaited only after this compilation
            self.flights = deque(replace(flight, fresh=True) for flight in self.flights)
        self.flights.append(
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
                undrawn=None if at_once else (asking, output.logits),
                states=states,
                load=wants.load,
            )
        )
        return fresh

    def draw(self, masks: RowMasks) -> None:
        """Draws the tokens of the newest pass, which `forward` started; see Engine."""
        flight = self.flights[-1]
        assert flight.undrawn is not None, "the newest pass has drawn its tokens"
        asking, logits = flight.undrawn
        before = self.flights[-2] if len(self.flights) > 1 else None
        with self.discard_on_failure():
            sampled = self._draws.draw(asking, logits, before, masks) if asking else None
            done, download = self._results(logits, sampled, flight.hidden, flight.states)
            mx.async_eval(*done)  # type: ignore[no-untyped-call]
        self.flights[-1] = replace(
            flight, undrawn=None, sampled=sampled, done=done, download=download
        )

    def drawn(self) -> list[SampledToken] | None:
        """Returns the tokens of the oldest pass in flight, if already known; see Engine."""
        return self.flights[0].drawn() if self.flights else None

    def withdraw(self, seq: Sequence, *, again: bool) -> None:
        """Takes a sequence out of the newest pass before the draw; see Engine."""
        flight = self.flights[-1]
        assert flight.undrawn is not None, "the newest pass has drawn its tokens"
        self.flights[-1] = flight.without(seq)
        span = next(other for other in flight.spans if other.sequence is seq)
        seq.awaited -= span.draws
        if again or span.drafts:
            seq.submitted = span.end - (span.draws if again else len(span.drafts))
            self._memory.rows[seq].trim(seq.submitted)

    def _row_spans(self, wants: PassSpans) -> list[RowSpan]:
        """Returns the spans of the pass's rows, and asserts that the rows have the right lengths.

        Returns the same list while the same sequences decode in the same rows.
        """
        if wants.again and self._held_before:
            rows = self._held_before
        else:
            held = self._memory.rows
            rows = [RowSpan(held[span.sequence], span.count) for span in wants.every]
        offsets, starts = [row.row.offset for row in rows], [span.start for span in wants.every]
        assert offsets == starts, f"rows of {offsets} tokens, spans at {starts}"
        if wants.sequences:
            return rows
        wants.widen(rows)
        vision = self._parts.loaded.folder.vision
        for row, span in zip(rows, wants.every, strict=True):
            if span.sequence.media:
                assert vision is not None, "only models that read images get some"
                add_images(row, span, vision, self._memory.encoded)
        return rows

    def _free_states(self, wants: PassSpans, rows: list[RowSpan]) -> None:
        """Moves the recurrent states of rows that are not in the next pass into separate arrays.

        Then the arrays that these rows shared with rows of the pass can be freed.
        """
        if wants.again or not self._memory.layout.store.stateful:
            return
        going = [span.row for span in rows if isinstance(span.row, RowCache)]
        if self._parts.predictions is not None and not self.flights:
            settle(going)
        inside = {span.sequence for span in wants.every}
        idle = [
            row
            for seq, row in self._memory.rows.items()
            if seq not in inside
            and isinstance(row, RowCache)
            # A row whose last token is in flight will soon be released.
            and len(seq.ids) + seq.awaited < seq.max_tokens
        ]
        if idle and (copies := separate(idle, going)):
            mx.async_eval(*copies)  # type: ignore[no-untyped-call]

    def _results(
        self,
        logits: mx.array,
        sampled: SamplerOutput | None,
        hidden: mx.array | None,
        states: mx.array | None = None,
    ) -> tuple[tuple[mx.array, ...], Download | None]:
        """Returns the arrays whose evaluation ends a pass, and the download of its results.

        The download is None if results are read from MLX's arrays.
        """
        results = [] if sampled is None else sampled.arrays()
        if hidden is not None:
            results.append(hidden)
        kept = () if states is None else (states,)
        if self._parts.downloads is None or not results:
            return (*results, *kept) or (logits,), None
        download = self._parts.downloads.begin(results)
        return (*download.done, *kept), download

    def collect(self) -> StepResult:
        """Waits for the oldest pass in flight; see Engine."""
        flight = self.flights[0]
        assert flight.undrawn is None, "`draw` comes before `collect`"
        with self.discard_on_failure(flight.spans):  # also if reading the results fails
            flight.wait()
            finished = monotonic()
            prompts, failed = self._prompt_logprobs(flight)
            self.flights.popleft()
            if not self.flights:
                self._memory.layout.evaluated()
            self.times.ended(flight, finished)
            if prompts:
                self.times.last_end = monotonic()  # the next pass could not begin before
            self._clear_buffers(after_chunk=flight.reads)
            for seq in flight.rows:
                seq.awaited -= 1
            result = flight.result()
            if prompts or failed:
                result = replace(result, prompts=tuple(prompts), failed=[*result.failed, *failed])
            if flight.checks:
                self._rewind(flight.checks, result)
        return result

    def _prompt_logprobs(self, flight: Flight) -> tuple[list[PromptLogprobs], list[SequenceFailed]]:
        """Returns the prompt log-probabilities that an ended pass reports, and failed sequences."""
        if flight.states is None:
            return [], []
        states = flight.states.astype(self._parts.loaded.dtype)  # back to the dtype of the weights
        return prompt_logprobs(flight.embedded, states, self._logits_of, self._parts.vocab_size)

    def _rewind(self, checks: Many[Span], result: StepResult) -> None:
        """Removes wrong drafts from the rows: a row keeps one input for each token that it drew."""
        kept = Counter(token.sequence for token in result.drawn)
        for span in checks:
            seq = span.sequence
            seq.awaited -= len(span.drafts)
            seq.submitted = span.start + max(1, kept[seq])
            self._memory.rows[seq].trim(seq.submitted)

    def _inputs(self, wants: PassSpans) -> tuple[Ids, mx.array | None]:
        """Returns the ids [T] of the spans, and the tokens in flight to which negative ids refer.

        The id -1 - r means the token of row r of the newest pass in flight. The tokens are None if
        no pass in flight has drawn tokens.
        """
        newest = self.flights[-1] if self.flights else None
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
                ids += (
                    [slot if is_slot(token) else token for token in inputs] if seq.media else inputs
                )
                ids += span.drafts
        if self._embedding_rows:
            ids = [token if token < self._embedding_rows else NO_TOKEN for token in ids]
        return ids, drawn

    def release(self, seq: Sequence) -> None:
        """Frees row and blocks of a sequence in any phase; see Engine."""
        self._draws.forget()
        self._spans_before = None
        self._forget_predictions([seq])
        self.flights = deque(flight.without(seq) for flight in self.flights)
        row = self._memory.rows.get(seq)
        if row is not None:
            # The row may hold a token in flight. A preempted sequence starts again with its last
            # token, so a recurrent state must not include that token.
            stateful = self._memory.layout.store.stateful
            row.trim(seq.length - 1 if stateful else seq.length)
            may_stay = self._memory.prefix.exclusive and isinstance(row, RowCache)
            if may_stay and (copies := keep_alone(cast(RowCache, row))):
                mx.async_eval(*copies)  # type: ignore[no-untyped-call]
        self.rows.release(seq)

    def rehearse(self, spans: Many[Span], mask: Mask) -> None:
        """Builds a pass, a draw without masks, and a draw with `mask`; computes nothing.

        The arrays of this pass must never be evaluated. The caller drops its rows afterwards.
        """
        if self._parts.uploads is not None:
            self._parts.uploads.begin()
        rows = self._memory.rows
        row_spans = [RowSpan(rows[span.sequence], span.count) for span in spans]
        wants = PassSpans.of(spans, rewinds=True)
        wants.widen(row_spans)
        output = self._memory.layout.step(row_spans, *self._inputs(wants), wants.wanted)
        if wants.asking:
            sampled = self._draws.draw(wants.asking, output.logits, None, NO_MASKS)
            self._results(output.logits, sampled, None)
            first = wants.asking[0]
            masks = RowMasks.of({first.sequence: mask[: first.draws]})
            self._draws.draw(wants.asking, output.logits, None, masks)
            self._draws.forget()  # the arrays of these draws are not computed

    def _forget_predictions(self, rows: Collection[Sequence]) -> None:
        if self._parts.predictions is not None:
            for seq in rows:
                self._parts.predictions.release(seq)

    def rewind(self, seq: Sequence, count: int) -> bool:
        """Trims a running sequence's row to its first `count` inputs; see Engine."""
        if self._memory.layout.store.stateful or seq.awaited:
            return False
        self._draws.forget()
        self._memory.rows[seq].trim(count)
        seq.submitted = count
        return True

    @contextmanager
    def discard_on_failure(self, spans: Many[Span] = ()) -> Iterator[None]:
        """A context in which a failure empties the rows of `spans` and of all passes in flight.

        If rows share arrays, a failure empties all rows. After a failure, `lost` returns True for
        each sequence that has lost inputs.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, PoolError):  # the device works
                self._await_flights()
            all_spans = chain(spans, *(flight.spans for flight in self.flights))
            hit = {span.sequence for span in all_spans} & self._memory.rows.keys()
            self.flights.clear()
            self._draws.forget()
            self._spans_before = None
            lost = list(self._memory.rows) if self._memory.layout.shares_arrays else hit
            self._forget_predictions(lost)
            for seq in lost:
                self._memory.rows[seq].release()
            if self._memory.layout.shares_arrays and self._memory.layout.holds_prefixes:
                self._memory.prefix.clear()
            self._memory.layout.invalidate()
            raise

    def _await_flights(self) -> None:
        """Waits for discarded passes, because they read memory that the next passes write."""
        for flight in self.flights:
            try:
                flight.wait()
            except Exception as error:
                log.warning("a pass in flight failed", exc_info=error)
                return

    def _clear_buffers(self, *, after_chunk: bool) -> None:
        """Frees MLX's cached buffers and the C heap periodically on a CPU, in about 4 ms.

        Dropped compiled passes leave holes in the heap. Arrays of rows, which otherwise have their
        own pages, would be allocated in these holes, and the heap would grow for later passes.
        """
        if not self._clears_buffers or device.on_gpu():
            return
        self._steps += 1
        periodic = self._steps % CLEAR_INTERVAL == 0
        if periodic or after_chunk:
            mx.clear_cache()
        if periodic:
            device.trim_heap()
