"""What admin commands and reloads do beside the core; implements the ports of `admin`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mlxpool.broker.admin.reload import CurrentSettings
from mlxpool.broker.catalogue.catalogue import Catalogue
from mlxpool.broker.edge.core_view import CoreView
from mlxpool.broker.edge.endpoints import Endpoints
from mlxpool.broker.edge.lifecycle import Lifecycle
from mlxpool.broker.edge.reporting import Reporter
from mlxpool.broker.processes.remote_workers import RemoteWorkers
from mlxpool.broker.processes.supervisor import Supervisor
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.common.config.schema import ModelConfig, PoolConfig


class AdminOperations:
    """The port `admin.commands.Operations`."""

    def __init__(
        self,
        reporter: Reporter,
        supervisor: Supervisor,
        lifecycle: Lifecycle,
        settings: CurrentSettings,
        reload: Callable[[], bool],
    ) -> None:
        self._reporter = reporter
        self._supervisor = supervisor
        self._lifecycle = lifecycle
        self._settings = settings
        self._reload = reload

    def snapshot(self, now: float, *, listing: bool = False) -> Snapshot:
        return self._reporter.snapshot(now, listing=listing)

    def last_dump(self, slot: str) -> Path | None:
        return self._supervisor.last_dump(slot)

    def reload(self) -> bool:
        return self._reload()

    def stop(self, now: float) -> None:
        self._lifecycle.stop(now, final=True)

    def drain_grace(self) -> float:
        return self._settings.config.drain_grace


class ReloadTarget:
    """The port `admin.reload.Target`."""

    def __init__(
        self,
        view: CoreView,
        supervisor: Supervisor,
        endpoints: Endpoints,
        remote: RemoteWorkers,
        catalogue: Catalogue,
    ) -> None:
        self._view = view
        self._supervisor = supervisor
        self._endpoints = endpoints
        self._remote = remote
        self._catalogue = catalogue

    def model_of(self, name: str) -> str:
        return self._view.model(name).name

    def use(self, config: PoolConfig) -> dict[str, str]:
        self._supervisor.config = config
        return self._endpoints.access.keyring.replace(config.keys)

    def use_models(self, models: Mapping[str, ModelConfig]) -> None:
        self._catalogue.reload(models)

    def disconnect_user(self, user: str, now: float) -> None:
        self._remote.revoke(user, now)
        self._endpoints.disconnect_user(user)
