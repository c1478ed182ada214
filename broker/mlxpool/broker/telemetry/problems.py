"""The present problems of the pool in the words of `mlxpool ps`, for the top of the status page.

A problem with an alert in deploy/prometheus/alerts.yml has the bounds of that alert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice

from msgspec import Struct

from mlxpool.broker.jobs.figures import REFUSING, UNUSABLE
from mlxpool.broker.models.listing import Fault
from mlxpool.broker.telemetry.history import RecentEvents
from mlxpool.broker.telemetry.snapshot import GATEWAY, Snapshot, WorkerSnapshot
from mlxpool.common.errors import (
    BY_CODE,
    Draining,
    Internal,
    ModelLoadFailed,
    ModelUnavailable,
    PoolFault,
)

LATE, VERY_LATE = 0.2, 1.0  # seconds for which the broker's loop did not read its sockets
LONG_WAIT = 30.0  # age of the oldest queued request, in seconds
FAILING_SHARE = 0.05  # share of ended streams that failed because of the pool
OF_MODELS = (
    ModelLoadFailed.code,
    ModelUnavailable.code,
)  # error codes whose cause is a fault of the model
MAX_DETAILS = 5
MAX_DETAIL_CHARS = 300


class Level(Enum):
    """The severity of a problem. The value is a CSS class of the page."""

    FINE = ""
    WARNING = "warn"
    BAD = "bad"


class Problem(Struct, frozen=True):
    """A problem. `what` is a heading. Each of `details` is about one model, worker or error."""

    level: Level
    what: str
    details: tuple[str, ...] = ()


def problems(snapshot: Snapshot, recent: RecentEvents, minutes: int) -> list[Problem]:
    """Returns the problems, the worst first. `recent` has the failures of the last `minutes`."""
    unsorted = (
        *_models(snapshot.faults),
        *_broker(snapshot),
        *_workers(snapshot.workers),
        *_restarts(snapshot, recent.restarts, minutes),
        *_queues(snapshot),
        *_failures(snapshot.faults, recent, minutes),
    )
    return sorted(unsorted, key=lambda problem: problem.level is not Level.BAD)


def lag_level(seconds: float) -> Level:
    """Returns the severity of a lag of the broker's loop."""
    if seconds >= VERY_LATE:
        return Level.BAD
    return Level.WARNING if seconds >= LATE else Level.FINE


def wait_level(seconds: float) -> Level:
    """Returns the severity of the wait of the oldest queued request."""
    return Level.WARNING if seconds >= LONG_WAIT else Level.FINE


def _models(faults: tuple[Fault, ...]) -> Iterator[Problem]:
    for state in ("failed", "broken"):
        matching = [fault for fault in faults if fault.state == state]
        if matching:
            yield Problem(
                Level.BAD, f"{_count(len(matching), 'model')} {state}", _reasons(matching)
            )
    others = [fault for fault in faults if fault.state not in ("failed", "broken")]
    if others:
        what = f"{_count(len(others), 'model')} cannot be had"
        yield Problem(Level.WARNING, what, _reasons(others))


def _reasons(faults: list[Fault]) -> tuple[str, ...]:
    return _details(f"{fault.name}: {fault.error}" for fault in faults)


def _broker(snapshot: Snapshot) -> Iterator[Problem]:
    if snapshot.broker.state != "ready":
        yield Problem(Level.WARNING, f"the broker is {snapshot.broker.state}")
    if snapshot.broker.trouble:
        what = "new workers and commands cannot reach the pool"
        yield Problem(Level.BAD, what, (snapshot.broker.trouble,))
    if snapshot.broker.slow_blas:
        what = "workers compute on the CPU without OpenBLAS"
        yield Problem(Level.WARNING, what, (snapshot.broker.slow_blas,))
    if snapshot.gateway is not None and snapshot.gateway.state == "restarting":
        why = f"it ended: {snapshot.gateway.last_exit}"
        yield Problem(Level.BAD, "the gateway is restarting: nothing answers over HTTP", (why,))
    if snapshot.jobs is not None and snapshot.jobs.store == REFUSING:
        what = "new jobs are refused: their store has no room"
        why = "release results, free the disk, or raise state_bytes; jobs that run go on"
        yield Problem(Level.BAD, what, (why,))
    elif snapshot.jobs is not None and snapshot.jobs.store == UNUSABLE:
        why = snapshot.jobs.why
        yield Problem(Level.WARNING, "no jobs are kept: their store cannot be used", (why,))
    elif snapshot.jobs is not None and snapshot.jobs.store != "ok":
        what = f"the store of jobs is {snapshot.jobs.store}"
        why = "no job is accepted or goes on until it is ok; streams are not affected"
        yield Problem(Level.BAD, what, (why,))
    if (level := lag_level(snapshot.lag)) is Level.BAD:
        late = f"every stream paused for up to {snapshot.lag:.1f} s in the last 30 s"
        yield Problem(level, "the broker was late", (late,))
    if (errors := snapshot.counters.internal_errors) > 0:
        where = "the log has a traceback of each"
        yield Problem(Level.WARNING, f"{_count(errors, 'internal error')} of the broker", (where,))


def _workers(workers: tuple[WorkerSnapshot, ...]) -> Iterator[Problem]:
    for state in ("suspect", "condemned"):
        matching = [worker for worker in workers if worker.shown_state == state]
        if matching:
            reasons = _details(f"{worker.slot}: {worker.cause}" for worker in matching)
            yield Problem(Level.WARNING, f"{_count(len(matching), 'worker')} {state}", reasons)


def _restarts(
    snapshot: Snapshot, all_restarts: Mapping[str, int], minutes: int
) -> Iterator[Problem]:
    """Yields a problem with the recent restarts of workers and of the gateway.

    Workers of unavailable models are left out, because `_models` reports these models.
    """
    faulty = {fault.name for fault in snapshot.faults}
    ends = {w.slot: w.last_exit for w in snapshot.workers if w.model not in faulty}
    if snapshot.gateway is not None:
        ends[GATEWAY] = snapshot.gateway.last_exit or "unknown"
    restarts = {slot: count for slot, count in all_restarts.items() if slot in ends}
    if restarts:
        what = f"{_count(sum(restarts.values()), 'restart')} in the last {minutes} min"
        lines = (f"{slot}: {ends[slot]}" for slot in restarts)
        yield Problem(Level.WARNING, what, _details(lines))


def _queues(snapshot: Snapshot) -> Iterator[Problem]:
    late = [model for model in snapshot.models if wait_level(model.oldest_wait) is not Level.FINE]
    if late:
        lines = (
            f"{model.name}: {model.waiting} waiting, the oldest for {model.oldest_wait:.0f} s"
            for model in late
        )
        yield Problem(
            Level.WARNING, f"requests have waited for over {LONG_WAIT:.0f} s", _details(lines)
        )


def _failures(faults: tuple[Fault, ...], recent: RecentEvents, minutes: int) -> Iterator[Problem]:
    explained = OF_MODELS if faults else ()
    codes = {
        code: count
        for code, count in recent.failures.items()
        if _is_pool_fault(code) and code not in explained
    }
    failed = sum(codes.values())
    if failed and failed >= FAILING_SHARE * recent.ended:
        what = f"{failed} of {recent.ended} requests failed in the last {minutes} min"
        yield Problem(Level.WARNING, what, _details(f"{code}: {n}" for code, n in codes.items()))


def _is_pool_fault(code: str) -> bool:
    kind = BY_CODE.get(code, Internal)
    return issubclass(kind, PoolFault) and kind is not Draining


def _details(lines: Iterator[str]) -> tuple[str, ...]:
    """Returns the first lines, each cut to MAX_DETAIL_CHARS, and the number of further lines."""
    shown = [line[:MAX_DETAIL_CHARS] for line in islice(lines, MAX_DETAILS)]
    more = sum(1 for _ in lines)
    return (*shown, *([f"and {more} more: mlxpool ps"] if more else []))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
