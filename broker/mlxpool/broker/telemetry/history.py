"""The last minutes of the pool, so that a status page just opened has them: a bounded ring.

Owned by the thread that notes; others may copy its lists. Size: POINTS points and COLUMNS columns,
each with one entry for every model that made tokens in its time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add, sub

from mlxpool.broker.metrics.histograms import FIRST_TOKEN, Frozen
from mlxpool.broker.telemetry.snapshot import Snapshot

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


@dataclass(eq=False, slots=True)
class Column:
    """Several points, for the plots of single models.

    It begins at a multiple of COLUMN, so that a plot moves and does not change its shape.
    """

    number: int  # its beginning / COLUMN
    seconds: float  # that its points stand for
    made: Counter[str]


class Past:
    """The ring. The first `note` only sets the counters that the next one subtracts."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.columns: deque[Column] = deque(maxlen=COLUMNS)
        self._at: float | None = None
        self._tokens: dict[str, int] = {}
        self._first: dict[str, Frozen] = {}

    def note(self, snapshot: Snapshot, at: float) -> None:
        """The figures of now; a model's first figures count from zero."""
        before, self._at = self._at, at
        made, first = self._made(snapshot), self._firsts(snapshot)
        if before is None or at <= before:
            return
        self._into_column(at, at - before, made)
        minute = [first, *(p.first for p in islice(reversed(self.points), RECENT - 1))]
        lately = [sum(bucket) for bucket in zip(*minute, strict=True)]
        self.points.append(
            Point(
                at,
                at - before,
                made,
                first,
                quantile(FIRST_TOKEN, lately, 0.5),
                quantile(FIRST_TOKEN, lately, 0.95),
                sum(model.running for model in snapshot.models),
                sum(model.waiting for model in snapshot.models),
                sum(worker.taken for worker in snapshot.workers),
            )
        )

    def _into_column(self, at: float, seconds: float, made: Mapping[str, int]) -> None:
        number = int(at // COLUMN)
        if self.columns and self.columns[-1].number == number:
            self.columns[-1].seconds += seconds
            self.columns[-1].made.update(made)
        else:  # whole before it is seen: readers divide by its seconds
            self.columns.append(Column(number, seconds, Counter(made)))

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


def recent(columns: Iterable[Column], model: str, now: float) -> list[float | None]:
    """Tokens a second of a model in COLUMNS columns to now, the newest last; [] if it made none.

    None: nothing was noted then.
    """
    found: list[float | None] = [None] * COLUMNS
    first, made = int(now // COLUMN) - COLUMNS + 1, False
    for column in columns:
        place = column.number - first
        if 0 <= place < COLUMNS:
            count = column.made.get(model, 0)
            found[place] = count / column.seconds
            made = made or count > 0
    return found if made else []
