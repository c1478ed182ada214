"""Faults for a storm of stored jobs, in the processes and on the disk of a pool."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from chaos.kept_truth import Known, Truth
from mlxpool.common.errors import PoolError
from support.disk_shim import NO_BOUND, ShimmedDisk
from support.gateway_process import GatewayProcess
from support.pool import PATIENCE, Pool
from support.postgres_server import PostgresServer

WEIGHTS: Mapping[str, int] = {
    "kill": 20, "short freeze": 6, "long freeze": 2, "broker": 12, "broker freeze": 4,
    "gateway": 10, "gateway freeze": 4, "all at once": 6, "client": 6, "terminate broker": 4,
    "full disk": 6, "failed sync": 3, "stalled disk": 3, "small store": 2, "clock": 3,
    "database": 8, "session": 6,
}  # fmt: skip
OF_DISK = ("full disk", "failed sync", "stalled disk")
OF_POSTGRES = ("database", "session")
SMALL = "16MiB"  # bound of the store during the fault "small store"; otherwise LARGE
LARGE = "256MiB"
CLIENT_JOBS = 20  # jobs of a client that is killed while it submits them
DAY = 86400

# Shifts a process's clock by the number of seconds that is in a file when the process starts.
OTHER_CLOCK = """\
import os, time

try:
    with open(os.environ["CLOCK_OFFSET"]) as file:
        offset = float(file.read())
except (KeyError, OSError, ValueError):
    offset = 0.0
if offset:
    true = time.time
    time.time = lambda: true() + offset
    time.time_ns = lambda: int((true() + offset) * 1e9)
"""


class Faults:
    """Causes random faults in a pool; each call returns when the killed processes run again."""

    def __init__(
        self,
        pool: Pool,
        gateways: list[GatewayProcess],
        disk: ShimmedDisk | PostgresServer,
        clock: Path,
        truth: Truth,
        seed: object,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.clients = 0
        self._pool, self._gateways, self._disk, self._clock = pool, gateways, disk, clock
        self._truth = truth
        self._random = random.Random(f"{seed} faults")
        self._over = threading.Event()
        self._faults: dict[str, Callable[[], None]] = {
            "kill": lambda: self._signal_worker(signal.SIGKILL),
            "short freeze": self._freeze_worker,
            "long freeze": lambda: self._signal_worker(signal.SIGSTOP),
            "broker": self._kill_broker,
            "broker freeze": self._freeze_broker,
            "terminate broker": self._terminate_broker,
            "gateway": self._kill_gateway,
            "gateway freeze": self._freeze_gateway,
            "all at once": self._kill_all,
            "client": self._kill_client,
            "full disk": self._fill_disk,
            "failed sync": self._fail_sync,
            "stalled disk": self._stall_disk,
            "small store": self._small_store,
            "clock": self._set_clock,
            "database": self._kill_database,
            "session": self._end_sessions,
        }
        others = OF_POSTGRES if isinstance(disk, ShimmedDisk) else OF_DISK
        self._weights = {name: weight for name, weight in WEIGHTS.items() if name not in others}

    def strike(self, count: int, pause: float) -> None:
        """Causes `count` random faults, with a mean pause of `pause` seconds before each."""
        names, weights = [*self._weights], [*self._weights.values()]
        while self.counts.total() < count and not self._over.is_set():
            self._over.wait(self._random.expovariate(1 / pause))
            name = self._random.choices(names, weights)[0]
            with contextlib.suppress(PoolError, ProcessLookupError, IndexError):
                self._faults[name]()
                self.counts[name] += 1

    def stop(self) -> None:
        """Prevents further faults; a fault in progress is completed."""
        self._over.set()

    def _between(self, least: float, most: float) -> float:
        return self._random.uniform(least, most)

    # ---- workers ---------------------------------------------------------------------------------

    def _worker(self) -> int:
        """Returns the pid of a worker. Raises IndexError if no worker runs."""
        rows = [row for row in self._pool.ask("ps")["workers"] if row["pid"]]
        return int(self._random.choice(rows)["pid"])

    def _signal_worker(self, number: int) -> None:
        os.kill(self._worker(), number)

    def _freeze_worker(self) -> None:
        self._freeze(self._worker(), self._between(0.02, 0.5))

    def _freeze(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    # ---- broker ----------------------------------------------------------------------------------

    def _broker(self) -> int:
        assert self._pool.process is not None
        return self._pool.process.pid

    def _kill_broker(self) -> None:
        self._pool.kill()
        time.sleep(self._random.choice((0.0, self._between(0.0, 1.5))))
        self._start_broker()

    def _start_broker(self) -> None:
        """Starts the broker on a disk without faults, because a faulty disk would end it."""
        if isinstance(self._disk, ShimmedDisk):
            self._disk.fail_syncs(0)
        self._pool.start()

    def _freeze_broker(self) -> None:
        self._freeze(self._broker(), self._random.choice((0.3, self._between(1.0, 5.0))))

    def _terminate_broker(self) -> None:
        self._pool.stop()
        self._start_broker()

    def _kill_all(self) -> None:
        """Sends SIGKILL to the broker, its workers and the gateways, like a power failure."""
        broker = psutil.Process(self._broker())
        for process in [broker, *broker.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for gateway in self._gateways:
            gateway.kill()
        self._kill_broker()
        for gateway in self._gateways:
            gateway.start()

    def _small_store(self) -> None:
        """Runs a broker whose store is nearly full, then a broker with free space."""
        config = self._pool.config.read_text()
        for bound in (SMALL, LARGE):
            self._pool.config.write_text(config.replace(f'"{LARGE}"', f'"{bound}"'))
            self._kill_broker()
            time.sleep(self._between(0.5, 2.0) if bound == SMALL else 0.0)

    def _set_clock(self) -> None:
        """Sets the clock to another day, and replaces the broker by a broker with this clock."""
        self._clock.write_text(str(self._between(-2 * DAY, 2 * DAY)))
        self._kill_broker()

    # ---- gateways and clients --------------------------------------------------------------------

    def _kill_gateway(self) -> None:
        gateway = self._random.choice(self._gateways)
        gateway.kill()
        gateway.start()

    def _freeze_gateway(self) -> None:
        process = self._random.choice(self._gateways).process
        assert process is not None
        self._freeze(process.pid, self._between(0.1, 3.0))

    def _kill_client(self) -> None:
        """Kills a client while it submits jobs; each job whose key it has printed must exist."""
        self.clients += 1
        name = f"local-killed{self.clients}"
        words = [str(self._pool.run_dir), name, str(CLIENT_JOBS)]
        printed: list[str] = []
        with subprocess.Popen(
            [sys.executable, "-m", "chaos.kept_client", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        ) as client:
            assert client.stdout is not None
            for _ in range(self._random.randrange(1, CLIENT_JOBS)):
                printed.append(client.stdout.readline().strip())
            client.kill()
            printed += client.stdout.read().splitlines()
        for key in filter(None, printed):
            self._truth.accepted(Known("local", key, ""))

    # ---- the disk --------------------------------------------------------------------------------

    def _fill_disk(self) -> None:
        assert isinstance(self._disk, ShimmedDisk)
        self._disk.leave(self._random.choice((0, 50_000, 500_000)))
        time.sleep(self._between(0.2, 2.0))
        if self._random.random() < 0.3:  # the broker ends while the disk is full
            self._pool.kill()
            self._disk.leave(NO_BOUND)
            self._start_broker()
        self._disk.leave(NO_BOUND)

    def _fail_sync(self) -> None:
        assert isinstance(self._disk, ShimmedDisk)
        self._disk.fail_syncs(self._random.choice((1, 1, 3)))

    def _stall_disk(self) -> None:
        assert isinstance(self._disk, ShimmedDisk)
        self._disk.stall(True)
        time.sleep(self._between(0.2, 1.5))
        self._disk.stall(False)

    # ---- PostgreSQL ------------------------------------------------------------------------------

    def _kill_database(self) -> None:
        assert isinstance(self._disk, PostgresServer)
        self._disk.kill()
        time.sleep(self._between(0.0, 2.0))
        self._disk.start()

    def _end_sessions(self) -> None:
        """Makes the PostgreSQL server end the broker's session, and with it the broker's lock."""
        assert isinstance(self._disk, PostgresServer)
        self._disk.end_sessions()


def left_behind(run_dir: Path) -> list[str]:
    """Returns the processes that still have this run directory on their command line."""
    processes = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(str(run_dir) in word for word in words):
            processes.append(f"{process.pid}: {' '.join(words)[:200]}")
    return processes


def until_none_left(run_dir: Path) -> list[str]:
    """Returns `left_behind`, once it is empty or PATIENCE is over."""
    end = time.monotonic() + PATIENCE
    while (processes := left_behind(run_dir)) and time.monotonic() < end:
        time.sleep(0.1)
    return processes
