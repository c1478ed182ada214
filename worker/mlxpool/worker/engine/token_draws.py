"""Draws the tokens of passes: one for each decode row, several if the row checks drafts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from mlxpool.worker.constraints.mask_table import ANY, words_of_mask
from mlxpool.worker.engine.flight import Flight
from mlxpool.worker.engine.prompt_logprobs import lines_at_a_time
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import (
    NO_TOKEN,
    SamplerOutput,
    SamplingBatch,
    TokenMasks,
    penalty_history,
)
from mlxpool.worker.sampling.row_masks import RowMasks
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.transfers.uploads import Upload, upload_table


class TokenDraws:
    """Draws tokens from logits; keeps the options of a batch while its sequences are the same."""

    def __init__(self, vocab_size: int, upload: Upload) -> None:
        self._vocab_size = vocab_size
        self._upload = upload
        self._last: tuple[list[Sequence], SamplingBatch] | None = None

    def forget(self) -> None:
        """Drops the batch of the last draw; called if a sequence leaves or arrays may be lost."""
        self._last = None

    def draw(
        self,
        spans: Many[Span],
        logits: mx.array,
        before: Flight | None,
        masks: RowMasks,
    ) -> SamplerOutput:
        """Returns the tokens [E] that spans draw from logits [E, vocabulary].

        The tokens of one span are consecutive. `before` is the pass in flight before the pass of
        the spans. Engine.draw explains the masks.
        """
        if logits.shape[0] > len(spans):
            return self._draw_lines(spans, logits, before, masks)
        rows = [span.sequence for span in spans]
        batch = self._batch(rows)
        token_masks = self._masks(spans, masks)
        positions: Many[int] = ()  # the numbers of the drawn tokens in their completions
        if batch.any_random:
            positions = [  # as in `_position`, without a call for each row of each step
                seq.discarded - len(seq.prompt) + span.start + span.count
                for span, seq in zip(spans, rows, strict=True)
            ]
        if not batch.any_penalties:
            return sampler.sample_batch(logits, batch, positions, (), None, (), token_masks)
        # Tokens of a withdrawn sequence may already be known.
        awaited = [max(0, span.end - span.sequence.length) for span in spans]
        histories = list(map(penalty_history, rows, awaited))
        pending = self._pending(rows, before)
        return sampler.sample_batch(
            logits, batch, positions, histories, pending, awaited, token_masks
        )

    def _draw_lines(
        self,
        spans: Many[Span],
        logits: mx.array,
        before: Flight | None,
        masks: RowMasks,
    ) -> SamplerOutput:
        """Draws as `draw` does; some of the spans draw several tokens.

        Token i of a span is drawn as if the span's first i drafts were in the completion. Draws
        take several times the memory of their logits, so the draws of many tokens are divided into
        parts.
        """
        batch = self._batch([span.sequence for span in spans for _ in range(span.draws)])
        most = lines_at_a_time(self._vocab_size)
        if logits.shape[0] <= most:
            return self._draw_part(spans, logits, batch, before, masks)
        parts: list[SamplerOutput] = []
        for some, first, end in _parts(spans, most):
            lines = logits[first:end]
            if parts:  # the next part begins when the previous part's memory is free
                (lines,) = mx.depends([lines], parts[-1].arrays())
            parts.append(self._draw_part(some, lines, batch.part(first, end), before, masks))
        return SamplerOutput.joined(parts)

    def _draw_part(
        self,
        spans: Many[Span],
        logits: mx.array,
        batch: SamplingBatch,
        before: Flight | None,
        masks: RowMasks,
    ) -> SamplerOutput:
        """Returns the tokens that spans draw from their logits, with the options in `batch`."""
        token_masks = self._masks(spans, masks)
        positions: Many[int] = ()
        if batch.any_random:
            firsts = [(_position(span) - span.draws + 1, span.draws) for span in spans]
            positions = [number for first, n in firsts for number in range(first, first + n)]
        if not batch.any_penalties:
            return sampler.sample_batch(logits, batch, positions, (), None, (), token_masks)
        lines = [(span, line) for span in spans for line in range(span.draws)]
        awaited = [s.end - s.sequence.length if not s.drafts else 0 for s, _ in lines]
        histories = [
            [*penalty_history(span.sequence, between + line), *span.drafts[:line]]
            for (span, line), between in zip(lines, awaited, strict=True)
        ]
        pending = self._pending([span.sequence for span, _ in lines], before)
        return sampler.sample_batch(
            logits, batch, positions, histories, pending, awaited, token_masks
        )

    def _batch(self, rows: list[Sequence]) -> SamplingBatch:
        """Returns the batch of the last draw while it has the same sequences."""
        if self._last is None or self._last[0] != rows:
            options, seeds = [seq.options for seq in rows], [seq.seed for seq in rows]
            scored = [seq.scored for seq in rows]
            batch = SamplingBatch(options, seeds, self._vocab_size, self._upload, scored)
            self._last = rows, batch
        return self._last[1]

    def _pending(self, rows: Many[Sequence], before: Flight | None) -> mx.array | None:
        """Returns the tokens [E] in flight of these sequences; None: no tokens are in flight.

        The token is -1 for a sequence without a token in flight.
        """
        if before is None or before.sampled is None:
            return None
        places = self._upload(np.array([before.rows.get(seq, -1) for seq in rows], dtype=np.int32))
        drawn = sampler.columns(before.sampled.tokens[None], mx.maximum(places, 0)[None])[0]
        return mx.where(places >= 0, drawn, NO_TOKEN)

    def _masks(self, spans: Many[Span], masks: RowMasks) -> TokenMasks | None:
        """Returns the masks of the tokens that may be drawn; None: every token may be drawn."""
        if masks.table is None:
            return None
        first = [masks.lines.get(span.sequence, ANY) for span in spans]
        draws = sum([span.draws for span in spans])
        if draws > len(spans):
            first = [
                line + further if line >= 0 else line
                for line, span in zip(first, spans, strict=True)
                for further in range(span.draws)
            ]
        words, width = masks.table.words, words_of_mask(self._vocab_size)
        shared = masks.table.shared if words.shape[1] == width else None
        table = words[: masks.used, :width]
        numbers = upload_table(self._upload, np.array(first, dtype=np.int32), table, shared)
        return TokenMasks(numbers, len(first))


def _parts(spans: Many[Span], most: int) -> Iterator[tuple[list[Span], int, int]]:
    """Yields groups of spans, each with its range [first, end) of draws.

    A group has at most `most` draws, or only one span.
    """
    part: list[Span] = []
    first = end = 0
    for span in spans:
        if part and end + span.draws - first > most:
            yield part, first, end
            part, first = [], end
        part.append(span)
        end += span.draws
    yield part, first, end


def _position(span: Span) -> int:
    """Returns the index (from 0) in the completion of the token that the last input draws."""
    seq = span.sequence
    return span.start + span.count + seq.discarded - len(seq.prompt)
