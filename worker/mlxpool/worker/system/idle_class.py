"""The scheduling class SCHED_IDLE: for long work that must not slow the decode steps down.

A process with a higher nice value still gets whole time slices of a core now and then, and all
threads of a matrix product wait for the one that lost its core. SCHED_IDLE is below every nice
value. An unprivileged process cannot leave that class again.
"""

from __future__ import annotations

import os
import sys


def become_idle_class() -> bool:
    """Move the calling process to SCHED_IDLE for good. Returns whether it is there now."""
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        return False
    return True
