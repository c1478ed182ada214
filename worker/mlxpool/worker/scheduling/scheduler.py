"""Chooses the sequences of the next step: admissions, chunks, decode rows, preemptions. Pure.

Every function takes the sequences in the order of their arrival.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import isqrt

from mlxpool.worker.scheduling.kv_blocks import blocks_for_step
from mlxpool.worker.scheduling.sequence import Phase, Sequence

FULL_CHUNK_CONTEXT = 2048  # tokens of context up to which a chunk has its full length
MAX_STREAM_PAUSE = 0.2  # seconds that a chunk may delay the streams that run
MIN_CHUNK = 64  # tokens; a smaller chunk costs more than it saves
_RUNNING = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: prefill chunks first, then one token for each decoding sequence."""

    prefill: tuple[tuple[Sequence, int], ...]  # with the tokens of its chunk; 0: it is prefilled
    decode: tuple[Sequence, ...]


def plan_step(live: Many[Sequence], budget: int, pairs: int) -> StepPlan:
    """Returns the next step.

    `budget` prompt tokens are shared by all sequences: the oldest takes what it can use, the next
    what is left. `pairs` bounds the query-key pairs of the chunks, so that chunks get shorter as
    contexts get longer, see `longest_chunk`.
    """
    prefill = []
    for sequence in live:
        if sequence.phase is Phase.PREFILL and budget > 0:
            # Decode computes the last token, so a prompt that is fully cached needs no chunk.
            left = max(0, sequence.length - 1 - sequence.prefilled)
            share = min(left, budget, longest_chunk(sequence.prefilled, pairs))
            if left and not share:
                break
            prefill.append((sequence, share))
            budget -= share
            pairs -= share * (sequence.prefilled + share)
            if share < left:
                break
    decode = tuple(s for s in live if s.phase is Phase.DECODE)
    return StepPlan(tuple(prefill), decode)


def pair_budget(chunk: int) -> int:
    """Returns the query-key pairs that a step may have; `chunk`: the engine's chunk size."""
    return chunk * FULL_CHUNK_CONTEXT


def longest_chunk(start: int, pairs: int) -> int:
    """Returns the tokens of the longest chunk at `start` that has at most `pairs` query-key pairs.

    While `pairs` is positive it is at least MIN_CHUNK, so that every context progresses.
    """
    if pairs <= 0:
        return 0
    return max(MIN_CHUNK, (isqrt(start * start + 4 * pairs) - start) // 2)


def prefill_budget(chunk: int, streams: bool, token_seconds: float) -> int:
    """Returns the prompt tokens of one step: `chunk`, or fewer while `streams` run.

    While streams run a chunk takes MAX_STREAM_PAUSE at most. `token_seconds` is the usual time of
    a prompt token; 0: unknown.
    """
    if not streams or token_seconds <= 0:
        return chunk
    return min(chunk, max(MIN_CHUNK, int(MAX_STREAM_PAUSE / token_seconds)))


def next_admissions(live: Many[Sequence], slots: int) -> list[Sequence]:
    """Returns the waiting sequences to admit next, at most one for each free slot.

    Preempted sequences come first.
    """
    free = max(0, slots - len(running(live)))
    order = [s for s in live if s.phase is Phase.WAITING]
    return sorted(order, key=lambda s: not s.preempted)[:free]


def running(live: Many[Sequence]) -> list[Sequence]:
    """Returns the sequences that have a row."""
    return [s for s in live if s.phase in _RUNNING]


def needing_blocks(live: Many[Sequence]) -> list[Sequence]:
    """Returns the decoding sequences whose next step needs more blocks than they have."""
    return [s for s in live if s.phase is Phase.DECODE and blocks_for_step(s) > s.blocks]


def preemption_victim(live: Many[Sequence]) -> Sequence | None:
    """Returns the newest running sequence; None when there is only one."""
    rows = running(live)
    return rows[-1] if len(rows) > 1 else None
