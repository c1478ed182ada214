"""Several nodes of a Ray cluster on this machine, whose processes can be killed.

A node is `ray start --block` with all its descendants. If all of them are killed, the other nodes
see the same as after the loss of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from mlxpool.common.closing import Closing
from support.free_ports import free_port
from support.pool import until

FAST = {  # a lost node is noticed in about 2 s instead of 14 s
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
PATIENCE = 90.0  # seconds


def descendants(pid: int) -> list[psutil.Process]:
    """Returns a process and its descendants; [] if the process has ended."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class RayNode:
    """A process `ray start` with its descendants.

    The descendants are recorded, because their parents may end first.
    """

    def __init__(self, log: Path, temp: Path, *arguments: str) -> None:
        """`temp` is the node's TMPDIR: hosts that are killed leave temporary folders there."""
        program = str(Path(sys.executable).parent / "ray")
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [program, "start", "--block", "--node-ip-address=127.0.0.1", *arguments],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **QUIET, "TMPDIR": str(temp)},
            )
        self.seen: dict[int, psutil.Process] = {}

    def note(self) -> list[psutil.Process]:
        """Records the node's running processes, and returns them."""
        processes = descendants(self.process.pid)
        self.seen.update((process.pid, process) for process in processes)
        return processes

    def has(self, pid: int) -> bool:
        return any(process.pid == pid for process in self.note())

    def kill(self) -> None:
        """Sends SIGKILL to all its processes, parents first."""
        self.note()
        for process in self.seen.values():
            # psutil compares start times, so it does not kill a new process with the same pid.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class RayNodes(Closing):
    """A head node for the broker, without room for workers, and nodes of two CPUs each."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log = folder / "ray.log"
        self.temp = Path(tempfile.mkdtemp(prefix="ray-"))
        self.nodes: list[RayNode] = []
        self.head = RayNode(
            self.log,
            self.temp,
            *("--head", f"--port={self.port}", "--num-cpus=0", "--num-gpus=0"),
            *("--include-dashboard=false", f"--temp-dir={self.temp}"),
            *("--object-store-memory=80000000", f"--system-config={json.dumps(FAST)}"),
            *("--resources", json.dumps({"mlxpool_broker": 1})),
        )

        def listens() -> bool:
            assert self.head.process.poll() is None, self.log.read_text()
            with socket.socket() as trial:
                return trial.connect_ex(("127.0.0.1", self.port)) == 0

        until(listens, "the head listens", PATIENCE)

    def add(self) -> RayNode:
        """Starts a node of two CPUs, which joins the cluster later."""
        node = RayNode(
            self.log,
            self.temp,
            *(f"--address={self.address}", "--num-cpus=2", "--num-gpus=0"),
            "--object-store-memory=80000000",
        )
        self.nodes.append(node)
        return node

    def kill(self, node: RayNode) -> None:
        self.nodes.remove(node)
        node.kill()

    def close(self) -> None:
        """Kills all nodes, and removes their files."""
        for node in (*self.nodes, self.head):
            node.kill()
        shutil.rmtree(self.temp, ignore_errors=True)
