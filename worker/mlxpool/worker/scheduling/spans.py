"""A step: the spans of sequences that one pass computes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from msgspec import Struct

from mlxpool.worker.scheduling.sequence import Sequence


# not frozen, which would double the time to make a span; there are many spans
class Span(Struct):
    """Inputs [start, start + count) of a sequence in one pass.

    `draws`: the number of last inputs whose logits draw a next token: 0, 1 or, in a decode step,
    all. The input of a decode step may be a token that a pass in flight still has to draw.
    `drafts`: proposed next tokens, which are further inputs of the decode step. Drafts are right if
    the pass draws the same tokens; right drafts stay in the KV row. `hidden`: the span draws
    nothing and returns the hidden states of its inputs.
    """

    sequence: Sequence
    start: int
    count: int
    draws: int
    drafts: tuple[int, ...] = ()
    hidden: bool = False

    @classmethod
    def check(cls, sequence: Sequence, drafts: tuple[int, ...]) -> Self:
        """Returns a decode step that checks drafts; no pass in flight may include the sequence."""
        return cls(sequence, sequence.submitted, 1 + len(drafts), 1 + len(drafts), drafts)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        """Whether the span is a decode step, not a chunk of a prompt."""
        return self.draws == self.count


class Step(Struct, frozen=True):
    """The spans of one pass: first `rows` decode steps, then chunks of prompts.

    A decode step may have several inputs, see Sequence.reads_run. `alone`: the step reads a prompt
    that failed before, so no other pass may be in flight.
    """

    spans: tuple[Span, ...] = ()
    rows: int = 0
    alone: bool = False

    @property
    def chunks(self) -> list[Span]:
        """The spans that read prompts."""
        return [*self.spans[self.rows :]]


def require_plain(spans: Iterable[Span], engine: str) -> None:
    """Raises ValueError if spans have drafts or hidden states, which `engine` does not compute."""
    for span in spans:
        if span.drafts or span.hidden:
            what = "check drafts" if span.drafts else "give hidden states"
            raise ValueError(f"{engine} cannot {what}")
