"""Locks between the processes of a machine, so that only one process compiles a kernel."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_WAIT = 20.0  # seconds until this process compiles the kernel, too; a kernel takes 1 to 5
LOOK_INTERVAL = 0.02  # seconds between two tries


@contextmanager
def compile_lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Holds the lock of a compiled kernel's file; yields whether this process has the lock.

    `wait`: waits until another process releases the lock, at most LONGEST_WAIT, and then continues
    without the lock. The system frees the lock of a process that ends. The lock's file is beside
    `path` while the lock is held. Raises OSError if the file cannot be made.
    """
    file = path.with_suffix(".lock")
    end = time.monotonic() + LONGEST_WAIT
    while (held := _locked(file)) is None and wait and time.monotonic() < end:
        time.sleep(LOOK_INTERVAL)
    try:
        yield held is not None
    finally:
        if held is not None:
            file.unlink(missing_ok=True)
            os.close(held)


def _locked(file: Path) -> int | None:
    """Returns a descriptor of the file, with the lock; None: another process has the lock.

    Without locks, as on some network file systems, every process gets a descriptor and compiles.
    """
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        return descriptor
    # If the last holder has removed the file, the file has no name and its lock does not count.
    if _has_name(descriptor, file):
        return descriptor
    os.close(descriptor)
    return None


def _has_name(descriptor: int, file: Path) -> bool:
    """Returns whether the open `descriptor` is still the file of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False
