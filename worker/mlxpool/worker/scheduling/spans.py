"""A step: the spans of sequences that one pass computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpool.worker.scheduling.sequence import Sequence


@dataclass(slots=True)  # not frozen: that would double the time to make one, and there are many
class Span:
    """Inputs [start, start + count) of a sequence in one pass.

    `draws`: the logits after the last of them draw the next token. The input of a decode step may
    be a token that a pass in flight draws.
    """

    sequence: Sequence
    start: int
    count: int
    draws: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        """Whether it is the one input of a decode step, not a chunk of a prompt."""
        return self.draws and self.count == 1


@dataclass(frozen=True, slots=True)
class Step:
    """The spans of one pass: `rows` inputs of decode steps first, then chunks of prompts.

    `alone`: it reads a prompt that failed before, so no other pass may be in flight with it.
    """

    spans: tuple[Span, ...] = ()
    rows: int = 0
    alone: bool = False

    @property
    def chunks(self) -> list[Span]:
        """The spans that read prompts."""
        return [*self.spans[self.rows :]]
