"""One sequence: what a request is inside a worker. No I/O, no MLX, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from mlxpool.common.options import Options


class Phase(Enum):
    """Where a sequence stands; it moves forward, or back to WAITING when it is preempted."""

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
    blocks: int = 0  # of memory that it may use, see blocks.py; 0 without a row
    promised: int = 0  # blocks it may grow to once it is alone, see blocks.py
    preempted: bool = False  # it had a row and gave it back
    suspect: bool = False  # a pass that it was in failed, or a worker: its prompt is read alone
    restore_at: int = 0  # tokens before the generation prompt, where a later one may go on

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion so far; a new list each time."""
        return [*self.prompt, *self.ids]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    def between(self, start: int, end: int) -> list[int]:
        """`tokens[start:end]`, at the cost of what is asked for; `end` not above `length`."""
        size = len(self.prompt)
        return [*self.prompt[start:end], *self.ids[max(start - size, 0) : max(end - size, 0)]]

    def send_back(self) -> None:
        """It has no row any more and waits for another."""
        self.phase = Phase.WAITING
        self.prefilled = self.blocks = 0

    def preempt(self) -> None:
        """The same, because others need the memory."""
        self.send_back()
        self.preempted = True


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
