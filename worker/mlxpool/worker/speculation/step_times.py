"""The times of steps with and without drafts, from measured steps. Pure.

The time of a step is the time from the end of the previous step to its end. It includes the forward
pass, sampling, the search for drafts, and texts. If passes are usually submitted ahead, it also
includes the waits of host and device for each other. Passes of a draft model are counted separately
(Speculator.step_ended). Steps that read prompts are not measured.

The time of a step with drafts is stored as a multiple of the time without drafts, so that a slower
machine changes nothing. The multiple depends on the number of drafts: it is 1 without drafts, else
the median of the newest steps with a similar number. There is a separate curve of multiples for
each power of two of the number of sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from math import inf

from msgspec import Struct, field

NEWEST = 9  # newest steps for a median, which ignores steps that other work slowed
# Until a step with drafts was measured, its assumed time is the guess plus this fraction of a plain
# step, so that drafts with small chances are not tried.
UNMEASURED_EXTRA = 0.5
# Guessed seconds that host and device wait for each other if passes are usually submitted ahead; at
# most the time of a plain step.
WAIT = 0.001
# If passes are submitted ahead, this many steps after a step with drafts are slower than other
# steps: the host has run other code, and the device has waited. Their extra time is a cost of the
# drafts. Only later steps have the normal time of steps without drafts.
SETTLING_STEPS = 4

Predict = Callable[[int], float]  # inputs of a decode step -> seconds


class Curve(Struct):
    """The time of a step by its number of drafts, for similar numbers of sequences.

    The time is a multiple of the time of a step without drafts.
    """

    newest: dict[int, deque[float]] = field(default_factory=dict)  # multiples by class, see `_kind`
    points: list[tuple[int, float]] = field(default_factory=lambda: [(0, 1.0)])  # drafts, multiple

    def observe(self, drafts: int, multiple: float) -> None:
        """Adds a measured step.

        Ignores the first step of each class of draft numbers (see `_kind`), because it may compile
        something.
        """
        kind = _kind(drafts)
        newest = self.newest.get(kind)
        if newest is None:
            self.newest[kind] = deque(maxlen=NEWEST)
            return
        newest.append(multiple)
        self.points = [point for point in self.points if _kind(point[0]) != kind or not point[0]]
        insort(self.points, (drafts, max(1.0, _median(newest))))

    def multiple(self, drafts: int) -> float:
        """Returns the multiple for a number of drafts, interpolated; constant beyond the curve."""
        at = min(bisect_left(self.points, (drafts, 0.0)), len(self.points) - 1)
        (less, low), (more, high) = self.points[max(0, at - 1)], self.points[at]
        return low + (high - low) * min(1.0, (drafts - less) / max(1, more - less))


class Unsettled(Struct):
    """A step with drafts whose cost is not known yet, because it may slow down later steps."""

    rows: int
    drafts: int
    seconds: float


class StepTimes:
    """The seconds of steps, by the number of decoding sequences and their number of drafts."""

    def __init__(self, *, ahead: bool = False) -> None:
        """`ahead`: whether passes without drafts are submitted ahead."""
        self._settling = SETTLING_STEPS if ahead else 0
        self._newest: dict[int, deque[float]] = {}  # seconds of plain steps, by number of sequences
        self._plain: dict[int, float] = {}  # medians of `_newest`
        self._sizes: list[int] = []  # the keys of `_plain`, sorted
        self._curves: dict[int, Curve] = {}
        self._unsettled: Unsettled | None = None
        self._left = 0  # steps that are still slower because of the newest drafts

    @property
    def knows_plain(self) -> bool:
        """Whether a step without drafts was measured."""
        return bool(self._sizes)

    @property
    def settled(self) -> bool:
        """Whether the next step without drafts has a normal time, unaffected by earlier drafts."""
        return not self._left

    def known_drafts(self, rows: int) -> int:
        """Returns the most drafts of a measured step; 0 if no step with drafts was measured."""
        curve = self._curves.get(rows.bit_length())
        return 0 if curve is None else curve.points[-1][0]

    def observe(self, rows: int, drafts: int, seconds: float, *, measured: bool = True) -> None:
        """Adds a step; if not `measured`, its time is not typical and does not count."""
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
        """Ends the measurement of the newest step with drafts, and stores its cost.

        The cost includes the extra time of the later steps that were measured so far.
        """
        step, self._unsettled = self._unsettled, None
        plain = None if step is None else self._plain_seconds(step.rows)
        if step is not None and plain:
            curve = self._curves.setdefault(step.rows.bit_length(), Curve())
            curve.observe(step.drafts, step.seconds / plain)

    def plain(self, rows: int, predict: Predict) -> float:
        """Returns the seconds of a step without drafts; predicts them if none was measured."""
        plain = self._plain_seconds(rows)
        return predict(rows) if plain is None else plain

    def with_drafts(self, rows: int, drafts: int, predict: Predict, plain: float) -> float:
        """Returns the seconds of a step with drafts. `plain`: seconds without drafts.

        For more drafts than any measured step had, each further draft is assumed to cost as much as
        a draft of the largest measured step on average. But if passes are submitted ahead, most of
        the measured cost is a wait. Then the cost of the further drafts is predicted instead.
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
        """Guesses the seconds of a step with drafts: `plain` + the predicted cost + any wait."""
        wait = min(WAIT, plain) if self._settling else 0.0
        return plain + wait + max(0.0, predict(rows + drafts) - predict(rows))

    def _plain_seconds(self, rows: int) -> float | None:
        """Returns the seconds of a step without drafts, by interpolation; None: none was measured.

        `rows`: the number of sequences. The result is at most the measured time of a step with more
        sequences: if most steps have drafts, few steps without drafts are measured, and one slow
        step would make drafts look free.
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
    """Returns the class of a number of drafts: two classes for each power of two."""
    bits = drafts.bit_length()
    return 2 * bits + (drafts >> max(0, bits - 2) & 1)


def _median(seconds: deque[float]) -> float:
    """Returns the median; of two middle values, the lower."""
    return sorted(seconds)[(len(seconds) - 1) // 2]
