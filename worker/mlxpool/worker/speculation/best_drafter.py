"""Drafts of the drafter that promises most for a row, among several. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import AUTO, Drafter, Drafts

# Consecutive failures after which a drafter is no longer used. Fewer than MAX_FAILURES of
# compute/drafting_rows.py, after which nothing drafts any more.
MAX_FAILURES = 2
# Drafters are compared by how many of so many drafts are expected to be right.
COMPARED = 6


class BestDrafter:
    """A Drafter that takes for each row those drafts of which most are expected to be right.

    Where several drafters promise the same, the first of them drafts.
    """

    name = AUTO

    def __init__(self, drafters: Many[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._ready: dict[Sequence, list[int]] = {}  # the numbers of those that follow a sequence
        self._chosen: dict[Sequence, int] = {}  # the number of the one that drafts for a sequence
        self._counts = [0] * len(drafters)  # sequences for which each is chosen
        self._failures = [0] * len(drafters)  # of each, since its newest drafts

    def follow(self, seq: Sequence) -> bool:
        """See Drafter. One that lags behind a long prompt does not hinder the others, and neither
        does one that fails.
        """
        ready = [
            number
            for number, one in enumerate(self._drafters)
            if self._failures[number] < MAX_FAILURES and one.follow(seq)
        ]
        self._ready[seq] = ready
        return bool(ready)

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """See Drafter. They are those of the drafter that is chosen for the sequence."""
        best: tuple[float, ...] = ()
        self._forget_choice(seq)
        for number in self._ready.get(seq, ()):
            found = self._drafters[number].chances(seq, most)
            if expected_right(found[:COMPARED]) > expected_right(best[:COMPARED]):
                best, self._chosen[seq] = found, number
        if best:
            self._counts[self._chosen[seq]] += 1
        return best

    def _forget_choice(self, seq: Sequence) -> None:
        number = self._chosen.pop(seq, None)
        if number is not None:
            self._counts[number] -= 1

    def seconds(self, rows: int, depth: int) -> float:
        """See Drafter. Each drafter has as many of the rows as it was chosen for."""
        every = zip(self._drafters, self._counts, strict=True)
        return sum(one.seconds(min(rows, count), depth) for one, count in every if count)

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """See Drafter."""
        if seq not in self._chosen:
            return 0.0
        return self._drafters[self._chosen[seq]].reading_seconds(seq, depth)

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """See Drafter."""
        found: dict[Sequence, tuple[int, ...]] = {}
        for number, one in enumerate(self._drafters):
            own = {seq: depth for seq, depth in depths.items() if self._chosen[seq] == number}
            if not own:
                continue
            self._failures[number] += 1  # which stays where `drafts` raises
            found.update(one.drafts(own))
            self._failures[number] = 0
        return found

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """See Drafter."""
        return self._drafters[self._chosen[seq]].sharper_chances(seq)

    def reset(self) -> None:
        """See Drafter. Failures stay counted."""
        self._ready.clear()
        self._chosen.clear()
        self._counts = [0] * len(self._drafters)
        for one in self._drafters:
            one.reset()

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._ready.pop(seq, None)
        self._forget_choice(seq)
        for one in self._drafters:
            one.forget(seq)


def expected_right(chances: Many[float]) -> float:
    """Returns how many drafts are expected to be right until one is wrong."""
    product, total = 1.0, 0.0
    for chance in chances:
        product *= chance
        total += product
    return total
