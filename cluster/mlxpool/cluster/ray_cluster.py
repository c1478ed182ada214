"""All use of Ray: actors, placement groups, nodes. Only this module imports Ray."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mlxpool.cluster.broker_host import Admission, BrokerHost, WorkerOrder, new_pool_id
from mlxpool.cluster.plan import NodeView
from mlxpool.cluster.pool_spec import PoolSpec
from mlxpool.cluster.worker_host import WorkerHost
from mlxpool.common.errors import BrokerLost, ModelUnavailable
from mlxpool.common.logs import set_up

NAMESPACE = "mlxpool"
BROKER_RESOURCE = "mlxpool_broker"  # resource of the Ray node on the broker's machine
BROKER_SHARE = 0.01  # share of a broker, so that a machine may have brokers of several pools
THREADS = 16  # threads of a broker host, for many admissions at once
CALL_TIMEOUT = 60.0  # seconds
HAND_BACK_GRACE = 30.0  # seconds for a worker's orderly end; then it is killed
RESTART_FOR_EVER = -1


def broker_name(pool: str) -> str:
    """Returns the name of a pool's broker host among Ray's actors."""
    return f"{pool}/broker"


def worker_name(pool: str, id: str) -> str:
    """Returns the name of a worker host, and of its placement group."""
    return f"{pool}/worker/{id}"


# ---- inside the actors ---------------------------------------------------------------------------


class RayCluster:
    """Lists the nodes of the Ray cluster, and starts, lists and ends worker hosts."""

    def own_address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def nodes(self) -> list[NodeView]:
        return [
            NodeView(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def worker_ids(self, pool: str) -> set[str]:
        head = worker_name(pool, "")
        return {name.removeprefix(head) for name in list_named_actors() if name.startswith(head)}

    def start_worker(self, order: WorkerOrder) -> None:
        """Reserves one CPU and the GPUs on one machine, and starts the worker host there.

        If the machine is lost, Ray moves the reservation and then the host.
        """
        name = worker_name(order.pool, order.id)
        needs = {"CPU": 1.0} | ({"GPU": float(order.gpus)} if order.gpus else {})
        group = _group_of(name) or placement_group(
            [needs],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            _soft_target_node_id=order.node or None,
        )
        host = ray.remote(RayWorkerHost).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=RESTART_FOR_EVER,
            num_cpus=1,
            num_gpus=order.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        host.remote(order)

    def end_worker(self, pool: str, id: str) -> None:
        end_actor(worker_name(pool, id), "end", HAND_BACK_GRACE)


class PoolOfWorker:
    """Sends a worker host's request for admission to the broker host, through Ray."""

    def __init__(self, pool: str) -> None:
        self._pool = pool

    def admit(self, id: str, public: str) -> Admission | None:
        host = ray.get_actor(broker_name(self._pool), NAMESPACE)
        node = ray.get_runtime_context().get_node_id()
        admission: Admission | None = ray.get(
            host.admit.remote(id, public, node), timeout=CALL_TIMEOUT
        )
        return admission


class RayBrokerHost(BrokerHost):
    """The broker host as a Ray actor."""

    def __init__(self, spec: PoolSpec, pool_id: str) -> None:
        set_up(json_lines=False, level=logging.INFO)
        again = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(RayCluster(), spec, pool_id, started_again=again)


class RayWorkerHost(WorkerHost):
    """A worker host as a Ray actor."""

    def __init__(self, order: WorkerOrder) -> None:
        set_up(json_lines=False, level=logging.INFO)
        super().__init__(PoolOfWorker(order.pool), order)


# ---- the command ---------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Makes this process a driver of the cluster; `address` "auto": this machine's cluster.

    Raises BrokerLost if no cluster answers.
    """
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BrokerLost(
            f"no Ray cluster answers at {address!r}: {error!s:.200}; start one with"
            " `ray start --head`, or name another with --address"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def up(spec: PoolSpec, patience: float) -> dict[str, Any]:
    """Starts a pool, or applies these settings to a running one; returns its status.

    Waits for the broker for `patience` seconds. Raises ModelUnavailable if the pool cannot run.
    """
    host = _broker_host(spec.name)
    if host is not None:
        fault = ray.get(host.apply.remote(spec), timeout=CALL_TIMEOUT)
        if fault:
            raise ModelUnavailable(f"the pool {spec.name!r} keeps its settings: {fault}")
    else:
        host = _started_broker_host(spec)
    end = time.monotonic() + patience
    while True:
        pool_status = _asked(host, spec.name)
        if pool_status["fault"]:
            raise ModelUnavailable(pool_status["fault"])
        if pool_status["broker"] is not None:
            return pool_status
        if time.monotonic() > end:
            raise ModelUnavailable(
                f"the broker has not answered for {patience:g} s; its log is"
                f" {pool_status['folder']}/broker.log on the machine of {pool_status['endpoint']}"
            )
        time.sleep(0.1)


def _started_broker_host(spec: PoolSpec) -> Any:
    if not any(node["Resources"].get(BROKER_RESOURCE) for node in ray.nodes() if node["Alive"]):
        raise ModelUnavailable(
            f"no node of the cluster has the resource {BROKER_RESOURCE!r}: the broker runs on the"
            " machine that keeps its jobs and its key. Start Ray there with"
            f" --resources '{{\"{BROKER_RESOURCE}\": 1}}'"
        )
    host = ray.remote(RayBrokerHost).options(
        name=broker_name(spec.name),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=RESTART_FOR_EVER,
        max_concurrency=THREADS,
        num_cpus=0,
        resources={BROKER_RESOURCE: BROKER_SHARE},
    )
    return host.remote(spec, new_pool_id())


def status(pool: str) -> dict[str, Any]:
    """Returns the status of a pool. Raises BrokerLost if it does not exist or does not answer."""
    host = _broker_host(pool)
    if host is None:
        raise BrokerLost(f"there is no pool {pool!r} on this cluster: `mlxpool ray up` starts one")
    return _asked(host, pool)


def _asked(host: Any, pool: str) -> dict[str, Any]:
    """Returns the status from a broker host. Raises BrokerLost if it does not answer."""
    try:
        pool_status: dict[str, Any] = ray.get(host.status.remote(), timeout=CALL_TIMEOUT)
    except ray.exceptions.RayError as error:
        why = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        raise BrokerLost(
            f"the broker host of {pool!r} does not answer: {type(error).__name__}:"
            f" {why.strip():.200}; is the node with the resource {BROKER_RESOURCE!r} there?"
            " (`ray status`)"
        ) from None
    return pool_status


def down(pool: str) -> int:
    """Ends a pool: its workers, then its broker; returns the number of ended actors.

    Files stay on the broker's machine: the store of jobs, the key and the log.
    """
    actors = [name for name in list_named_actors() if name.startswith(f"{pool}/")]
    if broker_name(pool) in actors:
        end_actor(broker_name(pool), "shut_down", timeout=CALL_TIMEOUT + 2 * HAND_BACK_GRACE)
    # The broker host has ended its workers. If it is lost, its workers are ended here.
    for name in actors:
        if name != broker_name(pool):
            end_actor(name, "end", HAND_BACK_GRACE)
    return len(actors)


def end_actor(name: str, method: str, *arguments: float, timeout: float = CALL_TIMEOUT) -> None:
    """Makes an actor end its process, then ends the actor and its reservation.

    An actor that is already lost is no error.
    """
    with contextlib.suppress(ValueError):  # the actor no longer exists
        actor = ray.get_actor(name, NAMESPACE)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(getattr(actor, method).remote(*arguments), timeout=timeout)
        ray.kill(actor)
    group = _group_of(name)
    if group is not None:
        remove_placement_group(group)


def _broker_host(pool: str) -> Any | None:
    try:
        return ray.get_actor(broker_name(pool), NAMESPACE)
    except ValueError:
        return None


def _group_of(name: str) -> PlacementGroup | None:
    """Returns the placement group of this name; None if there is none, or if it was removed."""
    for row in placement_group_table().values():
        if row["name"] == name and row["state"] != "REMOVED":
            return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(row["placement_group_id"])))
    return None
