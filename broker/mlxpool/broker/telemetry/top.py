"""What `mlxpool top` is drawn from: the moment's figures of what is in use, counters beside them.

Rates are the reader's: it has two pictures, and knows what lies between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlxpool.broker.metrics.histograms import Figures, Histogram
from mlxpool.broker.telemetry import stats

if TYPE_CHECKING:
    from mlxpool.broker.core.core import Core
    from mlxpool.broker.workers.worker import Model

NOTHING = Figures()  # of a model that nobody has asked for


def take(core: Core, about: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Workers, and models that have or had work; `about` is the broker's own line."""
    used = [model for model in core.fleet.models.values() if _in_use(core, model)]
    return {
        "broker": about,
        "stats": stats.stats(core, now),
        "models": [_model(core, model) for model in used],
        "workers": stats.workers(core, now),
    }


def _in_use(core: Core, model: Model) -> bool:
    return bool(model.workers or model.queue or model.name in core.counters.models)


def _model(core: Core, model: Model) -> dict[str, Any]:
    figures = core.counters.models.get(model.name, NOTHING)
    return {
        "name": model.name,
        "state": model.state(core.config.restart_limit),
        "waiting": len(model.queue),
        "running": sum(len(worker.places) for worker in model.workers),
        "accepted": figures.accepted,
        "tokens": figures.tokens,
        "first_token": _histogram(figures.first_token),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """`counts[i]` are those above bound i-1 and up to bound i, seconds; the last has no bound."""
    frozen = histogram.frozen()
    return {"bounds": list(frozen.bounds), "counts": list(frozen.counts)}
