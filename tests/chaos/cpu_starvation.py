"""A worker with a twentieth of a processor: one busy process beside it, of a higher standing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from support.pool import Pool, until

STANDING = 13  # nice: 56 against 1024 shares of the one processor


@contextmanager
def burner() -> Iterator[int]:
    """A process that never sleeps, on the first processor we may use; yields that processor."""
    processor = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            os.sched_setaffinity(process.pid, {processor})
            yield processor
        finally:
            process.kill()


def starve(pool: Pool, slot: str, processor: int) -> None:
    """Put all threads of a slot's worker there, as soon as it has one."""
    until(lambda: pool.worker(slot).get("pid"), "there is a worker")
    pid = int(pool.worker(slot)["pid"])
    with suppress(FileNotFoundError):  # it may be over already
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # and so may each of its threads
                os.sched_setaffinity(int(task), {processor})
                os.setpriority(os.PRIO_PROCESS, int(task), STANDING)
