"""Reports about the broker and the pool: snapshots, and a status line for service managers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from mlxpool.broker.core.state import State
from mlxpool.broker.edge.http_gateway import HttpGateway
from mlxpool.broker.edge.lifecycle import Lifecycle
from mlxpool.broker.edge.loop import LoopLag
from mlxpool.broker.edge.run_dir_watch import RunDirWatch
from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.telemetry import snapshot
from mlxpool.broker.telemetry.snapshot import BrokerInfo, Snapshot
from mlxpool.broker.transport.listener import Listener
from mlxpool.broker.transport.memory_guard import MemoryGuard
from mlxpool.broker.transport.peers import Peers
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.process.blas import why_slow

log = logging.getLogger("mlxpool.broker")


class Reporter:
    """Builds snapshots of the pool, and its status line. Owned by the broker's thread."""

    def __init__(
        self,
        pool: State,
        lifecycle: Lifecycle,
        lag: LoopLag,
        *,
        boot: int,
        started_at: float,
        settings: Callable[[], PoolConfig],
        front: Peers,
        listener: Listener,
        guard: MemoryGuard,
        endpoints: Mapping[str, list[str]],
        metrics_url: str | None,
        gateway: HttpGateway | None,
        jobs: Callable[[], JobFigures | None],
        run_dir: RunDirWatch,
    ) -> None:
        """`endpoints`: endpoints of the sockets `back` and `admin` outside the run directory.

        `jobs` returns the counts of jobs; None if the settings have no jobs.
        """
        self._pool = pool
        self._lifecycle = lifecycle
        self._lag = lag
        self._boot = boot
        self._started_at = started_at
        self._settings = settings
        self._front = front
        self._listener = listener
        self._guard = guard
        self._endpoints = endpoints
        self._metrics_url = metrics_url
        self._gateway = gateway
        self._jobs = jobs
        self._run_dir = run_dir
        self._slow_blas = why_slow() if settings().local_workers else ""
        if self._slow_blas:
            log.warning(self._slow_blas)

    def snapshot(self, now: float, listing: bool = False) -> Snapshot:
        """Returns a snapshot. With `listing` it includes the rows of models that `ps` prints."""
        broker, lag = self._broker(now), self._lag.worst(now)
        gateway = None if self._gateway is None else self._gateway.info(now)
        return snapshot.take(
            self._pool, broker, lag, now, listing=listing, gateway=gateway, jobs=self._jobs()
        )

    def status(self) -> str:
        """Returns a status line for the service manager."""
        pool = self._pool
        busy = sum(bool(model.workers) for model in pool.registry.models.values())
        counts = f"workers {len(pool.workers)}, models with workers {busy}"
        return f"{self._state()}: {counts}, streams {len(pool.requests)}"

    def _state(self) -> str:
        if self._lifecycle.stopping:
            return "stopping"
        return "ready" if self._pool.admits and not self._lifecycle.ending else "draining"

    def _broker(self, now: float) -> BrokerInfo:
        config = self._settings()
        return BrokerInfo(
            pid=os.getpid(),
            boot=self._boot,
            state=self._state(),
            uptime_s=round(now - self._started_at, 3),
            run_dir=str(config.run_dir),
            local_workers=config.local_workers,
            links=len(self._front.by_number),
            full_links=len(self._front.full),
            backlog_bytes=self._front.full.bytes,
            given_up=self._front.given_up,
            front_shut=self._listener.times_unbound,
            turned_out=self._guard.disconnected,
            descriptors=self._listener.limit,
            endpoints={**self._endpoints, "front": self._listener.endpoints[1:]},
            metrics=self._metrics_url,
            trouble=self._run_dir.trouble,
            slow_blas=self._slow_blas,
        )
