"""The JSON of the status page. Only the page reads it, so its form may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mlxpool.broker.metrics import Counters
from mlxpool.broker.telemetry.history import (
    COLUMN_SECONDS,
    MAX_POINTS,
    POINT_INTERVAL,
    Point,
    RecentEvents,
    RecentHistory,
    recent_events,
    recent_rates,
)
from mlxpool.broker.telemetry.problems import Level, lag_level, problems, wait_level
from mlxpool.broker.telemetry.reports import pool_stats
from mlxpool.broker.telemetry.snapshot import (
    GatewayInfo,
    LiveRequest,
    ModelSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from mlxpool.common.load_times import activity
from mlxpool.common.records import as_map
from mlxpool.common.version import VERSION

MINUTES = round(MAX_POINTS * POINT_INTERVAL / 60)
LEVELS = tuple(Level)
ID_DIGITS = 12  # number of shown digits of a request's id
GPU_CHARS = 12  # most shown characters of a GPU's name
MAX_ROWS = 40  # most rows of models, and of workers, on the page of a large pool
FAULTY = ("failed", "broken", "suspect", "condemned")
INACTIVE = ("cold", "drained", "none")
PARTS = ("weights", "kv", "prefix", "compute")  # kinds of memory that MLX holds

Row = TypeVar("Row", ModelSnapshot, WorkerSnapshot)


def status(snapshot: Snapshot, history: RecentHistory, now: float) -> dict[str, Any]:
    """Returns the JSON of the page. Its units are seconds, bytes, and numbers per second.

    `now` is on the clock of `history`.
    """
    points = list(history.points)
    recent = recent_events(points)
    columns = list(history.columns)
    last = points[-1].rates if points else {}
    models = _most_relevant(snapshot.models, lambda model: model.running + model.waiting)
    workers = _most_relevant(snapshot.workers, lambda worker: worker.running)
    broker, pool = snapshot.broker, pool_stats(snapshot)
    current = problems(snapshot, recent, MINUTES)
    states = {fault.name: fault.state for fault in snapshot.faults}
    return {
        "broker": {
            "state": broker.state,
            "pid": broker.pid,
            "uptime_s": broker.uptime_s,
            "links": broker.links,
            "level": max((p.level for p in current), key=LEVELS.index, default=Level.FINE).value,
        },
        "problems": [
            {"level": problem.level.value, "what": problem.what, "details": problem.details}
            for problem in current
        ],
        "levels": _levels(snapshot, recent),
        "gateway": _gateway(snapshot.gateway),
        "jobs": None if snapshot.jobs is None else as_map(snapshot.jobs),
        "version": VERSION,
        "lag_s": round(snapshot.lag, 4),
        "requests": pool["requests"],
        "rejected": sum(pool["rejected"].values()),
        "restarts": sum(snapshot.restarts.values()),
        "waiting": pool["queued"],
        "resumed": pool["resumed"],
        "tokens": pool["tokens"]["generated"],
        "memory_limit": snapshot.memory_limit,
        "step_s": POINT_INTERVAL,
        "column_s": COLUMN_SECONDS,
        "past": _past(points, now),
        "models": [
            {
                **_model(model, last.get(model.name, 0.0), recent_rates(columns, model.name, now)),
                "state": states.get(model.name, model.state),
                "failed_level": Level.BAD.value if recent.failing_models[model.name] else "",
            }
            for model in models
        ],
        "models_hidden": len(snapshot.models) - len(models),
        "workers": [_worker(worker, recent.restarts[worker.slot]) for worker in workers],
        "workers_hidden": len(snapshot.workers) - len(workers),
        "live": [_live(request) for request in snapshot.live],
        "live_hidden": snapshot.sizes["requests"] - len(snapshot.live),
        "errors": _errors(snapshot.counters, recent),
    }


def _levels(snapshot: Snapshot, recent: RecentEvents) -> dict[str, str]:
    """Returns the severity of each total on the page.

    `recent` has the failures in the time span that the page shows; older failures do not count.
    """
    return {
        "failed": Level.BAD.value if recent.failures else "",
        "rejected": Level.WARNING.value if recent.rejected else "",
        "restarts": Level.WARNING.value if recent.restarts else "",
        "lag": lag_level(snapshot.lag).value,
    }


def _live(request: LiveRequest) -> dict[str, Any]:
    """Returns the row of a live request, with the first digits of its id.

    An operator can cancel a request by these digits; a client needs the whole id.
    """
    return {
        "id": request.id.hex()[:ID_DIGITS],
        "model": request.model,
        "state": request.state,
        "slot": request.slot,
        "tokens": request.tokens,
        "age_s": round(request.age, 1),
    }


def _errors(counters: Counters, recent: RecentEvents) -> list[dict[str, Any]]:
    """Returns a row for each error code. Codes of the last minutes come first."""
    failures, rejected = counters.failures, counters.rejected
    rows = [
        {
            "code": code,
            "recent": recent.failures[code] + recent.rejected[code],
            "failed": failures[code],
            "rejected": rejected[code],
        }
        for code in sorted(failures.keys() | rejected.keys())
    ]
    return sorted(rows, key=lambda row: (-row["recent"], -row["failed"] - row["rejected"]))


def _gateway(gateway: GatewayInfo | None) -> dict[str, Any] | None:
    if gateway is None:
        return None
    return {
        "state": gateway.state,
        "url": gateway.url,
        "restarts": gateway.restarts,
        "last_exit": gateway.last_exit or "",
    }


def _most_relevant(rows: Sequence[Row], load: Callable[[Row], int]) -> list[Row]:
    """Returns at most MAX_ROWS rows, in their original order.

    Faulty rows are chosen first, then active rows by falling load, then inactive rows.
    """
    if len(rows) <= MAX_ROWS:
        return list(rows)

    def rank(index: int) -> tuple[bool, bool, int, int]:
        row = rows[index]
        return row.state not in FAULTY, row.state in INACTIVE, -load(row), index

    chosen = sorted(range(len(rows)), key=rank)[:MAX_ROWS]
    return [rows[index] for index in sorted(chosen)]


def _past(points: Sequence[Point], now: float) -> dict[str, list[float | None]]:
    """Returns the values of each figure at all points, the oldest point first."""
    return {
        "age_s": [round(now - point.at, 1) for point in points],
        "tokens_s": [round(point.rate, 1) for point in points],
        "running": [point.running for point in points],
        "waiting": [point.waiting for point in points],
        "memory": [point.memory for point in points],
        "median_s": [_rounded(point.median, 4) for point in points],
        "slow_s": [_rounded(point.p95, 4) for point in points],
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _model(model: ModelSnapshot, rate: float, recent: Sequence[float | None]) -> dict[str, Any]:
    return {
        "name": model.name,
        "running": model.running,
        "waiting": model.waiting,
        "oldest_wait_s": round(model.oldest_wait, 1),
        "wait_level": wait_level(model.oldest_wait).value,
        "accepted": model.counts["accepted"],
        "failed": model.failed,
        "tokens": model.counts["tokens"],
        "now": round(rate, 1),
        "recent": [_rounded(column, 1) for column in recent],
    }


def _load_progress(worker: WorkerSnapshot) -> float | None:
    """Returns the fraction of the weights that a loading worker has loaded.

    Returns None for other workers.
    """
    if worker.beat is None or worker.state not in ("starting", "loading"):
        return None
    return _rounded(worker.beat.load_progress, 3)


def _worker(worker: WorkerSnapshot, recent_restarts: int) -> dict[str, Any]:
    memory, taken = worker.memory, worker.memory_used
    parts = {kind: memory[kind] for kind in PARTS if kind in memory}
    if parts:
        parts["process"] = max(0, taken - sum(parts.values()))
    return {
        "slot": worker.slot,
        "model": worker.model,
        "gpus": [gpu[:GPU_CHARS] for gpu in worker.gpus],
        "state": worker.shown_state,
        "phase": activity(worker.phase, "" if worker.beat is None else worker.beat.load.now),
        "running": worker.running,
        "uptime_s": round(worker.uptime, 1),
        "load_progress": _load_progress(worker),
        "restarts": worker.restarts,
        "restarts_level": Level.WARNING.value if recent_restarts else "",
        "last_exit": worker.last_exit,
        "taken": taken,
        "limit": memory.get("limit", 0),
        "memory": parts,  # their sum is `taken`
    }
