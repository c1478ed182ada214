"""The last minutes of the pool, so that a status page just opened has them: a bounded ring.

Owned by the thread that notes; others may read. Size: POINTS points, each with one entry for every
model that made tokens in its STEP seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add, sub

from mlxpool.broker.figures import FIRST_TOKEN, Frozen
from mlxpool.broker.snapshot import Snapshot

STEP = 2.0  # seconds from one point to the next
POINTS = 300  # ten minutes
RECENT = 30  # points that a quantile is made of: a minute
COLUMN = 10.0  # seconds, in the plot of one model
COLUMNS = 60

Buckets = tuple[int, ...]
_NONE: Buckets = (0,) * (len(FIRST_TOKEN) + 1)


@dataclass(frozen=True, slots=True)
class Point:
    """One moment, and what came since the point before. Times are seconds, memory is bytes."""

    at: float
    seconds: float  # since the point before
    made: Mapping[str, int]  # tokens since then, of each model that made any
    first: Buckets  # times to the first token since then, by FIRST_TOKEN
    median: float | None  # of those of the last minute
    slow: float | None  # one in twenty of them took longer
    running: int
    waiting: int
    memory: int  # of all workers

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second, of each model that made any."""
        return {name: count / self.seconds for name, count in self.made.items()}

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.made.values()) / self.seconds


class Past:
    """The ring. The first `note` only sets the counters that the next one subtracts."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self._at: float | None = None
        self._tokens: dict[str, int] = {}
        self._first: dict[str, Frozen] = {}

    def note(self, snapshot: Snapshot, at: float) -> None:
        """The figures of now; a model's first figures count from zero."""
        before, self._at = self._at, at
        made, first = self._made(snapshot), self._firsts(snapshot)
        if before is None or at <= before:
            return
        window = [first, *(p.first for p in islice(reversed(self.points), RECENT - 1))]
        recent = [sum(column) for column in zip(*window, strict=True)]
        self.points.append(
            Point(
                at,
                at - before,
                made,
                first,
                quantile(FIRST_TOKEN, recent, 0.5),
                quantile(FIRST_TOKEN, recent, 0.95),
                sum(model.running for model in snapshot.models),
                sum(model.waiting for model in snapshot.models),
                sum(worker.taken for worker in snapshot.workers),
            )
        )

    def _made(self, snapshot: Snapshot) -> dict[str, int]:
        now = {model.name: model.counts["tokens"] for model in snapshot.models}
        made = {name: count - self._tokens.get(name, 0) for name, count in now.items()}
        self._tokens = now
        return {name: count for name, count in made.items() if count > 0}

    def _firsts(self, snapshot: Snapshot) -> Buckets:
        total = _NONE
        for model in snapshot.models:
            if (now := model.histograms.get("first_token")) is None:
                continue
            before = self._first.get(model.name)
            if now is not before:
                since = map(sub, now.counts, before.counts if before else _NONE)
                total = tuple(map(add, total, since))
                self._first[model.name] = now
        return total


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Where this part of the values lies, 0 < part < 1, as if each bucket were even.

    None: there are no values. What lies above the last bound counts as the last bound.
    """
    rank, below, low = part * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return bounds[-1] if sum(counts) else None


def rates(points: Sequence[Point], now: float) -> dict[str, list[float | None]]:
    """Tokens a second of each model that made any, in COLUMNS columns of COLUMN seconds to now.

    None: nothing was noted then. Columns begin at multiples of COLUMN, so that a plot of them moves
    and does not change its shape.
    """
    last = int(now // COLUMN)
    seconds = [0.0] * COLUMNS
    made: dict[str, list[int]] = {}
    for point in points:
        column = COLUMNS - 1 - (last - int(point.at // COLUMN))
        if not 0 <= column < COLUMNS:
            continue
        seconds[column] += point.seconds
        for name, count in point.made.items():
            made.setdefault(name, [0] * COLUMNS)[column] += count
    return {
        name: [count / time if time else None for count, time in zip(counts, seconds, strict=True)]
        for name, counts in made.items()
    }
