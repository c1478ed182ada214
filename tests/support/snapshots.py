"""Snapshots of a core, for tests of their renderers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxpool.broker.telemetry import snapshot
from mlxpool.broker.telemetry.snapshot import BrokerInfo, Snapshot
from support.core_harness import Story

BROKER = BrokerInfo(
    pid=1,
    boot=2,
    state="ready",
    uptime_s=1.5,
    run_dir="/run",
    local_workers=True,
    links=2,
    front_shut=0,
    turned_out=0,
    descriptors=1024,
    endpoints={},
    metrics=None,
)


def of(story: Story, lag: float = 0.0, **broker: Any) -> Snapshot:
    """The snapshot of a story's core at its present time; `broker` are fields of BrokerInfo."""
    return snapshot.take(story.core.state, replace(BROKER, **broker), lag, story.now)
