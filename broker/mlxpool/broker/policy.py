"""Which request next, which worker, how long to wait: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from mlxpool.broker.requests import Request
from mlxpool.broker.workers import Worker

LOOK_AHEAD = 512  # requests looked at; a queue is bounded by as many by default


def next_request(queue: Iterable[Request]) -> Request | None:
    """The oldest of the highest priority (2 is the highest)."""
    return max(islice(queue, LOOK_AHEAD), key=lambda r: r.payload.priority, default=None)


def choose_worker(workers: Sequence[Worker]) -> Worker | None:
    """The one with the most free places, the longest ready first; None when none has any."""
    free = [worker for worker in workers if worker.credit() > 0]
    return max(free, key=lambda w: (w.credit(), -w.ready_at), default=None)


def restart_delay(failures: int, first: float, most: float) -> float:
    """Seconds to wait after `failures` incarnations in a row that never served: 1, 2, 4 … ."""
    return 0.0 if failures <= 0 else min(most, first * 2.0 ** min(failures - 1, 32))
