"""The counters, as `mlxpool stats --json` and `/stats` print them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlxpool.broker.telemetry.snapshot import Snapshot


def stats(snapshot: Snapshot) -> dict[str, Any]:
    return {"broker": asdict(snapshot.broker), **pool_stats(snapshot)}


def pool_stats(snapshot: Snapshot) -> dict[str, Any]:
    """All of `stats` but the broker's own row."""
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
        "tombstones": sizes["tombstones"],
        "poisoned": sizes["poisoned"],
        "sizes": dict(sizes),
    }
