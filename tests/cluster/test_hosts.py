"""BrokerHost and the hosts of workers, without Ray: real brokers, workers and keys."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxpool.client import Client
from mlxpool.cluster.broker_host import BrokerHost, store_fault
from mlxpool.cluster.pool_spec import PoolSpec, read
from mlxpool.cluster.worker_host import make_folder
from mlxpool.common.transport import keys
from support.counting_checker import expected_ids
from support.free_ports import free_port
from support.local_cluster import LocalCluster
from support.pool import PATIENCE, gone, until

SETTINGS = """
[models.m]
path = "builtin:counting"
replicas = {{ min = {fewest}, max = 4, cool_down = 0 }}
counting = {{ step_us = 1000 }}
[keys.app]
role = "client"
public = "{public}"
"""


class HostedPool:
    """A broker host with its cluster, and a client's key."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlxpool-"))
        self.file = folder / "pool.toml"
        pair = keys.make("app", "client")
        self.key, self.public = keys.write(pair, folder), pair.public
        self.ports = free_port(), free_port()
        self.cluster = LocalCluster()
        self.host = BrokerHost(self.cluster, self.spec(2), "id", started_again=False)
        self.cluster.broker_host = self.host

    def spec(self, fewest: int) -> PoolSpec:
        self.file.write_text(SETTINGS.format(fewest=fewest, public=self.public))
        return read(self.file, "pool", str(self.folder), *self.ports)

    def wait_ready(self, count: int) -> None:
        def ready() -> bool:
            row = self.host.status()["models"][0]
            return bool(row["ready"] == row["started"] == count)

        until(ready, f"{count} workers are ready")

    def client(self) -> Client:
        status = self.host.status()
        return Client(
            endpoint=status["endpoint"],
            server_key=status["server_key"],
            key=self.key,
            connect_timeout=PATIENCE,
        )

    def broker_pid(self) -> int:
        return int((self.folder / "run" / "lock").read_text())


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedPool]:
    hosted = HostedPool(tmp_path_factory.mktemp("hosts"))
    hosted.wait_ready(2)
    yield hosted
    broker = psutil.Process(hosted.broker_pid())
    hosted.host.shut_down()
    shutil.rmtree(hosted.folder)
    assert not hosted.cluster.hosts
    assert gone(broker)


def test_a_client_asks_its_workers(pool: HostedPool) -> None:
    with pool.client() as client:
        ids = client.generate("m", "hello", seed=3, max_tokens=20).ids
    assert list(ids) == expected_ids("hello", 3, 20)
    nodes = {order.node for order in pool.cluster.orders.values()}
    assert nodes == {"one", "two"}
    assert all("secret" not in repr(order) for order in pool.cluster.orders.values())


def test_a_stream_outlives_broker_and_worker(pool: HostedPool) -> None:
    before = pool.host.status()["starts"]
    with pool.client() as client:
        stream = client.stream("m", "hello", seed=4, max_tokens=2000)
        deltas = iter(stream)
        ids = list(next(deltas).ids)
        os.kill(pool.broker_pid(), signal.SIGKILL)
        for delta in deltas:
            ids.extend(delta.ids)
    assert ids == expected_ids("hello", 4, 2000)
    assert pool.host.status()["starts"] == before + 1
    pool.wait_ready(2)


def test_a_worker_that_comes_back_elsewhere_brings_a_new_key(pool: HostedPool) -> None:
    """The key of the old worker is revoked, because this worker may still run on a cut-off node."""
    id, host = next(iter(pool.cluster.hosts.items()))
    old = keys.read(next(host.folder.glob("*.key")))
    assert old.public in (pool.folder / "pool.toml").read_text()
    pool.cluster.start_worker(pool.cluster.orders[id])  # the worker in `host` is not ended
    until(lambda: old.public not in (pool.folder / "pool.toml").read_text(), "it has a new key")
    host.end(10.0)
    pool.wait_ready(2)


def test_folders_of_killed_hosts_are_removed(tmp_path: Path) -> None:
    dead, held = make_folder(tmp_path)
    alive, still_held = make_folder(tmp_path)
    os.close(held)
    for folder in (dead, alive):
        os.utime(folder, (0, 0))
    new, new_held = make_folder(tmp_path)
    assert not dead.exists() and alive.exists() and new.exists()
    for descriptor in (still_held, new_held):
        os.close(descriptor)


def test_new_settings_change_the_number_of_workers(pool: HostedPool) -> None:
    assert pool.host.apply(pool.spec(3)) == ""
    pool.wait_ready(3)
    assert pool.host.apply(pool.spec(1)) == ""
    pool.wait_ready(1)
    assert pool.host.apply(pool.spec(2)) == ""
    pool.wait_ready(2)
    moved = read(pool.file, "pool", str(pool.folder), pool.ports[0], free_port())
    assert "back_port has changed: `mlxpool ray down` first" in pool.host.apply(moved)


def test_a_worker_whose_actor_is_gone_is_started_again(pool: HostedPool) -> None:
    id = next(iter(pool.cluster.hosts))
    pool.cluster.hosts.pop(id).end(10.0)
    until(lambda: id in pool.cluster.hosts, "it has a host again")
    pool.wait_ready(2)


def test_a_worker_that_nobody_started_is_not_admitted(pool: HostedPool) -> None:
    assert pool.host.admit("w999", "k" * 40, "one") is None


def test_no_broker_starts_where_its_store_is_not(tmp_path: Path, pool: HostedPool) -> None:
    """The store's machine is lost, and another machine has the same Ray resource by mistake.

    The broker must not start there.
    """
    spec = pool.spec(2)
    assert store_fault(spec, pool.folder, "id") == ""
    assert "is not the folder of the pool 'pool'" in store_fault(spec, tmp_path, "id")
    assert "is not the folder" in store_fault(spec, pool.folder, "another")
    text = f'[pool]\nstate_dir = "{tmp_path}"\n{pool.file.read_text()}'
    pool.file.write_text(text)
    kept = read(pool.file, "pool", str(pool.folder), *pool.ports)
    assert "there is no store of jobs in" in store_fault(kept, pool.folder, "id")
    (tmp_path / "jobs-1.db").touch()
    assert store_fault(kept, pool.folder, "id") == ""
    lost = read(pool.file, "pool", str(tmp_path / "empty"), *pool.ports)
    host = BrokerHost(LocalCluster(), lost, "id", started_again=True)
    assert "its broker ran on another" in host.status()["fault"]
    assert host.admit("w1", "k" * 40, "one") is None and host.apply(lost) == host.fault
    host.shut_down()
    assert not (tmp_path / "empty").exists()
