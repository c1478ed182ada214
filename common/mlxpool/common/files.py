"""Files of secrets, and locks of folders."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

# ---- regular files -------------------------------------------------------------------------------
# A file of secrets must be a regular file, because a read of a FIFO or a device may never end.


class NotRegular(OSError):
    """The path names a directory, a FIFO, a socket or a device."""

    def __init__(self, file: Path) -> None:
        super().__init__(None, "it is not a regular file", str(file))

    def __str__(self) -> str:
        return f"{self.strerror}: {self.filename!r}"


def open_regular(file: Path) -> BinaryIO:
    """Opens a regular file for reading, without waiting. Raises OSError and NotRegular."""
    # Without O_NONBLOCK the open of a FIFO waits for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(file)
    return open(descriptor, "rb")


# ---- folder lock ---------------------------------------------------------------------------------
# One process at a time holds the lock of a folder. The kernel releases it when that process ends.


class FolderLocked(OSError):
    """Another process holds the folder's lock. `holder` is its pid, or "unknown"."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"it is locked by pid {holder}")
        self.holder = holder


def lock_folder(folder: Path) -> int:
    """Locks a folder for as long as the returned descriptor is open. Raises FolderLocked."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise FolderLocked(holder) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor
