"""One sequence: what a request is inside a worker. No I/O, no MLX, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from mlxpool.common.options import Options


class Phase(Enum):
    """Where a sequence stands; it only moves forward."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """Compared by identity: the same request may come twice, in two attempts.

    `prompt` is never empty. `ids` is the completion so far, beginning with the ids of earlier
    attempts when the sequence is a resume. `max_tokens` counts over all attempts.
    """

    id: bytes
    attempt: int
    prompt: tuple[int, ...]
    options: Options
    seed: int
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    prefilled: int = 0  # leading tokens of `tokens` whose keys and values are in the cache
    cached: int = 0  # of these, found in the prefix cache at admission

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion so far."""
        return [*self.prompt, *self.ids]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one drawn token (float32, from raw logits) and its rivals."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token drawn for one sequence by a decode step."""

    sequence: Sequence
    token: int
    logprob: Logprob | None = None


class RowFailed(Exception):
    """A step failed for one sequence alone; the others of that step lost nothing."""

    def __init__(self, sequence: Sequence, message: str) -> None:
        super().__init__(message)
        self.sequence = sequence
