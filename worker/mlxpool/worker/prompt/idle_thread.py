"""Long work beside the threads that decode: it gets what these leave, and no more.

A thread that is merely nicer still takes a whole slice of a core now and then, and all threads of a
product of matrices wait for the one that lost it. Linux has a class of threads below every other.
Nobody comes back from there without privileges, so long work alone is sent there, for a while.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def take_what_is_left() -> bool:
    """The calling thread computes when no other wants its core, from now on; whether it does."""
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        return False
    return True


def of_what_is_left(work: Callable[[], R], patience: float) -> R | None:
    """What `work` returns in a thread that takes what is left.

    None where there is no such class of threads, when it raises, and when it is not done after
    `patience` seconds: it may be given no time at all. Nobody waits for it then.
    """
    if sys.platform != "linux":
        return None
    found: list[R] = []

    def run() -> None:
        take_what_is_left()
        with contextlib.suppress(Exception):  # who does it again is told
            found.append(work())

    thread = threading.Thread(target=run, name="gentle", daemon=True)
    thread.start()
    thread.join(patience)
    return found[0] if found else None
