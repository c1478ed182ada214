"""Which rows are looked at for drafts before a step, and how much of the host's time. Pure.

Rows that had drafts in the newest step are always looked at. All others together take what was
saved for searches, so that requests for which drafts are never right pay nearly nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from msgspec import Struct

from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.speculation.drafter import Drafter

TIME_SHARE = 0.003  # of the time of steps, that is saved for searches
GAIN_SHARE = 0.25  # of the time that drafts have gained, which pays for the search for more
MAX_SAVED = 0.005  # seconds: a longer search would be a gap in the streams


class Candidate(Struct, frozen=True):
    """A sequence that decodes in the next step, and how many drafts it may check."""

    sequence: Sequence
    room: int


class RowSearch:
    """The seconds that are `saved` for searches, and the rows that a drafter follows."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        self._drafter, self._clock = drafter, clock
        self.saved = 0.0
        self._step = 0.0  # seconds of the newest measured step
        self._needed = 0.0  # seconds that a search of all rows takes
        self._next = 0  # the row that is looked at next
        self._looked = 0  # rows in the newest look
        self._followed: set[Sequence] = set()

    @property
    def affordable(self) -> bool:
        """Whether enough is saved to look at all rows, or at some where that takes very long."""
        return self.saved > 0 and self.saved >= min(self._needed, MAX_SAVED)

    def earn(self, step: float, gained: float = 0.0) -> None:
        """Saves shares of what a step took and of what its drafts gained."""
        self._step = step
        self._save(TIME_SHARE * step + GAIN_SHARE * max(0.0, gained))

    def pass_by(self) -> bool:
        """Counts a step as one like the newest; False: behind it a search is affordable."""
        before = self.saved
        self._save(TIME_SHARE * self._step)
        if self._step and not self.affordable:
            return True
        self.saved = before  # `earn` counts the step
        return False

    def _save(self, seconds: float) -> None:
        self.saved = min(MAX_SAVED, self.saved + seconds)

    def follow(self, seq: Sequence) -> bool:
        """See Drafter.follow."""
        self._followed.add(seq)
        return self._drafter.follow(seq)

    def look(self, others: Many[Candidate]) -> list[Candidate]:
        """Follows candidates in turn, as far as the time suffices; returns those with drafts."""
        ready, self._looked = [], 0
        begin, until = self._next % max(1, len(others)), self._clock() + self.saved
        for one in [*others[begin:], *others[:begin]]:
            if self._clock() >= until:
                break
            self._looked += 1
            if self.follow(one.sequence):
                ready.append(one)
        self._next += self._looked
        return ready

    def spend(self, seconds: float, others: int) -> None:
        """Takes the time of the newest look at some of so many rows from what is saved."""
        self.saved -= seconds
        if self._looked:
            self._needed = seconds / self._looked * others

    def read(self, readers: Iterable[Sequence]) -> None:
        """Follows sequences whose prompts are being read, as far as the time suffices."""
        began = self._clock()
        for seq in readers:
            if self._clock() - began >= self.saved:
                break
            self.follow(seq)
        self.saved -= self._clock() - began

    def forget_ended(self, rows: int) -> None:
        """Has the drafter forget sequences that have ended; `rows` run."""
        if len(self._followed) <= rows:
            return
        for seq in [one for one in self._followed if one.phase is Phase.FINISHED]:
            self._followed.discard(seq)
            self._drafter.forget(seq)
