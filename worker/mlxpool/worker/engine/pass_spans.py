"""The spans of a pass, by their results: a token, tokens of checked drafts, or hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import Self

from msgspec import Struct

from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import Load


class PassSpans(Struct, frozen=True):
    """The spans of one pass, grouped by the results that they need; `every` has all spans.

    `chunks`: the spans that read prompts. `checks`: the spans with drafts. `drawing`: the indices
    of the spans that draw tokens; spans that draw several tokens come last. `hidden`: the indices
    of the spans that give hidden states. `first_rows`: the first row of logits of each sequence
    that draws.

    In a plain pass, each sequence has one input without an image and draws one token. `sequences`:
    the sequences of a plain pass; empty for other passes. `again`: the previous pass was a plain
    pass over the same sequences, in the same order.
    """

    every: Many[Span]
    chunks: list[Span]
    checks: tuple[Span, ...]
    drawing: list[int]
    hidden: list[int]
    first_rows: dict[Sequence, int]
    sequences: list[Sequence]
    again: bool = False

    @classmethod
    def of(cls, spans: Many[Span], *, rewinds: bool, before: PassSpans | None = None) -> Self:
        """Groups spans by the results that they need.

        `rewinds`: rows can be trimmed by any number of tokens. `before`: the spans of the previous
        pass. Raises ValueError for a span that cannot be computed.
        """
        # Most spans are single inputs that draw a token, and need nothing more.
        plain = [
            span.sequence
            for span in spans
            if span.count == 1 and span.draws == 1 and not span.sequence.media
        ]
        if len(plain) == len(spans):
            if before is not None and before.sequences == plain:
                drawing, rows = before.drawing, before.first_rows
                return cls(spans, [], (), drawing, [], rows, before.sequences, again=True)
            rows = {sequence: row for row, sequence in enumerate(plain)}
            return cls(spans, [], (), list(range(len(spans))), [], rows, plain)
        others = [span for span in spans if span.count > 1 or not span.draws]
        for span in others:
            _require_possible(span, rewinds=rewinds)
        chunks = [span for span in others if not span.decodes]
        checks = tuple(span for span in others if span.drafts)
        drawing = [number for number, span in enumerate(spans) if span.draws]
        if checks:
            drawing.sort(key=lambda number: spans[number].draws)
        hidden = [number for number, span in enumerate(spans) if span.hidden] if chunks else []
        asking = [spans[number] for number in drawing]
        return cls(spans, chunks, checks, drawing, hidden, _first_rows(asking), [])

    @property
    def wanted(self) -> list[int]:
        """The indices of the spans with results, in the order that layouts expect."""
        return [*self.drawing, *self.hidden] if self.hidden else self.drawing

    @property
    def asking(self) -> Many[Span]:
        """The spans that draw tokens."""
        if self.sequences:
            return self.every
        return [self.every[number] for number in self.drawing]

    @property
    def load(self) -> Load:
        """The load of the pass."""
        if not self.sequences:
            return Load.of(self.every)
        rows = len(self.every)
        return Load(rows, sum([span.start for span in self.every]) + rows, 0, rows)

    def widen(self, rows: Many[RowSpan]) -> None:
        """Sets how many tokens of each row get logits, and which rows give hidden states."""
        if not self.checks and not self.hidden:
            return
        for row, span in zip(rows, self.every, strict=True):
            row.lines = span.count if span.hidden else max(1, span.draws)
            row.hidden = span.hidden

    def embedded(self) -> tuple[tuple[Span, int], ...]:
        """Returns the spans that give hidden states, with the number of each span's first state."""
        spans = [self.every[number] for number in self.hidden]
        firsts = accumulate((span.count for span in spans), initial=0)
        return tuple(zip(spans, firsts, strict=False))


def _first_rows(drawing: Many[Span]) -> dict[Sequence, int]:
    firsts = accumulate((span.draws for span in drawing), initial=0)
    return {span.sequence: first for span, first in zip(drawing, firsts, strict=False)}


def _require_possible(span: Span, *, rewinds: bool) -> None:
    drafts, awaited = len(span.drafts), span.sequence.awaited
    if span.draws != (1 + drafts if drafts else min(span.draws, 1)):
        raise ValueError(f"a span of {drafts} drafts draws {span.draws} tokens")
    if span.draws and span.hidden:
        raise ValueError("a span draws tokens or gives hidden states, not both")
    if not drafts:
        return
    if span.count != span.draws or awaited:
        raise ValueError(
            f"{drafts} drafts have {span.count} inputs and {awaited} tokens in flight; "
            "a check has one input more than drafts, and none in flight"
        )
    if not rewinds:
        raise ValueError("drafts cannot be checked: windows and states cannot go back")
