"""Detects removed files of the run directory, and creates them again.

Connections survive the removal of a socket's file, but new workers and commands cannot connect. So
the socket is bound a second time at its path. The first binding stays, because its end would close
the connections.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq

from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.loading import check_run_dir
from mlxpool.common.files import FolderLocked, lock_folder
from mlxpool.common.transport import sockets

log = logging.getLogger("mlxpool.broker")

CHECK_INTERVAL = 0.5  # seconds

Identity = tuple[int, int] | None  # device and inode of a file; None: no file


class RunDirWatch:
    """Watches the run directory. Owned by the broker's thread.

    `trouble`: why new workers and commands cannot connect; "" if they can.
    """

    def __init__(
        self,
        run_dir: Path,
        lock: int,
        bound: Mapping[str, zmq.Socket[bytes]],
        *,
        times_unbound: Callable[[], int | None],
        restored: Callable[[], None],
        on_trouble: Callable[[str, float], None],
    ) -> None:
        """`lock`: the descriptor of the lock file. `bound`: the sockets by their names.

        `times_unbound` returns how often the front socket was unbound; None while it is unbound.
        `restored` is called after files were created again. `on_trouble` is called when `trouble`
        has changed.
        """
        self.lock = lock
        self.trouble = ""
        self._run_dir, self._bound = run_dir, bound
        self._times_unbound, self._restored, self._on_trouble = times_unbound, restored, on_trouble
        self._unbound = times_unbound()
        self._files = {name: _identity(self._path(name)) for name in bound}
        self._check_at = 0.0

    def _path(self, name: str) -> Path:
        return self._run_dir / f"{name}.ipc"

    def next_wake(self) -> float:
        """Returns the time of the next `check`."""
        return self._check_at

    def check(self, now: float) -> None:
        """Checks the run directory, if due."""
        if now >= self._check_at:
            self.look(now)

    def look(self, now: float) -> None:
        """Creates missing files again and logs them, or logs why they cannot be created."""
        self._check_at = now + CHECK_INTERVAL
        before, self.trouble = self.trouble, ""
        try:
            names = self._mend()
        except FolderLocked as locked:
            self.trouble = (
                f"another broker (pid {locked.holder}) has the run directory {self._run_dir} since"
                " its files were removed: stop one of them"
            )
        except (ConfigError, OSError) as error:
            self.trouble = f"files of the run directory are gone and cannot be made again: {error}"
        else:
            if names:
                extra = {"run_dir": str(self._run_dir), "made": ", ".join(names)}
                log.warning("files of the run directory were removed: made again", extra=extra)
                self._restored()
        if self.trouble != before:
            if self.trouble:
                log.error("the pool cannot be reached", extra={"why": self.trouble})
            else:
                log.info("the pool can be reached again", extra={"run_dir": str(self._run_dir)})
            self._on_trouble(self.trouble, now)

    def _mend(self) -> list[str]:
        """Creates missing files and returns their names.

        Raises FolderLocked if another process has locked the folder, and ConfigError or OSError if
        a file cannot be created.
        """
        restored = []
        if _identity(self._run_dir / "lock") != _of_descriptor(self.lock):
            check_run_dir(self._run_dir)
            taken = lock_folder(self._run_dir)
            os.close(self.lock)
            self.lock = taken
            restored.append("lock")
        if (times := self._times_unbound()) is None:
            names = [name for name in self._bound if name != "front"]
        else:
            names = [*self._bound]
            if times != self._unbound:
                self._unbound, self._files["front"] = times, _identity(self._path("front"))
        for name in names:
            path = self._path(name)
            if self._files[name] is None or _identity(path) != self._files[name]:
                check_run_dir(self._run_dir)
                sockets.bind(self._bound[name], sockets.ipc(self._run_dir, name))
                self._files[name] = _identity(path)
                restored.append(path.name)
        return restored


def _identity(file: Path) -> Identity:
    try:
        status = file.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _of_descriptor(descriptor: int) -> Identity:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
