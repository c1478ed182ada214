"""The updates from which `mlxpool top` is drawn: models and workers in use, and the counters.

The reader computes rates from two updates.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlxpool.broker.metrics.histograms import FIRST_TOKEN, Frozen, Histogram
from mlxpool.broker.telemetry.ps import worker_row
from mlxpool.broker.telemetry.snapshot import ModelSnapshot, Snapshot
from mlxpool.broker.telemetry.stats import pool_stats

_EMPTY = Histogram(FIRST_TOKEN).frozen()


def top(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "broker": asdict(snapshot.broker),
        "stats": pool_stats(snapshot),
        "models": [_model_row(model) for model in snapshot.models if model.used],
        "workers": [worker_row(worker) for worker in snapshot.workers],
    }


def _model_row(model: ModelSnapshot) -> dict[str, Any]:
    return {
        "name": model.name,
        "state": model.state,
        "waiting": model.waiting,
        "running": model.running,
        "accepted": model.counts["accepted"],
        "tokens": model.counts["tokens"],
        "first_token": _histogram(model.histograms.get("first_token", _EMPTY)),
    }


def _histogram(histogram: Frozen) -> dict[str, Any]:
    """`counts[i]` counts values above bound i-1 and up to bound i, seconds; the last is open."""
    return {"bounds": list(histogram.bounds), "counts": list(histogram.counts)}
