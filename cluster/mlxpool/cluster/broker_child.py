"""Runs the broker of a pool as a child process: start, restart, admin calls, end."""

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
HANG_LIMIT = 30.0  # seconds without an answer before the process is killed
FIRST_DELAY, MAX_DELAY = 0.25, 10.0  # seconds before a restart, doubled after each early end
PROVEN_AFTER = 30.0  # seconds; a process that ends sooner has ended early
STOP_GRACE = 60.0  # seconds between SIGTERM and SIGKILL, in which answers may finish
KEY_NAME = "broker"


class BrokerChild:
    """The broker process. Call `keep` at short intervals.

    Any thread may call `ask`; one thread calls all other methods. The broker's run directory, key,
    log and settings are in the pool's folder.
    """

    def __init__(self, spec: PoolSpec, folder: Path, address: str) -> None:
        """`address`: this machine's address. Raises OSError and BadKey for an unusable folder."""
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
        """The pid of the broker's parent process."""
        return None if self._process is None else self._process.pid

    def keep(self, now: float) -> None:
        """Starts the broker if a start is due, notes its end, and kills it if it hangs.

        `now`: monotonic seconds.
        """
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
        """Returns the answer of the broker's admin socket.

        Returns None if there is no answer, and for a refusal, which is logged.
        """
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
        """Makes the broker read its settings again. Returns False if this failed."""
        return self.ask("reload", timeout=RELOAD_TIMEOUT) is not None

    def report(self) -> Report | None:
        """Returns the number of workers that the broker wants for each model.

        Returns None if the broker does not answer.
        """
        answer = self.ask("stats")
        if answer is None:
            return None
        return Report(answer["replicas_wanted"], float(answer["broker"]["uptime_s"]))

    def stop(self) -> None:
        """Ends the broker; returns after its end."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            tied_process.wait(self._process, STOP_GRACE)
        except subprocess.TimeoutExpired:
            tied_process.kill(self._process)
            tied_process.wait(self._process)
        self._process = None
