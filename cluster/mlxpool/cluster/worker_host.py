"""The actor of one worker: makes its key, gets it admitted by the broker, runs `mlxpool worker`.

Ray restarts the actor on another machine if its node is lost. The secret key never leaves its
machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Protocol

from mlxpool.cluster import tied_process
from mlxpool.cluster.broker_host import Admission, WorkerOrder
from mlxpool.common.files import lock_folder
from mlxpool.common.transport import keys

log = logging.getLogger("mlxpool.cluster")

FOLDER_PREFIX = "mlxpool-ray-worker-"  # of folders in the machine's folder for temporary files
LOCK_TIME = 60.0  # seconds; an older folder without a lock belongs to no live host
ORPHAN_GRACE = 30.0  # seconds without the broker before the worker asks its host for the address
FIRST_DELAY, MAX_DELAY = 0.25, 10.0  # seconds before a restart, doubled after each early end
PROVEN_AFTER = 60.0  # seconds; a worker that ends sooner has ended early


class Pool(Protocol):
    """An interface to the pool for a worker host. ray_cluster.PoolOfWorker implements it."""

    def admit(self, id: str, public: str) -> Admission | None:
        """Asks the broker host to admit this worker. Returns None if the worker is not wanted.

        Raises an error of Ray if the broker host does not run.
        """


def make_folder(parent: Path) -> tuple[Path, int]:
    """Makes a folder for a host. Returns the folder and the descriptor of its lock.

    The lock is held while the descriptor is open. Folders of killed hosts are removed: their locks
    are free.
    """
    for old in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # also FolderLocked: the host of the folder is alive
            if time.time() - old.stat().st_mtime > LOCK_TIME:
                os.close(lock_folder(old))
                shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    return folder, lock_folder(folder)


class WorkerHost:
    """The Ray actor that runs one `mlxpool worker`.

    It has two threads: one runs the worker, the other runs the methods that Ray calls.
    """

    def __init__(self, pool: Pool, order: WorkerOrder) -> None:
        self._pool = pool
        self._order = order
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.folder, self._folder_lock = make_folder(Path(tempfile.gettempdir()))
        self.settings = self.folder / "pool.toml"
        self.settings.write_text(order.settings, "utf-8")
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def end(self, grace: float) -> None:
        """Makes the worker hand back its streams and end; kills it after `grace` seconds."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                tied_process.kill(process)
        self._thread.join(grace)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._folder_lock)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self._live()
            except Exception as error:  # of Ray if there is no broker host, or of the disk
                log.warning("no worker yet", extra={"id": self._order.id, "why": str(error)})
            failures = 1 if time.monotonic() - started > PROVEN_AFTER else failures + 1
            self._stopping.wait(min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(failures - 1, 16)))

    def _live(self) -> None:
        """Gets admission for a new key, and runs the worker until it ends."""
        path = self.folder / f"{self._order.id}.key"
        path.unlink(missing_ok=True)
        pair = keys.make(self._order.id, "worker")
        keys.write(pair, self.folder)
        admission = self._pool.admit(self._order.id, pair.public)
        if admission is None:
            log.info("this worker is not wanted", extra={"id": self._order.id})
            return
        command = [
            *("--run-dir", str(self.folder / "run"), "worker", self._order.model),
            *("--config", str(self.settings), "--endpoint", admission.endpoint),
            *("--server-key", admission.server_key, "--key", str(path)),
            *("--orphan-grace", str(ORPHAN_GRACE)),
        ]
        with self._lock:
            if self._stopping.is_set():
                return
            self._process = tied_process.start(command, self.folder / "worker.log")
        code = tied_process.wait(self._process)
        log.info("worker ended", extra={"id": self._order.id, "exit_code": code})
