"""Threads of the scheduling class SCHED_IDLE: long work that must not slow the decode steps down.

A thread with a higher nice value still gets whole time slices of a core now and then, and all
threads of a matrix product wait for the one that lost its core. SCHED_IDLE is below every nice
value. An unprivileged thread cannot leave that class again, so each piece of long work gets a
thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

LONG_WORK_NICENESS = (
    10  # of the renderer process and the tokenizer's threads: they give way to steps
)

R = TypeVar("R")


def become_idle_class() -> bool:
    """Move the calling thread to SCHED_IDLE for good. Returns whether it is there now."""
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        return False
    return True


def run_idle(work: Callable[[], R], timeout: float) -> R | None:
    """The result of `work`, done by a SCHED_IDLE thread.

    None where there is no such class, when `work` raises, and when it takes longer than `timeout`
    seconds: the thread may get no processor time at all. It is not waited for after that.
    """
    if sys.platform != "linux":
        return None
    found: list[R] = []

    def run() -> None:
        become_idle_class()
        with contextlib.suppress(Exception):  # the caller does the work again and gets the error
            found.append(work())

    thread = threading.Thread(target=run, name="idle", daemon=True)
    thread.start()
    thread.join(timeout)
    return found[0] if found else None
