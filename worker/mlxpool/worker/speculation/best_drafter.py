"""A drafter that uses the best of several drafters for each row. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import AUTO, Drafter, Drafts

# The number of consecutive failures after which a drafter is no longer used. It is below
# MAX_FAILURES of compute/drafting_rows.py, the number of failures that turns off all drafts.
MAX_FAILURES = 2
# Drafters are compared by the expected number of right drafts among their first COMPARED drafts.
COMPARED = 6


class BestDrafter:
    """A Drafter that chooses, for each row, the drafter with the most expected right drafts.

    If several drafters are equal, it chooses the first.
    """

    name = AUTO

    def __init__(self, drafters: Many[Drafter]) -> None:
        self.drafters = tuple(drafters)  # in the order of preference
        self._ready: dict[Sequence, list[int]] = {}  # numbers of the drafters that can draft
        self._chosen: dict[Sequence, int] = {}  # number of the chosen drafter
        self._counts = [0] * len(drafters)  # number of sequences that chose each drafter
        self._failures = [0] * len(drafters)  # failures of each drafter since its newest drafts

    def follow(self, seq: Sequence) -> bool:
        """Makes all drafters read a sequence's new tokens; returns whether any can draft now.

        A drafter that lags or fails does not affect other drafters.
        """
        ready = [
            number
            for number, drafter in enumerate(self.drafters)
            if self._failures[number] < MAX_FAILURES and drafter.follow(seq)
        ]
        self._ready[seq] = ready
        return bool(ready)

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Chooses the best drafter for a sequence, and returns its chances; see Drafter."""
        best: tuple[float, ...] = ()
        self._forget_choice(seq)
        for number in self._ready.get(seq, ()):
            chances = self.drafters[number].chances(seq, most)
            if expected_right(chances[:COMPARED]) > expected_right(best[:COMPARED]):
                best, self._chosen[seq] = chances, number
        if best:
            self._counts[self._chosen[seq]] += 1
        return best

    def _forget_choice(self, seq: Sequence) -> None:
        number = self._chosen.pop(seq, None)
        if number is not None:
            self._counts[number] -= 1

    def seconds(self, rows: int, depth: int) -> float:
        """Predicts the seconds of `drafts`; see Drafter.

        This is the sum over the drafters that `chances` has chosen for any sequence.
        """
        pairs = zip(self.drafters, self._counts, strict=True)
        return sum(drafter.seconds(min(rows, count), depth) for drafter, count in pairs if count)

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """Predicts the seconds in which the chosen drafter reads a sequence's unread tokens.

        See Drafter.
        """
        if seq not in self._chosen:
            return 0.0
        return self.drafters[self._chosen[seq]].reading_seconds(seq, depth)

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the drafts that each sequence's chosen drafter makes; see Drafter."""
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for number, drafter in enumerate(self.drafters):
            own = {seq: depth for seq, depth in depths.items() if self._chosen[seq] == number}
            if not own:
                continue
            self._failures[number] += 1  # the count stays if `drafts` raises
            drafts.update(drafter.drafts(own))
            self._failures[number] = 0
        return drafts

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """Returns the updated chances from the chosen drafter; see Drafter."""
        return self.drafters[self._chosen[seq]].sharper_chances(seq)

    def reset(self) -> None:
        """Drops the state of all sequences, but not the counts of failures; see Drafter."""
        self._ready.clear()
        self._chosen.clear()
        self._counts = [0] * len(self.drafters)
        for drafter in self.drafters:
            drafter.reset()

    def forget(self, seq: Sequence) -> None:
        """Drops the state of a sequence in all drafters; see Drafter."""
        self._ready.pop(seq, None)
        self._forget_choice(seq)
        for drafter in self.drafters:
            drafter.forget(seq)


def expected_right(chances: Many[float]) -> float:
    """Returns the expected number of right drafts before the first wrong one."""
    product, total = 1.0, 0.0
    for chance in chances:
        product *= chance
        total += product
    return total
