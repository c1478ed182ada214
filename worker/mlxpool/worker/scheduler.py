"""Who is admitted, who prefills, who decodes in the next step. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mlxpool.worker.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: admissions first, then prefill chunks, then one token for every decoding row."""

    admit: tuple[Sequence, ...]
    prefill: tuple[tuple[Sequence, int], ...]  # with its share of the budget, tokens
    decode: tuple[Sequence, ...]


def plan(live: Seq[Sequence], places: int, budget: int) -> Plan:
    """The next step for sequences in the order of their arrival.

    `places` is how many may hold a row at once, `budget` the prompt tokens one step may take:
    the oldest prompt gets what it can use, the next what is left.
    """
    held = sum(1 for s in live if s.phase in (Phase.PREFILL, Phase.DECODE))
    admit = tuple(s for s in live if s.phase is Phase.WAITING)[: max(0, places - held)]
    prefill = []
    for sequence in live:
        if sequence.phase is Phase.PREFILL and budget > 0:
            # Its last token is left for decode, so a prompt that is all cached needs none.
            share = min(budget, max(0, sequence.length - 1 - sequence.prefilled))
            prefill.append((sequence, share))
            budget -= share
    decode = tuple(s for s in live if s.phase is Phase.DECODE)
    return Plan(admit, tuple(prefill), decode)
