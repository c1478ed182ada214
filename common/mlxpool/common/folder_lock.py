"""The lock of a folder: one process has it, and the kernel releases it with that process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderLocked(OSError):
    """Another process has the folder; `holder` is its pid, "unknown" if it is not known."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"it is locked by pid {holder}")
        self.holder = holder


def lock_folder(folder: Path) -> int:
    """Lock a folder for as long as the returned descriptor is open. Raises FolderLocked."""
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
