"""How a worker's process ends and how it is looked into; set up before anything heavy is imported.

A worker must never outlive its broker: on Linux the kernel kills it, and everywhere the end of
stdin, whose other end only the broker holds, ends it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

STDIN = 0
_PR_SET_PDEATHSIG = 1
ORPHAN_GRACE = 2.0  # seconds in which an orphan's edge may still end in order


def dump_on_signal(descriptor: int) -> None:
    """SIGUSR1 writes every thread's stack, also while native code holds the interpreter."""
    file = descriptor if descriptor >= 0 else sys.stderr
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    faulthandler.enable()  # a crash goes to the log


def die_with_parent() -> None:
    """Have the kernel kill us when our parent ends; ends at once when it has ended already.

    What tells is stdin, not the parent's pid: a broker may be process 1 of a container.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if _hung_up(STDIN):
        os._exit(1)


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP is always reported
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def watch_stdin(on_end: Callable[[], None], grace: float = ORPHAN_GRACE) -> None:
    """Call `on_end` when stdin ends, then end the process: the edge may be stuck."""

    def watch() -> None:
        while os.read(STDIN, 4096):
            pass
        on_end()
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, name="orphan", daemon=True).start()
