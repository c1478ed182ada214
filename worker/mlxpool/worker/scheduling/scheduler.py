"""Who is admitted, who prefills, who decodes in the next step, and who gives way. Pure.

Sequences are always given in the order of their arrival.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import isqrt

from mlxpool.worker.scheduling.block_manager import next_need
from mlxpool.worker.scheduling.sequence import Phase, Sequence

LOOK = 2048  # tokens that a step's whole budget may look back on; later ones get less of it
PAUSE = 0.2  # seconds a chunk may hold up running streams
LEAST_CHUNK = 64  # tokens; smaller ones cost more than they save
_WITH_ROW = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: prefill chunks first, then one token for every decoding row."""

    prefill: tuple[tuple[Sequence, int], ...]  # with its share of the budget, 0: it needs none
    decode: tuple[Sequence, ...]


def plan(live: Seq[Sequence], budget: int, area: int) -> Plan:
    """The next step. `budget` are the prompt tokens it may take, shared by all: the oldest prompt
    gets what it can use, the next what is left. `area` bounds these tokens times the tokens they
    look back on, so that chunks get shorter as contexts get longer, see `reach`.
    """
    prefill = []
    for sequence in live:
        if sequence.phase is Phase.PREFILL and budget > 0:
            # Its last token does not count, so a prompt that is all cached needs none.
            left = max(0, sequence.length - 1 - sequence.prefilled)
            share = min(left, budget, reach(sequence.prefilled, area))
            if left and not share:
                break
            prefill.append((sequence, share))
            budget -= share
            area -= share * (sequence.prefilled + share)
            if share < left:
                break
    decode = tuple(s for s in live if s.phase is Phase.DECODE)
    return Plan(tuple(prefill), decode)


def area_of(chunk: int) -> int:
    """The area of one step of an engine with these chunks."""
    return chunk * LOOK


def reach(at: int, area: int) -> int:
    """The longest chunk, in tokens, from position `at` on that looks back on `area` pairs at most;
    at least LEAST_CHUNK while there is any area, so that every context gets on.
    """
    if area <= 0:
        return 0
    return max(LEAST_CHUNK, (isqrt(at * at + 4 * area) - at) // 2)


def budget_of(chunk: int, streams: bool, token_seconds: float) -> int:
    """Prompt tokens for one step: `chunk`, or what PAUSE has time for while streams run.

    `token_seconds` is what a prompt token usually takes; 0: not known.
    """
    if not streams or token_seconds <= 0:
        return chunk
    return min(chunk, max(LEAST_CHUNK, int(PAUSE / token_seconds)))


def waiting(live: Seq[Sequence], places: int) -> list[Sequence]:
    """Who is admitted next as far as memory goes: at most as many as there are free places.

    Those who were sent away come first.
    """
    free = max(0, places - len(with_row(live)))
    order = [s for s in live if s.phase is Phase.WAITING]
    return sorted(order, key=lambda s: not s.preempted)[:free]


def with_row(live: Seq[Sequence]) -> list[Sequence]:
    """The sequences that have a row."""
    return [s for s in live if s.phase in _WITH_ROW]


def growing(live: Seq[Sequence]) -> list[Sequence]:
    """The rows whose next step needs more blocks than they have."""
    return [s for s in live if s.phase is Phase.DECODE and next_need(s) > s.blocks]


def newest(live: Seq[Sequence]) -> Sequence | None:
    """Who gives way: the newest row, but never the only one."""
    rows = with_row(live)
    return rows[-1] if len(rows) > 1 else None
