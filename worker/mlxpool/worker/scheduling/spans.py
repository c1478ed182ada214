"""A step: the spans of sequences that one pass computes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from msgspec import Struct

from mlxpool.worker.scheduling.sequence import Sequence


# not frozen: that would double the time to make one, and there are many
class Span(Struct):
    """Inputs [start, start + count) of a sequence in one pass.

    `draws`: the logits after so many of the last inputs draw the tokens that follow these: 0, 1, or
    all in a decode step. The input of a decode step may be a token that a pass in flight draws.
    `drafts`: tokens that may follow those of the sequence, as further inputs of its decode step.
    Those that the pass draws as well are right, and the row keeps them. `hidden`: the span draws
    nothing and gives the hidden states of its inputs.
    """

    sequence: Sequence
    start: int
    count: int
    draws: int
    drafts: tuple[int, ...] = ()
    hidden: bool = False

    @classmethod
    def check(cls, sequence: Sequence, drafts: tuple[int, ...]) -> Self:
        """A decode step that checks drafts; no pass in flight may have the sequence."""
        return cls(sequence, sequence.submitted, 1 + len(drafts), 1 + len(drafts), drafts)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        """Whether it is a decode step, not a chunk of a prompt."""
        return self.draws == self.count


class Step(Struct, frozen=True):
    """The spans of one pass: those of `rows` decode steps first, then chunks of prompts.

    A decode step may have several inputs, see Sequence.reads_run.
    `alone`: it reads a prompt that failed before, so no other pass may be in flight with it.
    """

    spans: tuple[Span, ...] = ()
    rows: int = 0
    alone: bool = False

    @property
    def chunks(self) -> list[Span]:
        """The spans that read prompts."""
        return [*self.spans[self.rows :]]


def require_plain(spans: Iterable[Span], engine: str) -> None:
    """Raises ValueError naming what `engine` does not compute: drafts and hidden states."""
    for span in spans:
        if span.drafts or span.hidden:
            what = "check drafts" if span.drafts else "give hidden states"
            raise ValueError(f"{engine} cannot {what}")
