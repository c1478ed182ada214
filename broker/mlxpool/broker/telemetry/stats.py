"""Counters, and the snapshots that `mlxpool stats` and `mlxpool ps` show.

The conservation law: accepted = done + failed + cancelled + live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from mlxpool.broker.metrics.histograms import Figures
from mlxpool.broker.requests.request import Request, State

if TYPE_CHECKING:
    from mlxpool.broker.core.core import Core
    from mlxpool.broker.workers.pool import Fleet
    from mlxpool.broker.workers.worker import Model, Slot

SHORT = 12  # digits of a digest that are shown
DETAILED = 150  # models whose details fit into one body
WORDS = 200  # characters of an error that clients are shown of each
BRIEF = ("name", "state", "queued", "context", "chat")


@dataclass(eq=False, slots=True)
class Counters:
    """Everything only ever counts up."""

    accepted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0  # taken from workers
    prompt_tokens: int = 0
    resumed: int = (
        0  # times a request went back to the queue because its worker was lost or drained
    )
    fenced: int = 0  # worker frames of an epoch or a place that no longer counts
    bad_frames: int = 0  # what was not a message
    links_lost: int = 0
    auth_failures: int = 0  # hellos without a valid token
    internal_errors: int = 0  # events that met a bug of ours
    rejected: Counter[str] = field(default_factory=Counter)  # by error code, never accepted
    failures: Counter[str] = field(default_factory=Counter)  # by error code, accepted
    queue_s: float = 0.0  # sums over ended requests
    total_s: float = 0.0
    models: dict[str, Figures] = field(default_factory=dict)

    def of(self, model: str) -> Figures:
        """Those of one model. Only for models that there are: each stays for ever."""
        figures = self.models.get(model)
        if figures is None:
            figures = self.models[model] = Figures()
        return figures

    def accept(self, request: Request) -> None:
        self.accepted += 1
        self.of(request.payload.model).accepted += 1

    def resume(self, request: Request) -> None:
        """It goes back to the queue with what it has."""
        self.resumed += 1
        self.of(request.payload.model).resumed += 1

    def end(self, request: Request, outcome: str, now: float) -> None:
        """Count an ended request once; `outcome` is its reason or its error's code."""
        self.of(request.payload.model).ended(request, outcome, now)
        if request.state is State.DONE:
            self.done += 1
        elif request.state is State.FAILED:
            self.failed += 1
        else:
            self.cancelled += 1
        self.prompt_tokens += request.prompt_tokens
        self.queue_s += max(0.0, (request.assigned_at or now) - request.accepted_at)
        self.total_s += now - request.accepted_at


def stats(core: Core, now: float) -> dict[str, Any]:
    """The counters, as `mlxpool stats --json` prints them."""
    counters = core.counters
    return {
        "requests": {
            "accepted": counters.accepted,
            "done": counters.done,
            "failed": counters.failed,
            "cancelled": counters.cancelled,
            "live": len(core.requests),
        },
        "resumed": counters.resumed,
        "conserved": counters.accepted
        == counters.done + counters.failed + counters.cancelled + len(core.requests),
        "rejected": dict(counters.rejected),
        "failures": dict(counters.failures),
        "tokens": {"generated": counters.tokens, "prompt": counters.prompt_tokens},
        "frames": {"bad": counters.bad_frames, "fenced": counters.fenced},
        "seconds": {"queue": round(counters.queue_s, 3), "total": round(counters.total_s, 3)},
        "links": {"known": len(core.links), "lost": counters.links_lost},
        "auth_failures": counters.auth_failures,
        "internal_errors": counters.internal_errors,
        "queued": sum(len(model.queue) for model in core.fleet.models.values()),
        "tombstones": len(core.tombstones),
        "poisoned": len(core.poisoned),
        "sizes": sizes(core),
    }


def sizes(core: Core) -> dict[str, int]:
    """Entries of every map; idle means none but tombstones, poison and what watches them."""
    workers = [worker for model in core.fleet.models.values() for worker in model.workers]
    return {
        "requests": len(core.requests),
        "links": len(core.links),
        "asked": len(core.asked),
        "tombstones": len(core.tombstones),
        "poisoned": len(core.poisoned),
        "timers": len(core.timers),
        "epochs": len(core.fleet.by_epoch),
        "places": sum(len(worker.places) for worker in workers),
        "prefixes": sum(len(worker.known) for worker in workers),
    }


def requests(core: Core, now: float, most: int = 1000) -> list[dict[str, Any]]:
    """Live requests, the oldest first, as `mlxpool requests --json` prints them."""
    return [
        {
            "id": request.id.hex(),
            "model": request.payload.model,
            "state": request.state.value,
            "owner": request.owner,
            "tokens": request.taken,
            "age_s": round(now - request.accepted_at, 3),
        }
        for request in islice(core.requests.values(), most)
    ]


def ps(core: Core, now: float) -> dict[str, Any]:
    """Workers and models, as `mlxpool ps --json` prints them."""
    models = [
        {"path": core.fleet.names.known[row["name"]].config.path, **row}
        for row in core.model_list(now)
    ]
    return {"workers": workers(core, now), "models": models}


def workers(core: Core, now: float) -> list[dict[str, Any]]:
    """Every slot that has or had a worker, and what its last beat said."""
    used = [slot for slot in core.fleet.slots.values() if slot.worker or slot.last_exit]
    return [_worker(slot, now) for slot in used]


def models(fleet: Fleet, restart_limit: int, now: float) -> list[dict[str, Any]]:
    """Every name and what is known of its model, as `mlxpool models --json` prints them."""
    return [_model(fleet, name, restart_limit, now) for name in fleet.names.offered()]


def brief(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for clients, whose frames are small: of many models only what changes."""
    if len(rows) > DETAILED:
        return [{key: row[key] for key in BRIEF} for row in rows]
    return [{**row, "error": row["error"] and row["error"][:WORDS]} for row in rows]


def _model(fleet: Fleet, name: str, restart_limit: int, now: float) -> dict[str, Any]:
    known, model = fleet.names.known[name], fleet.model(name)
    trouble, state = fleet.verdict(model, now, name), model.state(restart_limit)
    if state == "cold" and known.fault is not None:
        state = "failed"
    told = [worker.hello for worker in model.workers]
    digest = next(filter(None, (str(hello.get("digest", "")) for hello in told)), known.digest)
    context = max((int(hello.get("context", 0)) for hello in told), default=0)
    usual = min(filter(None, (known.config.context, known.about.get("context"))), default=0)
    return {
        "name": name,
        "state": state,
        "queued": len(model.queue),
        "context": context or usual,
        "type": known.about.get("type"),
        "size": known.about.get("size"),
        "quantisation": known.about.get("quantisation"),
        "features": list(known.about.get("features") or ()),
        "chat": _chat_of(known.about),
        "layout": next(filter(None, (worker.beat.get("layout") for worker in model.workers)), None),
        "digest": digest[:SHORT] or None,
        "shares": None if model.name == name else model.name,
        "error": trouble.message if trouble is not None else _said(model) or known.fault,
    }


def _chat_of(about: Mapping[str, Any]) -> dict[str, str | None] | None:
    chat = about.get("chat")
    return {key: chat.get(key) for key in ("tools", "thinking")} if chat else None


def _said(model: Model) -> str | None:
    """Why its last worker could not load it; it stands until somebody asks for the model again."""
    return None if model.last_error is None else str(model.last_error.get("message", ""))


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
    beat = worker.beat
    since = max(0.0, now - (worker.beat_at or worker.started_at))
    return {
        **row,
        "pid": worker.pid,
        "epoch": worker.epoch,
        "state": worker.state.value,
        "phase": beat.get("phase", "boot"),
        "phase_age_ms": round(float(beat.get("phase_age_ms", 0)) + since * 1000),
        "progress_age_ms": round(worker.watch.still * 1000),
        "suspect": bool(worker.suspect_since),
        "cause": worker.cause or worker.suspicion or None,
        "beat_age_ms": round(since * 1000),
        "progress": beat.get("progress", 0),
        "tokens": worker.made,
        "running": beat.get("running", 0),
        "waiting": beat.get("waiting", 0),
        "step_ms": beat.get("step_ms", 0),
        "uptime_s": round(now - worker.started_at, 3),
        "remote": worker.remote,
        "host": worker.hello.get("host"),
        "load_s": round(worker.ready_at - worker.started_at, 3) if worker.ready_at else None,
        "context": worker.hello.get("context"),
        "layout": beat.get("layout") or None,
        "memory": beat.get("memory", {}),
        "prefix": beat.get("prefix", {}),
    }
