"""What steps take with drafts and without, from measured ones. Pure.

The seconds are those of a whole step on the clock, between the ends of two steps: forward pass,
draw, search of drafts, texts, and where passes are otherwise submitted ahead the wait for each
other of host and device. Passes of a draft model count apart (Speculator.step_ended). Steps that
read prompts are not among them.

A step with drafts is known as a multiple of one without, so that a machine that becomes slower
changes nothing. Numbers of rows by powers of two have a curve each, of the multiple by the number
of drafts: 1 without any, and the median of the newest steps of each kind.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from math import inf

from msgspec import Struct, field

NEWEST = 9  # steps of a kind, of which the median is taken: slow ones say something of the machine
# Until a step with drafts was measured, one is assumed to take this share of a plain step more than
# is guessed, so that drafts with small chances do not begin.
UNMEASURED_EXTRA = 0.5
# Seconds that host and device are guessed to wait for each other where passes are otherwise
# submitted ahead; a plain step at most.
WAIT = 0.001
# Where passes are submitted ahead, so many steps behind one with drafts are slower than others: the
# host has run other code, and the device has waited. What they take more is a cost of the drafts,
# and those behind them show what steps without drafts take.
SETTLING_STEPS = 4

Predict = Callable[[int], float]  # lines of a decode step -> seconds


class Curve(Struct):
    """The multiples of a plain step that steps of about as many rows took, by their drafts."""

    newest: dict[int, deque[float]] = field(default_factory=dict)  # by kind, see `_kind`
    points: list[tuple[int, float]] = field(default_factory=lambda: [(0, 1.0)])  # drafts, multiple

    def observe(self, drafts: int, multiple: float) -> None:
        """Takes a measured step into account, but for the first of its kind: it may compile more
        than others.
        """
        kind = _kind(drafts)
        newest = self.newest.get(kind)
        if newest is None:
            self.newest[kind] = deque(maxlen=NEWEST)
            return
        newest.append(multiple)
        self.points = [one for one in self.points if _kind(one[0]) != kind or not one[0]]
        insort(self.points, (drafts, max(1.0, _median(newest))))

    def multiple(self, drafts: int) -> float:
        """Returns the multiple between two points, or that of the most drafts."""
        at = min(bisect_left(self.points, (drafts, 0.0)), len(self.points) - 1)
        (less, low), (more, high) = self.points[max(0, at - 1)], self.points[at]
        return low + (high - low) * min(1.0, (drafts - less) / max(1, more - less))


class Unsettled(Struct):
    """A step with drafts whose cost is not known yet: those behind it may take more than others."""

    rows: int
    drafts: int
    seconds: float


class StepTimes:
    """Seconds of steps of `rows` decode rows that check `drafts` tokens together."""

    def __init__(self, *, ahead: bool = False) -> None:
        """`ahead`: passes without drafts are submitted ahead."""
        self._settling = SETTLING_STEPS if ahead else 0
        self._newest: dict[int, deque[float]] = {}  # of steps without drafts, by rows
        self._plain: dict[int, float] = {}  # their medians
        self._sizes: list[int] = []  # the keys of _plain, in order
        self._curves: dict[int, Curve] = {}
        self._unsettled: Unsettled | None = None
        self._left = 0  # steps until others are as if there had been no drafts

    @property
    def knows_plain(self) -> bool:
        """Whether a step without drafts was measured, with which those with drafts are compared."""
        return bool(self._sizes)

    @property
    def settled(self) -> bool:
        """Whether the next step without drafts shows what these take."""
        return not self._left

    def known_drafts(self, rows: int) -> int:
        """Returns the most drafts of a measured step; 0: none was. Of more less is known."""
        curve = self._curves.get(rows.bit_length())
        return 0 if curve is None else curve.points[-1][0]

    def observe(self, rows: int, drafts: int, seconds: float, *, measured: bool = True) -> None:
        """Takes a step into account; not `measured`: its time is not that of steps of its kind."""
        if drafts:
            self.settle()
            self._left = self._settling
            if measured:
                self._unsettled = Unsettled(rows, drafts, seconds)
                if not self._settling or not self.known_drafts(rows):
                    self.settle()
        elif self._left:
            self._left -= 1
            if self._unsettled is not None and measured:
                self._unsettled.seconds += max(0.0, seconds - self.plain(rows, lambda _: seconds))
            if not self._left:
                self.settle()
        elif measured:
            if rows not in self._newest:
                self._newest[rows] = deque(maxlen=NEWEST)
                insort(self._sizes, rows)
            self._newest[rows].append(seconds)
            self._plain[rows] = _median(self._newest[rows])

    def settle(self) -> None:
        """Has the newest step with drafts cost no more than what is known of it."""
        step, self._unsettled = self._unsettled, None
        plain = None if step is None else self._plain_seconds(step.rows)
        if step is not None and plain:
            curve = self._curves.setdefault(step.rows.bit_length(), Curve())
            curve.observe(step.drafts, step.seconds / plain)

    def plain(self, rows: int, predict: Predict) -> float:
        """Returns the seconds of a step without drafts; those of `predict` if none was measured."""
        found = self._plain_seconds(rows)
        return predict(rows) if found is None else found

    def with_drafts(self, rows: int, drafts: int, predict: Predict, plain: float) -> float:
        """Returns the seconds of a step with drafts. `plain`: those without.

        Of more drafts than were measured each costs as much as those, or what is guessed where
        passes are submitted ahead: there most of the cost is a wait.
        """
        curve = self._curves.get(rows.bit_length())
        most = self.known_drafts(rows)
        if curve is None or not most:
            return self.guessed(rows, drafts, predict, plain) + UNMEASURED_EXTRA * plain
        seconds = plain * curve.multiple(drafts)
        if drafts <= most:
            return seconds
        if not self._settling:
            return plain + (seconds - plain) * drafts / most
        return seconds + max(0.0, predict(rows + drafts) - predict(rows + most))

    def guessed(self, rows: int, drafts: int, predict: Predict, plain: float) -> float:
        """Returns what `predict` says of the further lines of such a step, with any wait."""
        wait = min(WAIT, plain) if self._settling else 0.0
        return plain + wait + max(0.0, predict(rows + drafts) - predict(rows))

    def _plain_seconds(self, rows: int) -> float | None:
        """Returns the measured seconds, or those between the nearest numbers of rows.

        They are at most those of more rows: where most steps have drafts few plain ones are
        measured, and a slow one that something disturbed would make drafts look free.
        """
        sizes = self._sizes
        if not sizes:
            return None
        at = bisect_left(sizes, rows)
        more = min((self._plain[size] for size in sizes[at:]), default=inf)
        if at == len(sizes):
            return self._plain[sizes[-1]]
        if at == 0 or sizes[at] == rows:
            return more
        low, high = sizes[at - 1], sizes[at]
        share = (rows - low) / (high - low)
        between = self._plain[low] * (1 - share) + self._plain[high] * share
        return min(more, between)


def _kind(drafts: int) -> int:
    """Returns the class of a number of drafts: halves of powers of two."""
    bits = drafts.bit_length()
    return 2 * bits + (drafts >> max(0, bits - 2) & 1)


def _median(seconds: deque[float]) -> float:
    """Returns the median, of two in the middle the lower."""
    return sorted(seconds)[(len(seconds) - 1) // 2]
