"""What a broker secures before it serves: its run directory and enough file descriptors."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path

MIN_DESCRIPTORS = 256


class AlreadyRunning(OSError):
    """Another broker holds this run directory."""


def lock(run_dir: Path) -> int:
    """Lock the run directory; the kernel releases it when this process ends, however it ends.

    Returns a descriptor to close. Raises AlreadyRunning.
    """
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise AlreadyRunning(
            f"another broker (pid {holder}) serves the run directory {run_dir};"
            " stop it, or give another with --run-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it.

    Raises OSError below MIN_DESCRIPTORS: libzmq aborts the process when it runs out of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < MIN_DESCRIPTORS:
        raise OSError(
            f"the limit of open files is {hard}, the broker needs {MIN_DESCRIPTORS};"
            " raise it with ulimit -n"
        )
    return hard
