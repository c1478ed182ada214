"""What a reload changes beside the core."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from mlxpool.broker.catalogue.catalogue import Catalogue
from mlxpool.broker.edge.endpoints import Endpoints
from mlxpool.broker.edge.http_gateway import HttpGateway
from mlxpool.broker.models.registry import Registry
from mlxpool.broker.processes.remote_workers import RemoteWorkers
from mlxpool.broker.processes.supervisor import Supervisor
from mlxpool.common.config.schema import ModelConfig, PoolConfig


class ReloadTarget(Struct, eq=False):
    """The port `admin.reload.Target`."""

    _registry: Registry
    _supervisor: Supervisor
    _endpoints: Endpoints
    _remote: RemoteWorkers
    _catalogue: Catalogue
    _gateway: HttpGateway | None

    def model_of(self, name: str) -> str:
        return self._registry.model(name).name

    def use(self, config: PoolConfig) -> dict[str, str]:
        self._supervisor.config = config
        if self._gateway is not None:
            self._gateway.reload()
        return self._endpoints.access.keyring.replace(config.keys)

    def use_models(self, models: Mapping[str, ModelConfig]) -> None:
        self._catalogue.reload(models)

    def disconnect_user(self, user: str, now: float) -> None:
        self._remote.revoke(user, now)
        self._endpoints.disconnect_user(user)
