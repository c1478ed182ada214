"""What a broker says of itself: its line in `ps`, and one for the service manager."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxpool.broker.edge.loop import Broker


def state(of: Broker) -> str:
    """`ready`, `draining` or `stopping`."""
    if of.stopping:
        return "stopping"
    return "ready" if of.core.state.admits else "draining"


def status(of: Broker) -> str:
    """A line for the service manager."""
    core = of.core.state
    busy = sum(bool(model.workers) for model in core.registry.models.values())
    told = f"{state(of)}: workers {len(core.workers)}, models with workers {busy}"
    return f"{told}, streams {len(core.requests)}"


def broker(of: Broker, now: float) -> Mapping[str, Any]:
    """The broker's own line in `ps`."""
    return {
        "pid": os.getpid(),
        "boot": of.boot,
        "state": state(of),
        "uptime_s": round(now - of.started_at, 3),
        "run_dir": str(of.config.run_dir),
        "local_workers": of.config.local_workers,
        "links": len(of.front.by_number),
        "front_shut": of.door.times_shut,
        "turned_out": of.guard.turned_out,
        "descriptors": of.descriptors,
        "endpoints": {**of.endpoints, "front": of.door.endpoints[1:]},
        "metrics": None if of.web is None else of.web.url,
    }
