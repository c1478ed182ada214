"""What steps cost that check drafts, learned from measured ones. Pure.

The seconds are those of a whole step on the clock, between the ends of two steps: forward pass,
draw, search of drafts, texts, and where passes are otherwise submitted ahead the wait for each
other of host and device. Passes of a draft model count apart (Speculator.step_ended). Steps that
read prompts are not among them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from math import inf

import numpy as np

OBSERVATIONS = 64  # steps with drafts that the fit takes into account
FIT_INTERVAL = 8  # new ones, at least, between two fits
NEWEST = 0.15  # weight of the newest step in an average
MAX_CHANGE = 0.25  # of an average by one step: others use the machine as well
FIRST_STEPS = 4  # whose times an average takes as they are
PLAIN_STEPS = 9  # the newest ones without drafts, of whose times the median is taken
# Until a step with drafts was measured, one is assumed to take this share of a plain step more than
# is guessed.
UNMEASURED_EXTRA = 0.5
KINDS = 64  # of steps with drafts whose times are kept
KNOWN_STEPS = 3  # of a kind; then its own average says what such a step takes, and no fit

Predict = Callable[[int], float]  # lines of a decode step -> seconds


class StepTimes:
    """Seconds of steps of `rows` decode rows, `checked` of which check `drafts` tokens together."""

    def __init__(self, bubble: float = 0.0) -> None:
        """`bubble`: seconds that a step with drafts is assumed to lose until one was measured,
        because host and device wait for each other; a plain step at most.
        """
        self._bubble = bubble
        # Of steps without drafts, by rows: the newest times, and their median. Slow ones among them
        # would make drafts look good for as long as few others are measured.
        self._newest: dict[int, deque[float]] = {}
        self._plain: dict[int, float] = {}
        self._sizes: list[int] = []  # the keys of _plain, in order
        self._extra: deque[tuple[list[float], float]] = deque(maxlen=OBSERVATIONS)
        self._weights: list[float] | None = None
        self._new = 0
        self._most = 0  # drafts of a measured step
        # Of each kind the average of the seconds divided by those of a plain step, and the number
        # of steps; a machine that becomes slower does it to both.
        self._kinds: dict[tuple[int, int, int], tuple[float, int]] = {}

    def observe(self, rows: int, checked: int, drafts: int, seconds: float) -> None:
        """Takes a measured step into account."""
        if not drafts:
            newest = self._newest.get(rows)
            if newest is None:
                newest = self._newest[rows] = deque(maxlen=PLAIN_STEPS)
                insort(self._sizes, rows)
            newest.append(seconds)
            self._plain[rows] = sorted(newest)[(len(newest) - 1) // 2]
            return
        plain = self._plain_seconds(rows)
        if plain is None:
            return
        self._extra.append(([1.0, checked, drafts], seconds - plain))
        self._new += 1
        if self._new >= FIT_INTERVAL or len(self._extra) < FIT_INTERVAL:
            self._fit()
        self._most = max(self._most, drafts)
        kind = _kind(rows, checked, drafts)
        known, count = self._kinds.pop(kind, (0.0, 0))
        ratio = seconds / max(1e-9, plain)
        self._kinds[kind] = _average(known, count, ratio), count + 1  # the newest kind is last
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]

    def forget_oldest(self) -> None:
        """Forgets the older half of the measured steps with drafts, the only one if there is one,
        and the averages of all kinds.
        """
        for _ in range((len(self._extra) + 1) // 2):
            self._extra.popleft()
        self._kinds.clear()
        if self._extra:
            self._fit()
        else:
            self._weights, self._most = None, 0

    @property
    def measured(self) -> bool:
        """Whether what is said of steps with drafts comes from measured ones."""
        return self._weights is not None

    @property
    def knows_plain(self) -> bool:
        """Whether a step without drafts was measured, with which those with drafts are compared."""
        return bool(self._sizes)

    @property
    def known_drafts(self) -> int:
        """The most drafts of a step that was measured; 0: none was. The fit says less of more."""
        return self._most

    def plain(self, rows: int, predict: Predict) -> float:
        """Returns the seconds of a step without drafts."""
        found = self._plain_seconds(rows)
        return predict(rows) if found is None else found

    def with_drafts(
        self, rows: int, checked: int, drafts: int, predict: Predict, plain: float
    ) -> float:
        """Returns the seconds of a step with drafts, as measured. `plain`: those without.

        Before one was, it is `guessed` with a share of a plain step more, so that drafts with small
        chances do not begin.
        """
        if self._weights is None:
            return self.guessed(rows, drafts, predict) + UNMEASURED_EXTRA * plain
        ratio, count = self._kinds.get(_kind(rows, checked, drafts), (0.0, 0))
        if count >= KNOWN_STEPS:
            return plain * max(1.0, ratio)
        return plain + self._extra_seconds(checked, drafts)

    def guessed(self, rows: int, drafts: int, predict: Predict) -> float:
        """Returns what `predict` says of the further lines of such a step, with the bubble."""
        further = max(0.0, predict(rows + drafts) - predict(rows))
        plain = self.plain(rows, predict)
        return plain + min(self._bubble, plain) + further

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

    def _extra_seconds(self, checked: int, drafts: int) -> float:
        assert self._weights is not None
        constant, of_row, of_draft = self._weights
        return constant + of_row * checked + of_draft * drafts

    def _fit(self) -> None:
        """Least squares with a little weight on small coefficients; none is negative."""
        self._new = 0
        features = np.array([one for one, _ in self._extra])
        seconds = np.array([took for _, took in self._extra])
        square = features.T @ features
        square += 1e-4 * np.diag(np.diag(square))
        kept = [0, 1, 2]
        weights = np.zeros(3)
        while kept:
            found = np.linalg.solve(square[np.ix_(kept, kept)], features[:, kept].T @ seconds)
            if (found >= 0).all():
                weights[kept] = found
                break
            kept.pop(int(found.argmin()))
        self._weights = weights.tolist()


def _kind(rows: int, checked: int, drafts: int) -> tuple[int, int, int]:
    """Returns the class of a step: rows by powers of two, drafts by halves of them."""
    bits = drafts.bit_length()
    return rows.bit_length(), checked.bit_length(), 2 * bits + (drafts >> max(0, bits - 2) & 1)


def _average(known: float, count: int, seconds: float) -> float:
    if count < FIRST_STEPS:
        return (known * count + seconds) / (count + 1)
    change = NEWEST * (seconds - known)
    return known + min(known * MAX_CHANGE, max(-known * MAX_CHANGE, change))
