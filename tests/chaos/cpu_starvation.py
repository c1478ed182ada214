"""Gives a worker a twentieth of a processor, beside a busy process of higher priority."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from support.pool import Pool, until

NICENESS = 13  # 56 against 1024 shares of the processor


@contextmanager
def busy_process() -> Iterator[int]:
    """Inside the context, runs a busy process on the first available processor.

    Yields the processor.
    """
    processor = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            os.sched_setaffinity(process.pid, {processor})
            yield processor
        finally:
            process.kill()


def starve(pool: Pool, slot: str, processor: int) -> None:
    """Lets all threads of a slot's worker run only on this processor, with low priority.

    Waits first until the worker has started.
    """
    until(lambda: pool.worker(slot).get("pid"), "there is a worker")
    pid = int(pool.worker(slot)["pid"])
    with suppress(FileNotFoundError):  # the worker may have ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # the thread may have ended
                os.sched_setaffinity(int(task), {processor})
                os.setpriority(os.PRIO_PROCESS, int(task), NICENESS)
