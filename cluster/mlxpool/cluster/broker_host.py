"""The actor on the machine of the store: keeps the broker and the wanted number of workers running.

The actor runs on the Ray node that has the resource BROKER_RESOURCE. The store of jobs and the
broker's key are in folders of that machine, so the pool never moves to another machine by itself.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from mlxpool.cluster.broker_child import BrokerChild
from mlxpool.cluster.plan import Changes, NodeView, WorkerView, changes, choose_node, gpus_of
from mlxpool.cluster.pool_spec import ModelSpec, PoolSpec
from mlxpool.cluster.worker_table import WorkerRecord, WorkerTable, replace_text
from mlxpool.common.config.loading import check_run_dir
from mlxpool.common.paths import expanded

log = logging.getLogger("mlxpool.cluster")

TICK = 0.5  # seconds between two calls of `_tick`
MARK = "pool-id"  # the file with the id of the pool that owns the folder


class WorkerOrder(Struct, frozen=True):
    """The start parameters of a worker host.

    They contain no secret, because Ray shows them to other users.
    """

    pool: str
    id: str
    model: str
    settings: str  # the text of the TOML file
    gpus: int
    node: str  # the id of the preferred node; "": any node


class Admission(Struct, frozen=True):
    """The endpoint and the public key that an admitted worker connects to."""

    endpoint: str
    server_key: str


class Cluster(Protocol):
    """An interface to Ray for a broker host. ray_cluster.RayCluster implements it."""

    def own_address(self) -> str:
        """Returns the address at which other machines reach this machine."""

    def nodes(self) -> list[NodeView]:
        """Returns the machines that are alive."""

    def worker_ids(self, pool: str) -> set[str]:
        """Returns the ids of the pool's workers, on machines or waiting for resources."""

    def start_worker(self, order: WorkerOrder) -> None:
        """Starts a worker host on a machine with free resources, now or later."""

    def end_worker(self, pool: str, id: str) -> None:
        """Ends a worker after the broker has moved its streams; returns after its end."""


def store_fault(spec: PoolSpec, folder: Path, pool_id: str) -> str:
    """Returns the reason why a restarted broker must not start (its folders are missing), or ""."""
    mark = folder / MARK
    if not mark.exists() or mark.read_text("utf-8") != pool_id:
        return (
            f"{folder} of this machine is not the folder of the pool {spec.name!r}: its broker ran"
            " on another. Start Ray there with the resource, or end the pool with `mlxpool ray"
            " down` and begin a new one here with `up`"
        )
    state = expanded(spec.state_dir)
    if spec.state_dir and "://" not in spec.state_dir and not any(state.glob("jobs-*.db")):
        return (
            f"there is no store of jobs in {state}, where the pool {spec.name!r} had one: is its"
            " disk mounted? `mlxpool ray down` and `up` begin with an empty store"
        )
    return ""


class BrokerHost:
    """The Ray actor that runs the broker of a pool, and starts and ends its worker hosts.

    The actor has several threads; any thread may call its methods.
    """

    def __init__(
        self, cluster: Cluster, spec: PoolSpec, pool_id: str, *, started_again: bool
    ) -> None:
        """`pool_id`: the random id that `up` has drawn for this pool.

        `started_again`: True if Ray has started this actor before.
        """
        self._cluster = cluster
        self._spec = spec
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._ending: dict[str, str] = {}  # worker that is ending -> its model
        self.fault = ""  # why the broker does not run
        folder = spec.folder_path()
        if started_again:
            self.fault = store_fault(spec, folder, pool_id)
        if self.fault:
            log.error("no broker: %s", self.fault)
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_run_dir(folder / "run")
        replace_text(folder / MARK, pool_id)
        self._table = WorkerTable(folder)
        self._child = BrokerChild(spec, folder, cluster.own_address())
        self._write_settings()
        self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
        self._thread.start()

    # ---- called by other actors and the command ------------------------------------------------

    def admit(self, id: str, public: str, node: str) -> Admission | None:
        """Admits a worker host's new key to the broker.

        Returns None if the worker is not wanted.
        """
        with self._lock:
            if self.fault or id not in self._table.by_id or id in self._ending:
                return None
            self._table.admit(id, public, node)
            self._write_settings()
        self._child.reload()  # if no broker runs, the next one reads the settings at its start
        return Admission(self._child.back, self._child.server_key)

    def apply(self, spec: PoolSpec) -> str:
        """Applies new settings; returns the reason why they cannot be applied, or ""."""
        with self._lock:
            if self.fault:
                return self.fault
            for name in ("folder", "front_port", "back_port", "state_dir"):
                if getattr(spec, name) != getattr(self._spec, name):
                    return f"{name} has changed: `mlxpool ray down` first, then `up`"
            self._spec = spec
            self._write_settings()
        self._child.reload()
        return ""

    def status(self) -> dict[str, Any]:
        """Returns the pool as `mlxpool ray status --json` prints it."""
        if self.fault:
            return {"name": self._spec.name, "fault": self.fault}
        answer = self._child.ask("ps")
        with self._lock:
            alive = {node.id: node.address for node in self._cluster.nodes()}
            return {
                "name": self._spec.name,
                "fault": None,
                "broker": None if answer is None else answer["broker"],
                "endpoint": self._child.front,
                "server_key": self._child.server_key,
                "folder": str(self._child.folder),
                "starts": self._child.starts,
                "models": [self._model_row(model, answer) for model in self._spec.models],
                "workers": [
                    self._worker_row(record, alive) for record in self._table.by_id.values()
                ],
            }

    def _model_row(self, model: ModelSpec, answer: dict[str, Any] | None) -> dict[str, Any]:
        rows = [] if answer is None else answer["workers"]
        ready = sum(row["model"] == model.name and row["state"] == "ready" for row in rows)
        started = sum(record.model == model.name for record in self._table.by_id.values())
        return {
            "name": model.name,
            "min": model.min,
            "max": model.max,
            "started": started,
            "ready": ready,
        }

    def _worker_row(self, record: WorkerRecord, alive: dict[str, str]) -> dict[str, Any]:
        if record.id in self._ending:
            state = "ending"
        else:
            placed = record.public and record.node in alive
            state = "placed" if placed else "waits for a place"
        address = alive.get(record.node)
        return {"id": record.id, "model": record.model, "state": state, "address": address}

    def shut_down(self) -> None:
        """Ends all workers, then the broker. Returns after their end."""
        self._stopping.set()
        if self.fault:
            return
        self._thread.join()
        threads = [self._end(id) for id in list(self._table.by_id) if id not in self._ending]
        for thread in threads:
            thread.join()
        self._child.stop()

    # ---- the host's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._tick(time.monotonic())
            except Exception:  # of Ray, if its head is unreachable: the next `_tick` may succeed
                log.exception("a look at the pool failed")
            self._stopping.wait(TICK)

    def _tick(self, now: float) -> None:
        self._child.keep(now)
        report = self._child.report()
        known = self._cluster.worker_ids(self._spec.name)
        with self._lock:
            nodes = self._cluster.nodes()
            for id in known - self._table.by_id.keys():
                self._end(id)  # a worker without a record: the record was lost
            for record in self._table.by_id.values():
                if record.id not in known and record.id not in self._ending:
                    self._start(record, nodes)
            plan = changes(self._spec.models, report, self._views(nodes), self._ending_models())
            self._perform(plan, nodes)

    def _views(self, nodes: list[NodeView]) -> list[WorkerView]:
        alive = {node.id for node in nodes}
        return [
            WorkerView(
                record.id,
                record.model,
                record.fingerprint,
                record.node if record.node in alive else "",
                placed=bool(record.public) and record.node in alive,
            )
            for record in self._table.by_id.values()
            if record.id not in self._ending
        ]

    def _ending_models(self) -> dict[str, int]:
        models = list(self._ending.values())
        return {model: models.count(model) for model in models}

    def _perform(self, plan: Changes, nodes: list[NodeView]) -> None:
        for id in plan.end:
            self._end(id)
        by_name = {model.name: model for model in self._spec.models}
        for name in plan.start:
            self._start(self._table.add(name, by_name[name].fingerprint), nodes)

    def _start(self, record: WorkerRecord, nodes: list[NodeView]) -> None:
        model = next((spec for spec in self._spec.models if spec.name == record.model), None)
        if model is None:  # the model was removed from the settings: `changes` ends the worker
            return
        gpus = gpus_of(model, nodes)
        node = choose_node(nodes, self._views(nodes), model, gpus)
        order = WorkerOrder(
            self._spec.name, record.id, record.model, self._spec.settings, gpus, node
        )
        self._cluster.start_worker(order)
        # Until its admission a worker counts at its preferred node, so later workers go to others.
        self._table.place(record.id, model.fingerprint, node)
        log.info("worker started", extra={"id": record.id, "model": record.model, "gpus": gpus})

    def _end(self, id: str) -> threading.Thread:
        """Ends a worker in a new thread. Returns the thread without waiting for it."""
        record = self._table.by_id.get(id)
        self._ending[id] = record.model if record else ""
        thread = threading.Thread(target=self._end_worker, args=(id,), name=f"end {id}")
        thread.start()
        return thread

    def _end_worker(self, id: str) -> None:
        try:
            self._cluster.end_worker(self._spec.name, id)
        except Exception:
            log.exception("a worker could not be ended in order")
        with self._lock:
            self._table.remove(id)
            self._ending.pop(id, None)
            self._write_settings()
        self._child.reload()  # revokes the worker's key
        log.info("worker ended", extra={"id": id})

    def _write_settings(self) -> None:
        replace_text(self._child.settings, f"{self._spec.settings}\n{self._table.sections()}")


def new_pool_id() -> str:
    """Returns a random id, which distinguishes this pool's folder from those of other pools."""
    return secrets.token_hex(16)
