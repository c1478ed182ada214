"""A cluster in this process: its worker hosts are objects; under Ray they are actors."""

from __future__ import annotations

import threading

from mlxpool.cluster.broker_host import Admission, BrokerHost, WorkerOrder
from mlxpool.cluster.plan import NodeView
from mlxpool.cluster.worker_host import WorkerHost

GRACE = 30.0  # seconds


class LocalCluster:
    """A cluster that implements broker_host.Cluster and, for its hosts, worker_host.Pool."""

    def __init__(self) -> None:
        self.alive = {"one", "two"}  # nodes
        self.hosts: dict[str, WorkerHost] = {}
        self.orders: dict[str, WorkerOrder] = {}
        self.broker_host: BrokerHost | None = None
        self._lock = threading.Lock()

    def own_address(self) -> str:
        return "127.0.0.1"

    def nodes(self) -> list[NodeView]:
        return [NodeView(name, f"host-{name}", 8.0, 0.0) for name in sorted(self.alive)]

    def worker_ids(self, pool: str) -> set[str]:
        return set(self.hosts)

    def start_worker(self, order: WorkerOrder) -> None:
        with self._lock:
            self.orders[order.id] = order
            self.hosts[order.id] = WorkerHost(self, order)

    def end_worker(self, pool: str, id: str) -> None:
        host = self.hosts[id]
        host.end(GRACE)
        del self.hosts[id]

    def admit(self, id: str, public: str) -> Admission | None:
        if self.broker_host is None:
            raise ConnectionError("there is no broker host yet")
        return self.broker_host.admit(id, public, self.orders[id].node)
