"""Drafts of the drafter that promises most for a row, among several. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import Drafter, Drafts


class BestDrafter:
    """A Drafter that takes for each row those drafts of which most are likely right."""

    def __init__(self, drafters: Many[Drafter]) -> None:
        self.name = " or ".join(one.name for one in drafters)
        self._drafters = tuple(drafters)
        self._ready: dict[Sequence, list[Drafter]] = {}  # those that follow a sequence
        self._chosen: dict[Sequence, Drafter] = {}

    def follow(self, seq: Sequence) -> bool:
        """See Drafter. One that lags behind a long prompt does not hinder the others."""
        ready = [one for one in self._drafters if one.follow(seq)]
        self._ready[seq] = ready
        return bool(ready)

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """See Drafter."""
        best: tuple[float, ...] = ()
        for one in self._ready.get(seq, ()):
            found = one.chances(seq, most)
            if _expected(found) > _expected(best):
                best, self._chosen[seq] = found, one
        return best

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """See Drafter."""
        found: dict[Sequence, tuple[int, ...]] = {}
        for drafter in self._drafters:
            own = {seq: count for seq, count in depths.items() if self._chosen[seq] is drafter}
            if own:
                found.update(drafter.drafts(own))
        return found

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._ready.pop(seq, None), self._chosen.pop(seq, None)
        for one in self._drafters:
            one.forget(seq)


def _expected(chances: tuple[float, ...]) -> float:
    """Returns how many drafts are right on average."""
    expected = together = 0.0
    for depth, chance in enumerate(chances):
        together = together * chance if depth else chance
        expected += together
    return expected
