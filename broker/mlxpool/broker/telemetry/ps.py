"""Workers and models, as `mlxpool ps --json` prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxpool.broker.telemetry.snapshot import Snapshot, WorkerSnapshot


def ps(snapshot: Snapshot, last_dump: Callable[[str], Path | None]) -> dict[str, Any]:
    """`snapshot` has a listing; `last_dump` finds the newest file with stacks of a slot."""
    workers = [
        {**worker_row(worker), "last_dump": _text(last_dump(worker.slot))}
        for worker in snapshot.workers
    ]
    return {
        "broker": asdict(snapshot.broker),
        "workers": workers,
        "models": [dict(row) for row in snapshot.listing],
    }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def worker_row(worker: WorkerSnapshot) -> dict[str, Any]:
    """A slot and what the last beat of its worker said; few keys where it has none."""
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
        "load_s": None if worker.load_s is None else round(worker.load_s, 3),
        "context": worker.context,
        "layout": beat.layout or None,
        "memory": beat.memory,
        "prefix": beat.prefix,
    }
