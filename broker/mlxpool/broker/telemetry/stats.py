"""The snapshots that `mlxpool stats`, `ps` and `requests` show; they read the core's State."""

from __future__ import annotations

from itertools import islice
from typing import Any

from mlxpool.broker.core.state import State
from mlxpool.broker.models import listing
from mlxpool.broker.workers.slot import Slot

MAX_REQUESTS = 1000  # rows of `requests`


def stats(state: State, now: float) -> dict[str, Any]:
    """The counters, as `mlxpool stats --json` prints them."""
    counters = state.counters
    return {
        "requests": {
            "accepted": counters.accepted,
            "done": counters.done,
            "failed": counters.failed,
            "cancelled": counters.cancelled,
            "live": len(state.requests),
        },
        "resumed": counters.resumed,
        "conserved": counters.accepted
        == counters.done + counters.failed + counters.cancelled + len(state.requests),
        "rejected": dict(counters.rejected),
        "failures": dict(counters.failures),
        "tokens": {"generated": counters.tokens, "prompt": counters.prompt_tokens},
        "frames": {"bad": counters.bad_frames, "fenced": counters.fenced},
        "seconds": {"queue": round(counters.queue_s, 3), "total": round(counters.total_s, 3)},
        "links": {"known": len(state.links), "lost": counters.links_lost},
        "auth_failures": counters.auth_failures,
        "internal_errors": counters.internal_errors,
        "queued": sum(len(model.queue) for model in state.registry.models.values()),
        "tombstones": len(state.tombstones),
        "poisoned": len(state.quarantine),
        "sizes": sizes(state),
    }


def sizes(state: State) -> dict[str, int]:
    """Entries of every map; idle means none but tombstones, poison and what watches them."""
    workers = [worker for model in state.registry.models.values() for worker in model.workers]
    return {
        "requests": len(state.requests),
        "links": len(state.links),
        "asked": len(state.calls),
        "tombstones": len(state.tombstones),
        "poisoned": len(state.quarantine),
        "timers": len(state.timers),
        "epochs": len(state.workers),
        "places": sum(len(worker.leases) for worker in workers),
        "prefixes": sum(len(worker.prefixes) for worker in workers),
    }


def requests(state: State, now: float) -> list[dict[str, Any]]:
    """Live requests, the oldest first, as `mlxpool requests --json` prints them."""
    return [
        {
            "id": request.id.hex(),
            "model": request.message.model,
            "state": request.state.value,
            "owner": request.owner,
            "tokens": request.run.taken,
            "age_s": round(now - request.accepted_at, 3),
        }
        for request in islice(state.requests.values(), MAX_REQUESTS)
    ]


def ps(state: State, now: float) -> dict[str, Any]:
    """Workers and models, as `mlxpool ps --json` prints them."""
    models = [
        {"path": state.registry.names.known[row["name"]].config.path, **row}
        for row in listing.rows(state.registry, now)
    ]
    return {"workers": workers(state, now), "models": models}


def workers(state: State, now: float) -> list[dict[str, Any]]:
    """Every slot that has or had a worker, and what its last beat said."""
    used = [slot for slot in state.registry.slots.values() if slot.worker or slot.last_exit]
    return [_worker(slot, now) for slot in used]


def _worker(slot: Slot, now: float) -> dict[str, Any]:
    worker = slot.worker
    row: dict[str, Any] = {
        "slot": slot.name,
        "model": slot.model,
        "restarts": slot.restarts,
        "last_exit": slot.last_exit or None,
    }
    if worker is None:
        return {**row, "pid": None, "epoch": None, "state": "none", "phase": None, "memory": {}}
    beat, hello = worker.beat, worker.hello
    since = max(0.0, now - (worker.beat_at or worker.started_at))
    return {
        **row,
        "pid": worker.pid,
        "epoch": worker.epoch,
        "state": worker.state.shown,
        "phase": beat.phase or "boot",
        "phase_age_ms": round(beat.phase_age_ms + since * 1000),
        "progress_age_ms": round(worker.watch.still * 1000),
        "suspect": bool(worker.suspect_since),
        "cause": worker.cause or worker.suspicion or None,
        "beat_age_ms": round(since * 1000),
        "progress": beat.progress,
        "tokens": worker.tokens,
        "running": beat.running,
        "waiting": beat.waiting,
        "step_ms": beat.step_ms,
        "uptime_s": round(now - worker.started_at, 3),
        "remote": worker.remote,
        "host": None if hello is None else hello.host,
        "load_s": round(worker.ready_at - worker.started_at, 3) if worker.ready_at else None,
        "context": None if hello is None else hello.context,
        "layout": beat.layout or None,
        "memory": beat.memory,
        "prefix": beat.prefix,
    }
