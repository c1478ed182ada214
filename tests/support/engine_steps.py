"""Computes an engine's forward passes without the compute thread of a worker.

Tokens are appended to their sequences when they are collected.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from mlxpool.worker.engine.engine import Engine, StepResult
from mlxpool.worker.scheduling.scheduler import longest_chunk, schedule
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span


def chunk_of(engine: Engine, seq: Sequence, tokens: int | None = None) -> Span | None:
    """Returns the next prefill chunk of a prompt, at most `tokens` long; None after the last one.

    A chunk ends before the last input, which the decode step reads, and at restore points if the
    engine needs them.
    """
    limits = engine.limits
    most = min(seq.unread - 1, limits.lines, longest_chunk(seq.submitted, limits.pairs))
    most = most if tokens is None else min(most, tokens)
    if most <= 0:
        return None
    return Span(seq, seq.submitted, engine.clip(seq, most), draws=0)


def read_chunk(engine: Engine, seq: Sequence, tokens: int | None = None) -> int:
    """Computes the next chunk of a prompt in a separate pass; returns its length, 0 at the end.

    Passes that are in flight are collected as well.
    """
    span = chunk_of(engine, seq, tokens)
    if span is None:
        return 0
    engine.submit([span])
    drain(engine)
    return span.count


def read(engine: Engine, seq: Sequence, tokens: int | None = None) -> list[int]:
    """Prefills a prompt up to the input of its decode step; returns the length of each chunk."""
    tokens_of_chunks: list[int] = []
    while count := read_chunk(engine, seq, tokens):
        tokens_of_chunks.append(count)
    return tokens_of_chunks


def enter(engine: Engine, seq: Sequence, tokens: int | None = None) -> list[int]:
    """Admits a sequence and prefills its prompt; returns the length of each chunk."""
    engine.admit(seq)
    return read(engine, seq, tokens)


def decode(engine: Engine, rows: Many[Sequence], steps: int = 1) -> list[SampledToken]:
    """Decodes until each row has `steps` more tokens; returns all generated tokens.

    If the engine works ahead, one more pass over the rows that may continue stays in flight.
    Earlier passes in flight may contain other sequences, which get their tokens, too. Raises the
    first SequenceFailed.
    """
    target = {seq: len(seq.ids) + steps for seq in rows}
    ahead = engine.limits.ahead
    drawn: list[SampledToken] = []
    while behind := [seq for seq in rows if len(seq.ids) + seq.awaited < target[seq]]:
        drawn += _submit(engine, behind, ahead)
    if ahead:
        drawn += _submit(engine, [seq for seq in rows if may_continue(engine, seq)], ahead)
    while any(len(seq.ids) < target[seq] for seq in rows):
        drawn += collect(engine).drawn
    return drawn


def step(engine: Engine, spans: Iterable[Span]) -> list[SampledToken]:
    """Computes one forward pass; returns its tokens, without appending them to sequences.

    No other pass may be in flight. If sequences fail, raises the first failure.
    """
    assert not engine.in_flight
    engine.submit(list(spans))
    result = engine.collect()
    for failure in result.failed:
        raise failure
    return result.drawn


def decode_spans(rows: Iterable[Sequence]) -> list[Span]:
    """Returns the spans of a decode step."""
    return [Span(seq, seq.submitted, 1, draws=1) for seq in rows]


def may_continue(engine: Engine, seq: Sequence) -> bool:
    """Returns whether a sequence may generate a token after the tokens in flight."""
    count = len(seq.ids) + seq.awaited
    return count < seq.max_tokens and len(seq.prompt) + count < engine.context


def collect(engine: Engine) -> StepResult:
    """Collects the oldest pass in flight and appends its tokens. Raises its first failure."""
    result = engine.collect()
    for token in result.drawn:
        token.sequence.ids.append(token.token)
    for failure in result.failed:
        raise failure
    return result


def drain(engine: Engine) -> list[SampledToken]:
    """Collects all passes in flight."""
    drawn: list[SampledToken] = []
    while engine.in_flight:
        drawn += collect(engine).drawn
    return drawn


def _submit(engine: Engine, rows: Many[Sequence], ahead: int) -> list[SampledToken]:
    """Submits a decode step; then collects passes until at most `ahead` passes are in flight.

    Returns the tokens of the collected passes.
    """
    if rows:
        engine.submit(decode_spans(rows))
    drawn: list[SampledToken] = []
    while engine.in_flight > ahead:
        drawn += collect(engine).drawn
    return drawn


class ScheduledSteps:
    """Runs the steps that the scheduler chooses, as the compute thread does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.live: list[Sequence] = []

    def admit(self, seq: Sequence) -> None:
        """Admits a sequence into the batch."""
        self.engine.admit(seq)
        seq.phase = Phase.RUNNING
        if seq not in self.live:
            self.live.append(seq)

    def step(self) -> list[SampledToken]:
        """Submits the next step; collects the oldest pass if too many are in flight."""
        limits = self.engine.limits
        chosen = schedule(self.live, limits, self.engine.cost.seconds, self.engine.clip)
        assert not (chosen.alone and self.engine.in_flight)
        if chosen.spans:
            self.engine.submit(chosen.spans)
        if not self.engine.in_flight or (chosen.spans and self.engine.in_flight <= limits.ahead):
            return []
        return collect(self.engine).drawn

    def preempt(self, seq: Sequence) -> None:
        """Preempts a sequence, which may be admitted again."""
        self.engine.release(seq)
        seq.preempt()

    def leave(self, seq: Sequence) -> None:
        """Ends a sequence."""
        self.engine.release(seq)
        seq.phase = Phase.FINISHED
        self.live.remove(seq)
