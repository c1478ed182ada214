"""How a worker process ended: its exit code in words, and whether the worker itself is to blame."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from mlxpool.common.progress import ProgressReading

# Signals that a process brings on itself.
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """`own`: it ended by itself, not by a signal from outside.

    `prefill` is the request whose prompt it was reading.
    """

    cause: str
    own: bool
    prefill: bytes | None


def exit_of(code: int, commanded: bool, out_of_memory: bool, look: ProgressReading) -> WorkerExit:
    """`code` as Popen gives it, negative for a signal; `look` is the last progress."""
    if commanded:
        return WorkerExit("stopped", False, look.request)
    if code == -signal.SIGKILL and out_of_memory:
        return WorkerExit("killed by the kernel: out of memory", True, look.request)
    own = code >= 0 or -code in _FAULTS
    return WorkerExit(cause_of(code), own, look.request)


def cause_of(code: int) -> str:
    """An exit code in words: `exit code 3`, `killed by SIGSEGV`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
