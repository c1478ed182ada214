"""Snapshots of the broker's core, for tests of their renderers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.telemetry import snapshot
from mlxpool.broker.telemetry.snapshot import BrokerInfo, GatewayInfo, Snapshot
from support.core_harness import Story

BROKER = BrokerInfo(
    pid=1,
    boot=2,
    state="ready",
    uptime_s=1.5,
    run_dir="/run",
    local_workers=True,
    links=2,
    full_links=1,
    backlog_bytes=500,
    given_up=3,
    front_shut=0,
    turned_out=0,
    descriptors=1024,
    endpoints={},
    metrics=None,
)


GATEWAY = GatewayInfo(
    url="http://127.0.0.1:11434",
    state="ready",
    pid=3,
    uptime_s=1.0,
    rss=50_000_000,
    restarts=2,
    last_exit="killed by SIGKILL",
)


JOBS = JobFigures(
    3, 2, 10, 1, 1, 0, readers=2, bytes=1_000_000, max_bytes=8_000_000, room=5_400_000
)


def of(
    story: Story,
    lag: float = 0.0,
    gateway: GatewayInfo | None = None,
    jobs: JobFigures | None = None,
    **broker: Any,
) -> Snapshot:
    """Returns the present snapshot of a simulation's core; `broker` are fields of BrokerInfo."""
    about = replace(BROKER, **broker)
    return snapshot.take(story.core.state, about, lag, story.now, gateway=gateway, jobs=jobs)
