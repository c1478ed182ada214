"""What the status page shows, as JSON; the page is its only reader, so the shape may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mlxpool.broker.telemetry.history import (
    COLUMN_SECONDS,
    POINT_INTERVAL,
    Point,
    RecentHistory,
    recent_rates,
)
from mlxpool.broker.telemetry.reports import pool_stats
from mlxpool.broker.telemetry.snapshot import (
    GatewayInfo,
    ModelSnapshot,
    Snapshot,
    WorkerSnapshot,
)

MAX_ROWS = 40  # of models and of workers: the page stays small however large the pool is
FAULTY = ("failed", "broken", "suspect", "condemned")
INACTIVE = ("cold", "drained", "none")
PARTS = ("weights", "kv", "prefix", "compute")  # of what MLX holds

Row = TypeVar("Row", ModelSnapshot, WorkerSnapshot)


def status(snapshot: Snapshot, history: RecentHistory, now: float) -> dict[str, Any]:
    """Seconds, bytes, and rates a second; `now` is on the clock of `history`."""
    points = list(history.points)
    columns = list(history.columns)
    last = points[-1].rates if points else {}
    models = _most_relevant(snapshot.models, lambda model: model.running + model.waiting)
    workers = _most_relevant(snapshot.workers, lambda worker: worker.running)
    broker, pool = snapshot.broker, pool_stats(snapshot)
    return {
        "broker": {
            "state": broker.state,
            "pid": broker.pid,
            "uptime_s": broker.uptime_s,
            "links": broker.links,
        },
        "gateway": _gateway(snapshot.gateway),
        "version": snapshot.process.versions[0],
        "lag_s": round(snapshot.lag, 4),
        "requests": pool["requests"],
        "resumed": pool["resumed"],
        "tokens": pool["tokens"]["generated"],
        "memory_limit": snapshot.memory_limit,
        "step_s": POINT_INTERVAL,
        "column_s": COLUMN_SECONDS,
        "past": _past(points, now),
        "models": [
            _model(model, last.get(model.name, 0.0), recent_rates(columns, model.name, now))
            for model in models
        ],
        "models_hidden": len(snapshot.models) - len(models),
        "workers": [_worker(worker) for worker in workers],
        "workers_hidden": len(snapshot.workers) - len(workers),
    }


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
    """At most MAX_ROWS, in their order: faulty ones first, then by load, inactive ones last."""
    if len(rows) <= MAX_ROWS:
        return list(rows)

    def rank(index: int) -> tuple[bool, bool, int, int]:
        row = rows[index]
        return row.state not in FAULTY, row.state in INACTIVE, -load(row), index

    chosen = sorted(range(len(rows)), key=rank)[:MAX_ROWS]
    return [rows[index] for index in sorted(chosen)]


def _past(points: Sequence[Point], now: float) -> dict[str, list[float | None]]:
    """One list for each figure, the oldest point first."""
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
    outcomes = model.outcomes
    done = sum(outcomes.get(reason, 0) for reason in ("stop", "length"))
    cancelled = outcomes.get("cancelled", 0)
    return {
        "name": model.name,
        "state": model.state,
        "running": model.running,
        "waiting": model.waiting,
        "accepted": model.counts["accepted"],
        "failed": sum(outcomes.values()) - done - cancelled,
        "tokens": model.counts["tokens"],
        "now": round(rate, 1),
        "recent": [_rounded(each, 1) for each in recent],
    }


def _worker(worker: WorkerSnapshot) -> dict[str, Any]:
    memory, taken = worker.memory, worker.memory_used
    parts = {kind: memory[kind] for kind in PARTS if kind in memory}
    if parts:
        parts["process"] = max(0, taken - sum(parts.values()))
    return {
        "slot": worker.slot,
        "model": worker.model,
        "state": worker.state,
        "phase": worker.phase,
        "running": worker.running,
        "uptime_s": round(worker.uptime, 1),
        "restarts": worker.restarts,
        "last_exit": worker.last_exit,
        "taken": taken,
        "limit": memory.get("limit", 0),
        "memory": parts,  # which add up to `taken`
    }
