"""Notices that files of the run directory were removed, and makes them again.

Connections outlive the file of their socket, but new workers and commands cannot connect. A socket
is bound again at its path. The binding whose file is gone stays, as its end would end connections.
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

    `trouble`: why the pool cannot be reached; "": it can.
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
        """`lock` is the descriptor of the lock file, `bound` has the sockets by their names.

        `times_unbound` counts how often the front was bound anew; None while it is not bound.
        `restored` is called when files were made again, `on_trouble` when `trouble` has changed.
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
        """Returns when `check` is due."""
        return self._check_at

    def check(self, now: float) -> None:
        """Look, if it is time."""
        if now >= self._check_at:
            self.look(now)

    def look(self, now: float) -> None:
        """Make missing files again and log that, or log why it cannot be done."""
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
        """Returns the names of files made again. Raises FolderLocked, ConfigError and OSError."""
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
