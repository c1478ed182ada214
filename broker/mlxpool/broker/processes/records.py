"""Records of the running child processes in files, so that the next broker can end survivors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from mlxpool.broker import host
from mlxpool.common.paths import file_stem

MAX_RECORD_CHARS = 4096  # most characters of a record


def kill_group(pid: int) -> None:
    """Sends SIGKILL to every process of the group that `pid` leads."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the group is empty


class ProcessRecords:
    """The files that record child processes: a JSON file for each, with its pid and start time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, slot: str) -> Path:
        return self._folder / f"{file_stem(slot)}.json"

    def add(self, slot: str, pid: int) -> None:
        path = self._path(slot)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(json.dumps({"pid": pid, "start_time": host.start_time(pid)}))
        except OSError:
            pass  # a full disk must not prevent a start

    def remove(self, slot: str) -> None:
        with contextlib.suppress(OSError):  # the folder may have been removed
            self._path(slot).unlink()

    def any_alive(self) -> bool:
        """Returns whether a recorded process of an earlier broker still runs."""
        return any(_alive(path) for path in self._folder.glob("*.json"))

    def kill_survivors(self) -> list[int]:
        """Ends the recorded processes of an earlier broker. Returns their pids."""
        ended = []
        for path in sorted(self._folder.glob("*.json")):
            pid = _alive(path)
            if pid is not None:
                kill_group(pid)
                ended.append(pid)
            path.unlink(missing_ok=True)
        return ended


def _alive(path: Path) -> int | None:
    """Returns the pid in a record if its process still runs, else None.

    The start time must match too: another process may have the pid by now.
    """
    try:
        with path.open() as file:
            record = json.loads(file.read(MAX_RECORD_CHARS))
        pid, began = int(record["pid"]), record["start_time"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = pid > 1 and began is not None and host.start_time(pid) == began
    return pid if same else None
