"""Ring buffers with the figures of the last minutes, for a newly opened status page.

One thread writes them; other threads may copy the lists. There are at most MAX_POINTS points and
MAX_COLUMNS columns. A point or column has an entry for each model that made tokens in the period
that it covers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import add, sub

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.broker.metrics import FIRST_TOKEN
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.common.metrics import Frozen

POINT_INTERVAL = 2.0  # seconds
MAX_POINTS = 300  # points of ten minutes
QUANTILE_POINTS = 30  # points of the last minute, for quantiles
COLUMN_SECONDS = 10.0  # seconds of a column in the plot of a model
MAX_COLUMNS = 60

Buckets = tuple[int, ...]
_EMPTY: Buckets = (0,) * (len(FIRST_TOKEN) + 1)


class Point(Struct, frozen=True):
    """The state of the pool at one moment, and the increases since the previous point.

    Times are in seconds, and memory is in bytes.
    """

    at: float
    seconds: float  # seconds since the previous point
    tokens: Mapping[str, int]  # increase of tokens, of each model that made tokens
    first_token: Buckets  # increase of first tokens, by the buckets FIRST_TOKEN
    median: float | None  # median seconds to the first token, over the last minute
    p95: float | None  # 95th percentile of these times
    running: int
    waiting: int
    memory: int  # of all workers
    ended: int  # ended streams since the previous point
    failures: Mapping[str, int]  # failed streams since the previous point, by error code
    failing_models: Mapping[str, int]  # failed streams since the previous point, by model
    rejected: Mapping[str, int]  # rejected requests since the previous point, by code
    restarts: Mapping[str, int]  # restarts since the previous point, see Snapshot.restarts

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second of each model that made tokens."""
        return {name: count / self.seconds for name, count in self.tokens.items()}

    @property
    def rate(self) -> float:
        """Tokens a second of all models."""
        return sum(self.tokens.values()) / self.seconds


class RateColumn(Struct, eq=False):
    """Tokens of several points: a column in the plots of a model.

    Each column begins at a multiple of COLUMN_SECONDS, so that complete columns do not change
    when the plot moves on.
    """

    number: int  # the column's start time / COLUMN_SECONDS
    seconds: float  # sum of the seconds of the column's points
    tokens: Counter[str]


class RecentEvents(Struct, frozen=True):
    """Sums over all points: ended, failed and rejected requests, and restarts."""

    ended: int  # all ended streams
    failures: Counter[str]  # failed streams, by error code
    failing_models: Counter[str]  # failed streams, by model
    rejected: Counter[str]  # rejected requests, by code
    restarts: Counter[str]  # see Snapshot.restarts


class Increase:
    """Computes the increases of named counts from one call of `since` to the next."""

    def __init__(self) -> None:
        self._seen: Mapping[str, int] = {}

    def since(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the increases since the last call. A new count increases from zero."""
        grown = {name: count - self._seen.get(name, 0) for name, count in counts.items()}
        self._seen = counts
        return {name: count for name, count in grown.items() if count > 0}


class RecentHistory:
    """The ring buffers of points and columns, from which a status page draws its first plots.

    The first `record` only stores the counters, as a base for the next call.
    """

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self.columns: deque[RateColumn] = deque(maxlen=MAX_COLUMNS)
        self._at: float | None = None
        self._ended = 0
        self._tokens, self._failures, self._failing, self._rejected, self._restarts = (
            Increase() for _ in range(5)
        )
        self._first_token: dict[str, Frozen] = {}

    def record(self, snapshot: Snapshot, at: float) -> None:
        """Appends a point. The counters of a new model increase from zero."""
        before, self._at = self._at, at
        counters = snapshot.counters
        all_ended = counters.done + counters.failed + counters.cancelled
        ended, self._ended = all_ended - self._ended, all_ended
        tokens = self._tokens.since({m.name: m.counts["tokens"] for m in snapshot.models})
        first_token = self._new_first_tokens(snapshot)
        failures = self._failures.since(counters.failures)
        failing = self._failing.since({model.name: model.failed for model in snapshot.models})
        rejected = self._rejected.since(counters.rejected)
        restarts = self._restarts.since(snapshot.restarts)
        if before is None or at <= before:
            return
        self.add_to_column(at, at - before, tokens)
        earlier = islice(reversed(self.points), QUANTILE_POINTS - 1)
        minute = [first_token, *(point.first_token for point in earlier)]
        buckets = [sum(bucket) for bucket in zip(*minute, strict=True)]
        self.points.append(
            Point(
                at,
                at - before,
                tokens,
                first_token,
                quantile(FIRST_TOKEN, buckets, 0.5),
                quantile(FIRST_TOKEN, buckets, 0.95),
                sum(model.running for model in snapshot.models),
                sum(model.waiting for model in snapshot.models),
                sum(worker.memory_used for worker in snapshot.workers),
                ended,
                failures,
                failing,
                rejected,
                restarts,
            )
        )

    def add_to_column(self, at: float, seconds: float, tokens: Mapping[str, int]) -> None:
        """Adds the tokens of the `seconds` before `at` to the column of that time."""
        number = int(at // COLUMN_SECONDS)
        if self.columns and self.columns[-1].number == number:
            self.columns[-1].seconds += seconds
            self.columns[-1].tokens.update(tokens)
        else:  # appended when complete: another thread may read it, and divides by its seconds
            self.columns.append(RateColumn(number, seconds, Counter(tokens)))

    def _new_first_tokens(self, snapshot: Snapshot) -> Buckets:
        total = _EMPTY
        for model in snapshot.models:
            if (now := model.histograms.get("first_token")) is None:
                continue
            before = self._first_token.get(model.name)
            if now is not before:
                new = map(sub, now.counts, before.counts if before else _EMPTY)
                total = tuple(map(add, total, new))
                self._first_token[model.name] = now
        return total


def recent_events(points: Iterable[Point]) -> RecentEvents:
    """Returns the sums over all points: ended, failed and rejected requests, and restarts."""
    events = RecentEvents(0, Counter(), Counter(), Counter(), Counter())
    ended = 0
    for point in points:
        ended += point.ended
        events.failures.update(point.failures)
        events.failing_models.update(point.failing_models)
        events.rejected.update(point.rejected)
        events.restarts.update(point.restarts)
    return replace(events, ended=ended)


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Returns the quantile `part` of all values, 0 < part < 1; None without values.

    The values of a bucket are assumed to be spread evenly. The last bound replaces each value above
    it.
    """
    rank, below, low = part * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return bounds[-1] if sum(counts) else None


def recent_rates(columns: Iterable[RateColumn], model: str, now: float) -> list[float | None]:
    """Returns the tokens a second of a model in MAX_COLUMNS columns up to now, the newest last.

    A column without a recorded point is None. Returns [] if the model made no token in that time.
    """
    rates: list[float | None] = [None] * MAX_COLUMNS
    first, used = int(now // COLUMN_SECONDS) - MAX_COLUMNS + 1, False
    for column in columns:
        index = column.number - first
        if 0 <= index < MAX_COLUMNS:
            count = column.tokens.get(model, 0)
            rates[index] = count / column.seconds
            used = used or count > 0
    return rates if used else []
