"""What the status page shows, as JSON; the page is its only reader, so the shape may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mlxpool.broker.telemetry.history import COLUMN, STEP, Past, Point, recent
from mlxpool.broker.telemetry.metric_table import VERSION
from mlxpool.broker.telemetry.snapshot import ModelView, Snapshot, WorkerView

SHOWN = 40  # models, and workers: the page stays small however large the pool is
TROUBLE = ("failed", "broken", "suspect", "condemned")
ASLEEP = ("cold", "drained", "none")
MEMORY = ("weights", "kv", "prefix", "limit")

Row = TypeVar("Row", ModelView, WorkerView)


def status(snapshot: Snapshot, past: Past, now: float) -> dict[str, Any]:
    """Times are seconds, memory is bytes, rates a second's; `now` is on the clock of `past`."""
    points = list(past.points)
    columns = list(past.columns)
    last = points[-1].rates if points else {}
    models = _first(snapshot.models, lambda model: model.running + model.waiting)
    workers = _first(snapshot.workers, lambda worker: worker.running)
    broker = snapshot.stats["broker"]
    return {
        "broker": {key: broker.get(key) for key in ("state", "pid", "uptime_s", "links")},
        "version": VERSION,
        "lag_s": round(snapshot.lag, 4),
        "requests": snapshot.stats["requests"],
        "resumed": snapshot.stats["resumed"],
        "tokens": snapshot.stats["tokens"]["generated"],
        "memory_limit": snapshot.memory_limit,
        "step_s": STEP,
        "column_s": COLUMN,
        "past": _past(points, now),
        "models": [
            _model(model, last.get(model.name, 0.0), recent(columns, model.name, now))
            for model in models
        ],
        "models_hidden": len(snapshot.models) - len(models),
        "workers": [_worker(worker) for worker in workers],
        "workers_hidden": len(snapshot.workers) - len(workers),
    }


def _first(rows: Sequence[Row], load: Callable[[Row], int]) -> list[Row]:
    """At most SHOWN, in their order: those in trouble first, then by load, the sleeping last."""
    if len(rows) <= SHOWN:
        return list(rows)

    def rank(place: int) -> tuple[bool, bool, int, int]:
        row = rows[place]
        return row.state not in TROUBLE, row.state in ASLEEP, -load(row), place

    chosen = sorted(range(len(rows)), key=rank)[:SHOWN]
    return [rows[place] for place in sorted(chosen)]


def _past(points: Sequence[Point], now: float) -> dict[str, list[float | None]]:
    """One list for each figure, the oldest first."""
    return {
        "age_s": [round(now - point.at, 1) for point in points],
        "tokens_s": [round(point.rate, 1) for point in points],
        "running": [point.running for point in points],
        "waiting": [point.waiting for point in points],
        "memory": [point.memory for point in points],
        "median_s": [_rounded(point.median, 4) for point in points],
        "slow_s": [_rounded(point.slow, 4) for point in points],
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _model(model: ModelView, rate: float, made: Sequence[float | None]) -> dict[str, Any]:
    ends = model.outcomes
    done = sum(ends.get(reason, 0) for reason in ("stop", "length"))
    cancelled = ends.get("cancelled", 0)
    return {
        "name": model.name,
        "state": model.state,
        "running": model.running,
        "waiting": model.waiting,
        "accepted": model.counts["accepted"],
        "failed": sum(ends.values()) - done - cancelled,
        "tokens": model.counts["tokens"],
        "now": round(rate, 1),
        "recent": [_rounded(each, 1) for each in made],
    }


def _worker(worker: WorkerView) -> dict[str, Any]:
    return {
        "slot": worker.slot,
        "model": worker.model,
        "state": worker.state,
        "phase": worker.phase,
        "running": worker.running,
        "uptime_s": round(worker.uptime, 1),
        "restarts": worker.restarts,
        "last_exit": worker.last_exit,
        "taken": worker.taken,
        "memory": {kind: worker.memory[kind] for kind in MEMORY if kind in worker.memory},
    }
