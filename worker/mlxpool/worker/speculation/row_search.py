"""Chooses the sequences to examine for drafts before a step, within a budget of host time. Pure.

Rows with drafts in the newest step are always examined. All other sequences share the time budget
for searches, so that requests whose drafts are never right lose nearly no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from msgspec import Struct

from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.speculation.drafter import Drafter

TIME_SHARE = 0.003  # fraction of the time of steps that is saved for searches
GAIN_SHARE = 0.25  # fraction of the time gained by drafts that is saved for searches
MAX_SAVED = 0.005  # the most seconds of the budget: a longer search would delay the streams


class Candidate(Struct, frozen=True):
    """A decoding sequence of the next step; `room`: the most drafts that it may check."""

    sequence: Sequence
    room: int


class RowSearch:
    """Chooses the sequences to examine for drafts, within a budget of `saved` seconds."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        self._drafter, self._clock = drafter, clock
        self.saved = 0.0
        self._step = 0.0  # seconds of the newest measured step
        self._needed = 0.0  # seconds of a search of all sequences
        self._next = 0  # index of the next sequence to examine
        self._looked = 0  # sequences examined in the newest search
        self._followed: set[Sequence] = set()

    @property
    def affordable(self) -> bool:
        """Whether the budget suffices to examine all sequences, or has reached MAX_SAVED."""
        return self.saved > 0 and self.saved >= min(self._needed, MAX_SAVED)

    def earn(self, step: float, gained: float = 0.0) -> None:
        """Adds to the budget a fraction of `step`, the seconds of an ended step.

        Also adds a fraction of `gained`, the seconds that drafts gained in this step.
        """
        self._step = step
        self._save(TIME_SHARE * step + GAIN_SHARE * max(0.0, gained))

    def pass_by(self) -> bool:
        """Counts an ended step without a search; returns False if the caller has to measure it.

        The step is assumed to take as long as the newest measured step. Adds a fraction of these
        seconds to the budget and returns True. But if the budget then suffices for a search, or no
        step was measured, adds nothing and returns False: the caller measures the step, and `earn`
        adds its time.
        """
        before = self.saved
        self._save(TIME_SHARE * self._step)
        if self._step and not self.affordable:
            return True
        self.saved = before  # `earn` will add the time of this step
        return False

    def _save(self, seconds: float) -> None:
        self.saved = min(MAX_SAVED, self.saved + seconds)

    def follow(self, seq: Sequence) -> bool:
        """Makes the drafter read a sequence's new tokens; see Drafter.follow."""
        self._followed.add(seq)
        return self._drafter.follow(seq)

    def look(self, others: Many[Candidate]) -> list[Candidate]:
        """Examines candidates round-robin, within the budget; returns those that can draft now."""
        ready, self._looked = [], 0
        begin, until = self._next % max(1, len(others)), self._clock() + self.saved
        for candidate in [*others[begin:], *others[:begin]]:
            if self._clock() >= until:
                break
            self._looked += 1
            if self.follow(candidate.sequence):
                ready.append(candidate)
        self._next += self._looked
        return ready

    def spend(self, seconds: float, others: int) -> None:
        """Subtracts the `seconds` of a search from the budget.

        `others`: the number of candidates that were passed to `look`. Also estimates the seconds
        that a search of all these candidates would take, for `affordable`.
        """
        self.saved -= seconds
        if self._looked:
            self._needed = seconds / self._looked * others

    def read(self, readers: Iterable[Sequence]) -> None:
        """Makes the drafter follow sequences in prefill, within the budget."""
        began = self._clock()
        for seq in readers:
            if self._clock() - began >= self.saved:
                break
            self.follow(seq)
        self.saved -= self._clock() - began

    def forget_ended(self, rows: int) -> None:
        """Makes the drafter forget ended sequences; `rows`: the number of running sequences."""
        if len(self._followed) <= rows:
            return
        for seq in [ended for ended in self._followed if ended.phase is Phase.FINISHED]:
            self._followed.discard(seq)
            self._drafter.forget(seq)
