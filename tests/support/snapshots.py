"""Snapshots of a core, for tests of their renderers."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.telemetry import snapshot
from mlxpool.broker.telemetry.snapshot import Snapshot
from support.core_harness import Story

ABOUT: dict[str, Any] = {
    "state": "ready",
    "uptime_s": 1.5,
    "links": 2,
    "front_shut": 0,
    "turned_out": 0,
    "descriptors": 1024,
}


def of(story: Story, lag: float = 0.0, **about: Any) -> Snapshot:
    """The snapshot of a story's core at its present time."""
    return snapshot.take(story.core.state, {**ABOUT, **about}, lag, story.now)
