"""What is wrong with the pool now, in the words of `mlxpool ps`: the strip of the status page.

The bounds are those of the alerts in deploy/prometheus/alerts.yml where there is such an alert.
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

LATE, VERY_LATE = 0.2, 1.0  # seconds that the broker's loop did not read its sockets
LONG_WAIT = 30.0  # seconds of the oldest request in a queue
FAILING_SHARE = 0.05  # of the streams that ended, by the pool's fault
OF_MODELS = (ModelLoadFailed.code, ModelUnavailable.code)  # errors that a fault explains
MAX_DETAILS = 5
MAX_DETAIL_CHARS = 300


class Level(Enum):
    """How bad it is; the value is a class of the page."""

    FINE = ""
    WARNING = "warn"
    BAD = "bad"


class Problem(Struct, frozen=True):
    """`what` is a heading; `details` say which model, worker or error, a line for each."""

    level: Level
    what: str
    details: tuple[str, ...] = ()


def problems(snapshot: Snapshot, recent: RecentEvents, minutes: int) -> list[Problem]:
    """The worst first. `recent` are the events of the last `minutes`."""
    found = (
        *_models(snapshot.faults),
        *_broker(snapshot),
        *_workers(snapshot.workers),
        *_restarts(snapshot, recent.restarts, minutes),
        *_queues(snapshot),
        *_failures(snapshot.faults, recent, minutes),
    )
    return sorted(found, key=lambda problem: problem.level is not Level.BAD)


def lag_level(seconds: float) -> Level:
    """Of the broker's loop."""
    if seconds >= VERY_LATE:
        return Level.BAD
    return Level.WARNING if seconds >= LATE else Level.FINE


def wait_level(seconds: float) -> Level:
    """Of the oldest request in a queue."""
    return Level.WARNING if seconds >= LONG_WAIT else Level.FINE


def _models(faults: tuple[Fault, ...]) -> Iterator[Problem]:
    for state in ("failed", "broken"):
        found = [fault for fault in faults if fault.state == state]
        if found:
            yield Problem(Level.BAD, f"{_count(len(found), 'model')} {state}", _reasons(found))
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
        found = [worker for worker in workers if worker.shown_state == state]
        if found:
            reasons = _details(f"{worker.slot}: {worker.cause}" for worker in found)
            yield Problem(Level.WARNING, f"{_count(len(found), 'worker')} {state}", reasons)


def _restarts(
    snapshot: Snapshot, all_restarts: Mapping[str, int], minutes: int
) -> Iterator[Problem]:
    """Those of models that cannot be had are told with these."""
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
    told = OF_MODELS if faults else ()
    codes = {
        code: count
        for code, count in recent.failures.items()
        if _is_pool_fault(code) and code not in told
    }
    failed = sum(codes.values())
    if failed and failed >= FAILING_SHARE * recent.ended:
        what = f"{failed} of {recent.ended} requests failed in the last {minutes} min"
        yield Problem(Level.WARNING, what, _details(f"{code}: {n}" for code, n in codes.items()))


def _is_pool_fault(code: str) -> bool:
    kind = BY_CODE.get(code, Internal)
    return issubclass(kind, PoolFault) and kind is not Draining


def _details(lines: Iterator[str]) -> tuple[str, ...]:
    """The first of them, cut to their bounds, and how many there are more."""
    shown = [line[:MAX_DETAIL_CHARS] for line in islice(lines, MAX_DETAILS)]
    more = sum(1 for _ in lines)
    return (*shown, *([f"and {more} more: mlxpool ps"] if more else []))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
