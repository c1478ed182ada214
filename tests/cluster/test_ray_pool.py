"""A pool on several Ray nodes of this machine, while nodes, actors and the broker are killed.

`make test-ray` installs Ray and runs this file; elsewhere it is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError
from mlxpool.common.transport import keys
from support.counting_checker import expected_ids
from support.free_ports import free_port
from support.pool import gone, until
from support.ray_nodes import RayNode, RayNodes

pytest.importorskip("ray", reason="this test needs Ray: run `make test-ray`")

PATIENCE = 90.0  # seconds
STREAMS, AT_ONCE, TOKENS = 2000, 120, 30
SETTINGS = """
[pool]
beat_limit = 5.0

[models.m]
path = "builtin:counting"
sequences = 32
replicas = {{ min = 2, max = 4, waiting_tokens = 500, cool_down = 5.0 }}
counting = {{ step_us = 10000 }}

[keys.app]
role = "client"
public = "{public}"
"""


class RayPool:
    """A pool that `mlxpool ray up` started on these nodes."""

    def __init__(self, nodes: RayNodes, folder: Path) -> None:
        self.nodes = nodes
        self.folder = Path(tempfile.mkdtemp(prefix="mlxpool-ray-"))
        self.file = folder / "pool.toml"
        pair = keys.make("app", "client")
        self.key = keys.write(pair, folder)
        self.file.write_text(SETTINGS.format(public=pair.public))
        self.ports = (free_port(), free_port())

    def command(self, verb: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "mlxpool.cli.main", "--json", "ray", verb),
                *(str(self.file), "--address", self.nodes.address, *more),
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )

    def up(self) -> dict[str, Any]:
        front, back = self.ports
        done = self.command(
            *("up", "--folder", str(self.folder)),
            *("--front-port", str(front), "--back-port", str(back)),
        )
        assert done.returncode == 0, done.stderr + self.broker_log()
        return dict(json.loads(done.stdout))

    def status(self) -> dict[str, Any]:
        done = self.command("status")
        assert done.returncode in (0, 1), done.stderr
        return dict(json.loads(done.stdout))

    def broker_log(self) -> str:
        log = self.folder / "broker.log"
        return log.read_text() if log.exists() else ""

    def broker_pid(self) -> int:
        """Returns the pid of the broker itself, from the broker's lock file."""
        return int((self.folder / "run" / "lock").read_text())

    def node_of_a_worker(self) -> RayNode:
        """Returns a node that a worker runs on."""
        for node in self.nodes.nodes:
            if any("mlxpool.worker" in " ".join(_command(each)) for each in node.note()):
                return node
        raise AssertionError("no node has a worker")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPool]:
    folder = tmp_path_factory.mktemp("ray")
    with RayNodes(folder) as nodes:
        nodes.add()
        nodes.add()
        ray_pool = RayPool(nodes, folder)
        yield ray_pool
        shutil.rmtree(ray_pool.folder)


@pytest.fixture(scope="module")
def running(pool: RayPool) -> dict[str, Any]:
    """Returns the status of the pool after `mlxpool ray up`."""
    status = pool.up()

    def two_ready() -> bool:
        return bool(pool.status()["models"][0]["ready"] >= 2)

    until(two_ready, "two workers are ready", PATIENCE)
    return status


class Storm:
    """Runs streams, checks every token, and disturbs the pool after given numbers of streams."""

    def __init__(self, pool: RayPool, found: dict[str, Any]) -> None:
        self.pool, self.found = pool, found
        self.done = 0
        self.wrong: list[str] = []
        self.killed: list[str] = []
        nodes = pool.nodes
        self.deeds = {
            150: ("a node is added", lambda: [nodes.add()]),
            400: ("a node with workers is killed", lambda: nodes.kill(pool.node_of_a_worker())),
            800: ("the broker is killed", lambda: os.kill(pool.broker_pid(), signal.SIGKILL)),
            1000: ("a node is added", lambda: [nodes.add()]),
            1200: ("a node with workers is killed", lambda: nodes.kill(pool.node_of_a_worker())),
            1600: ("the broker's actor is killed", self.kill_broker_host),
        }

    def kill_broker_host(self) -> None:
        """Sends SIGKILL to the actor's process; its children end with it."""
        for process in self.pool.nodes.head.note():
            if "RayBrokerHost" in " ".join(_command(process)):
                process.kill()
                return
        raise AssertionError("the head has no broker host")

    async def run(self) -> None:
        limit = asyncio.Semaphore(AT_ONCE)
        async with AsyncClient(
            endpoint=self.found["endpoint"],
            server_key=self.found["server_key"],
            key=self.pool.key,
        ) as client:

            async def one(number: int) -> None:
                async with limit:
                    prompt = f"stream {number}"
                    try:
                        result = await client.generate("m", prompt, seed=number, max_tokens=TOKENS)
                    except PoolError as error:
                        self.wrong.append(f"{number}: {error.code}: {error.message}")
                        return
                    if list(result.ids) != expected_ids(prompt, number, TOKENS):
                        self.wrong.append(f"{number}: {list(result.ids)}")
                    self.done += 1

            streams = asyncio.gather(*(one(number) for number in range(STREAMS)))
            deeds = asyncio.create_task(self.perform())
            async with asyncio.timeout(PATIENCE * 3):
                await streams
                await deeds

    async def perform(self) -> None:
        """Performs each action once its number of streams has ended."""
        for count, (name, deed) in self.deeds.items():
            while self.done + len(self.wrong) < count:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(deed)
            self.killed.append(name)


def test_no_stream_is_lost_while_nodes_actors_and_broker_are_killed(
    pool: RayPool, running: dict[str, Any]
) -> None:
    storm = Storm(pool, running)
    asyncio.run(storm.run())
    assert not storm.wrong, (len(storm.wrong), storm.wrong[:5])
    assert storm.done == STREAMS
    assert len(storm.killed) == len(storm.deeds)


def test_replicas_follow_what_waits_and_lost_workers_are_back(
    pool: RayPool, running: dict[str, Any]
) -> None:
    """The storm needs more workers than the minimum; after it their number falls to the minimum."""
    assert json.loads((pool.folder / "workers.json").read_text())["last"] > 2

    def at_least() -> bool:
        row = pool.status()["models"][0]
        return bool(row["started"] == row["ready"] == 2)

    until(at_least, "two workers are left, and ready", PATIENCE)


def test_a_second_up_changes_settings(pool: RayPool, running: dict[str, Any]) -> None:
    before = {row["id"] for row in pool.status()["workers"]}
    pool.file.write_text(pool.file.read_text().replace("step_us = 10000", "step_us = 9000"))
    assert pool.up()["endpoint"] == running["endpoint"]

    def replaced() -> bool:
        status = pool.status()
        ids = {row["id"] for row in status["workers"]}
        return not ids & before and status["models"][0]["ready"] == 2

    until(replaced, "both workers are new ones", PATIENCE)


def test_down_leaves_nothing_but_files(pool: RayPool, running: dict[str, Any]) -> None:
    broker = psutil.Process(pool.broker_pid())
    workers = [
        each
        for node in pool.nodes.nodes
        for each in node.note()
        if "mlxpool.worker" in " ".join(_command(each))
    ]
    assert workers
    done = pool.command("down")
    assert done.returncode == 0, done.stderr
    until(lambda: all(gone(each) for each in (broker, *workers)), "all processes have ended")
    assert pool.command("status").returncode == 3
    assert (pool.folder / "broker.key").exists()
    assert json.loads(pool.command("down").stdout)["actors"] == 0
