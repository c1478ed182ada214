"""The broker of a pool, as a child process: started, started again, asked, ended."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.cluster import tied_process
from mlxpool.cluster.plan import Report
from mlxpool.cluster.pool_spec import PoolSpec
from mlxpool.common.errors import PoolError
from mlxpool.common.transport import keys, question, sockets

log = logging.getLogger("mlxpool.cluster")

ANSWER_TIMEOUT = 2.0  # seconds
RELOAD_TIMEOUT = 30.0  # seconds
HANG_LIMIT = 30.0  # seconds without an answer until the process is killed
FIRST_DELAY, MAX_DELAY = 0.25, 10.0  # seconds before a start after ends in a row
PROVEN_AFTER = 30.0  # seconds: an end after so long a life is the first in a row
STOP_GRACE = 60.0  # seconds between SIGTERM and SIGKILL: answers may finish
KEY_NAME = "broker"


class BrokerChild:
    """`keep` it at short intervals; used by one thread, but for `ask`.

    Its run directory, its key, its log and its settings are in the pool's folder.
    """

    def __init__(self, spec: PoolSpec, folder: Path, address: str) -> None:
        """`address`: of this machine. Raises OSError and BadKey for a folder of no use."""
        self.folder = folder
        self.run_dir = folder / "run"
        self.settings = folder / "pool.toml"
        self.front = f"tcp://{address}:{spec.front_port}"
        self.back = f"tcp://{address}:{spec.back_port}"
        self.starts = 0
        self._key = folder / f"{KEY_NAME}.key"
        if not self._key.exists():
            keys.write(keys.make(KEY_NAME, "server"), folder)
        self.server_key = keys.read(self._key, "server").public
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = self._heard_at = 0.0
        self._failures = 0
        self._start_at = 0.0

    @property
    def pid(self) -> int | None:
        """The pid of the process that the broker is a child of."""
        return None if self._process is None else self._process.pid

    def keep(self, now: float) -> None:
        """Start it if it is due, note its end, kill it if it has not answered for too long."""
        if self._process is None:
            if now >= self._start_at:
                self._start(now)
        elif self._process.poll() is not None:
            tied_process.wait(self._process)
            self._process = None
            lived = now - self._started_at
            self._failures = 1 if lived > PROVEN_AFTER else self._failures + 1
            self._start_at = now + min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(self._failures - 1, 16))
        elif now - self._heard_at > HANG_LIMIT:
            tied_process.kill(self._process)

    def _start(self, now: float) -> None:
        command = [
            *("--run-dir", str(self.run_dir), "broker", "--config", str(self.settings)),
            *("--front", self.front, "--back", self.back, "--secret-key", str(self._key)),
        ]
        self._process = tied_process.start(command, self.folder / "broker.log")
        self._started_at = self._heard_at = now
        self.starts += 1

    def ask(
        self, kind: str, body: Mapping[str, Any] | None = None, timeout: float = ANSWER_TIMEOUT
    ) -> dict[str, Any] | None:
        """One question to its admin socket; None without an answer, or for a refusal, logged."""
        endpoint = sockets.ipc(self.run_dir, "admin")
        try:
            answer = question.ask(endpoint, None, kind, body or {}, timeout=timeout)
        except PoolError as error:
            log.warning("the broker refuses", extra={"asked": kind, "why": error.message})
            return None
        if answer is not None:
            self._heard_at = time.monotonic()
        return answer

    def reload(self) -> bool:
        """Has the broker read its settings again; returns False if it did not."""
        return self.ask("reload", timeout=RELOAD_TIMEOUT) is not None

    def report(self) -> Report | None:
        """The number of workers that the broker wants of each model; None if it does not answer."""
        answer = self.ask("stats")
        if answer is None:
            return None
        return Report(answer["replicas_wanted"], float(answer["broker"]["uptime_s"]))

    def stop(self) -> None:
        """Ends the broker; returns when it has ended."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            tied_process.wait(self._process, STOP_GRACE)
        except subprocess.TimeoutExpired:
            tied_process.kill(self._process)
            tied_process.wait(self._process)
        self._process = None
