"""What `mlxpool top` is drawn from: the moment's figures of what is in use, counters beside them.

Rates are the reader's: it has two pictures, and knows what lies between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.broker.core.state import State
from mlxpool.broker.metrics.histograms import Figures, Histogram
from mlxpool.broker.models.model import Model
from mlxpool.broker.telemetry import stats

NOTHING = Figures()  # of a model that nobody has asked for


def take(state: State, about: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Workers, and models that have or had work; `about` is the broker's own line."""
    used = [model for model in state.registry.models.values() if _in_use(state, model)]
    return {
        "broker": about,
        "stats": stats.stats(state, now),
        "models": [_model(state, model) for model in used],
        "workers": stats.workers(state, now),
    }


def _in_use(state: State, model: Model) -> bool:
    return bool(model.workers or model.queue or model.name in state.counters.models)


def _model(state: State, model: Model) -> dict[str, Any]:
    figures = state.counters.models.get(model.name, NOTHING)
    return {
        "name": model.name,
        "state": model.shown_state,
        "waiting": len(model.queue),
        "running": sum(len(worker.leases) for worker in model.workers),
        "accepted": figures.accepted,
        "tokens": figures.tokens,
        "first_token": _histogram(figures.first_token),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """`counts[i]` are those above bound i-1 and up to bound i, seconds; the last has no bound."""
    frozen = histogram.frozen()
    return {"bounds": list(frozen.bounds), "counts": list(frozen.counts)}
