"""The JSON that `mlxpool ps`, `stats`, `requests` and `top` print."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from mlxpool.broker.metrics import FIRST_TOKEN
from mlxpool.broker.requests.request import Request
from mlxpool.broker.telemetry.snapshot import ModelSnapshot, Snapshot, WorkerSnapshot
from mlxpool.common.metrics import Frozen, Histogram
from mlxpool.common.records import as_map


def stats(snapshot: Snapshot) -> dict[str, Any]:
    return {**_processes(snapshot), **pool_stats(snapshot)}


def _processes(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the maps of the broker and, if they exist, of its gateway and its jobs."""
    gateway = {} if snapshot.gateway is None else {"gateway": as_map(snapshot.gateway)}
    jobs = {} if snapshot.jobs is None else {"jobs": as_map(snapshot.jobs)}
    return {"broker": as_map(snapshot.broker), **gateway, **jobs}


def pool_stats(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the answer of `stats` without the maps that `_processes` returns."""
    counters, sizes = snapshot.counters, snapshot.sizes
    ended = counters.done + counters.failed + counters.cancelled
    return {
        "requests": {
            "accepted": counters.accepted,
            "done": counters.done,
            "failed": counters.failed,
            "cancelled": counters.cancelled,
            "live": sizes["requests"],
        },
        "resumed": counters.resumed,
        "preempted": counters.preempted,
        "conserved": counters.accepted == ended + sizes["requests"],
        "rejected": dict(counters.rejected),
        "failures": dict(counters.failures),
        "tokens": {"generated": counters.tokens, "prompt": counters.prompt_tokens},
        "frames": {"bad": counters.bad_frames, "fenced": counters.fenced},
        "seconds": {"queue": round(counters.queue_s, 3), "total": round(counters.total_s, 3)},
        "links": {"known": sizes["links"], "lost": counters.links_lost},
        "auth_failures": counters.auth_failures,
        "internal_errors": counters.internal_errors,
        "queued": sum(model.waiting for model in snapshot.models),
        "replicas_wanted": {
            model.name: model.replicas_wanted for model in snapshot.models if model.used
        },
        "tombstones": sizes["tombstones"],
        "poisoned": sizes["poisoned"],
        "sizes": dict(sizes),
    }


def ps(snapshot: Snapshot, last_dump: Callable[[str], Path | None]) -> dict[str, Any]:
    """Returns the answer of `ps`. `snapshot` must have been taken with `listing`.

    `last_dump` returns the newest file with stack traces of the worker of a slot.
    """
    workers = [
        {**worker_row(worker), "last_dump": _text(last_dump(worker.slot))}
        for worker in snapshot.workers
    ]
    return {
        **_processes(snapshot),
        "workers": workers,
        "models": [dict(row) for row in snapshot.listing],
    }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def worker_row(worker: WorkerSnapshot) -> dict[str, Any]:
    """Returns the row of a slot, with its worker's last heartbeat.

    Without a worker the row has only a few keys.
    """
    row: dict[str, Any] = {
        "slot": worker.slot,
        "model": worker.model,
        "restarts": worker.restarts,
        "last_exit": worker.last_exit or None,
    }
    beat = worker.beat
    if beat is None:
        return {**row, "pid": None, "epoch": None, "state": "none", "phase": None, "memory": {}}
    beat_age_ms = worker.beat_age * 1000
    return {
        **row,
        "pid": worker.pid,
        "epoch": worker.epoch,
        "state": worker.state,
        "phase": beat.phase or "boot",
        "phase_age_ms": round(beat.phase_age_ms + beat_age_ms),
        "progress_age_ms": round(worker.progress_age * 1000),
        "suspect": worker.suspect,
        "cause": worker.cause or None,
        "beat_age_ms": round(beat_age_ms),
        "progress": beat.progress,
        "tokens": worker.tokens,
        "running": beat.running,
        "waiting": beat.waiting,
        "step_ms": beat.step_ms,
        "uptime_s": round(worker.uptime, 3),
        "remote": worker.remote,
        "host": worker.host,
        "gpus": list(worker.gpus),
        "load_s": None if worker.load_s is None else round(worker.load_s, 3),
        "load_phase": beat.load.now or None,
        "load_phases": beat.load.shown,
        "context": worker.context,
        "load_progress": None if beat.load_progress is None else round(beat.load_progress, 3),
        "layout": beat.layout or None,
        "memory": beat.memory,
        "prefix": beat.prefix,
        "speculation": worker.speculation,
        "acceptance": None if worker.acceptance is None else round(worker.acceptance, 3),
        "ranks": [
            {
                "rank": rank,
                "pid": other.pid or None,
                "phase": other.phase,
                "progress_age_ms": round(other.progress_age * 1000),
                "rss": other.rss,
            }
            for rank, other in enumerate(worker.ranks, start=1)
        ],
    }


MAX_ROWS = 1000


def live_requests(requests: Iterable[Request], now: float) -> list[dict[str, Any]]:
    """Returns a row for each of the first MAX_ROWS requests; `requests` has the oldest first."""
    return [
        {
            "id": request.id.hex(),
            "model": request.model,
            "asked_for": request.other_name,
            "state": request.state.value,
            "owner": request.owner,
            "tokens": request.run.taken,
            "age_s": round(now - request.accepted_at, 3),
        }
        for request in islice(requests, MAX_ROWS)
    ]


_EMPTY = Histogram(FIRST_TOKEN).frozen()


def top(snapshot: Snapshot) -> dict[str, Any]:
    return {
        **_processes(snapshot),
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
    """Returns the bucket bounds in seconds, and the number of values in each bucket.

    Bucket i has the values above bound i - 1, up to bound i. The last bucket has no upper bound.
    """
    return {"bounds": list(histogram.bounds), "counts": list(histogram.counts)}
