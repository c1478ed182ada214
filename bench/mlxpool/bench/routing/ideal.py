"""How much faster a load could be if less of its prompts was read: the bound of a ratio.

Processor time of a load is taken to be a line over the prompt tokens that are read: two policies
that read more and less of them are two points of it. It is the figure that other processes on the
machine disturb least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxpool.bench.routing.simulator import Outcome


@dataclass(frozen=True, slots=True)
class Ideal:
    """`reading_share` of the processor time of `more` goes into prompts.

    `ratio` is what tokens per processor second would gain if nothing was read twice; `bounded` if
    as much was read again as the oracle does, whose caches have the same bounds.
    """

    token_ms: float  # of a prompt token that is read
    reading_share: float
    ratio: float
    bounded: float


def ideal_of(
    more: Sequence[Outcome], less: Sequence[Outcome], oracle: Sequence[Outcome]
) -> Ideal | None:
    """The line through two policies, `more` of which reads more. None if both read about the same.

    `oracle` has the simulated outcomes of the same loads.
    """
    read_more, read_less = sum(each.read for each in more), sum(each.read for each in less)
    took_more = sum(each.processor_s for each in more)
    took_less = sum(each.processor_s for each in less)
    if read_more < 1.1 * read_less or took_more <= took_less:
        return None
    token_s = (took_more - took_less) / (read_more - read_less)
    rest = max(0.0, took_more - token_s * read_more)
    needed, bounded = sum(each.unique for each in more), sum(each.read for each in oracle)
    return Ideal(
        token_s * 1000,
        min(1.0, token_s * read_more / took_more),
        took_more / (rest + token_s * needed),
        took_more / (rest + token_s * bounded),
    )
