"""Ends this process when its parent ends: a worker must never outlive its broker.

On Linux the kernel kills the process. On all systems, the process ends when stdin ends, because
only the broker has the other end.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

STDIN = 0
_PR_SET_PDEATHSIG = 1
ORPHAN_EXIT_DELAY = 2.0  # seconds for an orphan's main thread to shut down cleanly


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends; exits if the parent has ended.

    The state of stdin shows whether the parent has ended. The parent's pid does not: a broker may
    be process 1 of a container.
    """
    kill_with_parent()
    if _hung_up(STDIN):
        os._exit(1)


def kill_with_parent() -> None:
    """Makes the kernel kill this process when its parent thread ends (only Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP is always reported
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def watch_stdin(on_end: Callable[[], None], delay: float = ORPHAN_EXIT_DELAY) -> None:
    """Starts a thread that calls `on_end` when stdin ends, and exits `delay` seconds later.

    The main thread may be stuck, so the exit does not depend on it.
    """

    def watch() -> None:
        while os.read(STDIN, 4096):
            pass
        on_end()
        time.sleep(delay)
        os._exit(1)

    threading.Thread(target=watch, name="orphan", daemon=True).start()
