"""Causes of the ends of workers in words, and whether the worker itself is to blame.

Causes appear in errors (`details.cause`), in `ps` (`last_exit`, `cause`) and in the log. Only the
log tells why a worker was unloaded; errors and `ps` have STOPPED.
"""

from __future__ import annotations

import signal

from msgspec import Struct

from mlxpool.common.progress import ProgressReading

STOPPED = "stopped"
DRAINED = "drained"
IDLE = "idle"
UNLOADED = "unloaded by the operator"
BROKER_ENDS = "the broker is going down"
LEFT = "it left"
CANNOT_SERVE = "it cannot serve any longer"
NEW_CONNECTION = "it came on a new connection"
CONNECTION_ENDED = "its connection ended"
KEY_REVOKED = "its key was revoked"
OUT_OF_MEMORY = "killed by the kernel: out of memory"

# Causes that cannot be the fault of a request in the worker.
COMMANDED = {STOPPED, DRAINED, IDLE, UNLOADED, BROKER_ENDS, LEFT, NEW_CONNECTION, KEY_REVOKED}

# Signals that a process gets for its own errors.
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def ended(slot: str, cause: str) -> str:
    """Returns the first part of an error message about the work of a worker that has ended."""
    return f"the worker {slot} ended: {cause}"


def evicted_for(model: str) -> str:
    """Returns the cause of the end of a worker whose memory another model needs."""
    return f"evicted for {model}"


# ---- judged by the broker ------------------------------------------------------------------------


def hung(phase: str, seconds: float) -> str:
    return f"hung in {phase} for {seconds:.1f} s"


def silent(seconds: float) -> str:
    return f"no beat for {seconds:.1f} s"


def over_memory_limit(resident: int, limit: int) -> str:
    return f"out of memory: {resident} bytes resident, memory_limit {limit}"


def stopped_by_signal(seconds: float) -> str:
    return f"stopped by a signal (SIGSTOP) for {seconds:.1f} s"


def of_rank(rank: int, cause: str) -> str:
    """Returns the cause of a group's end, from the cause of the end of one rank (process)."""
    return f"rank {rank}: {cause}"


def wrong_position(sent: int, due: int) -> str:
    return f"it sent position {sent} where {due} was due"


def wrong_report(due: int) -> str:
    return f"it reported other tokens of a prompt than those from {due} on"


# ---- exits of processes --------------------------------------------------------------------------


class WorkerExit(Struct, frozen=True):
    """An exit of a worker. `own`: the worker ended by itself, not by a signal from outside.

    `prefill` is the request whose prompt the worker was reading.
    """

    cause: str
    own: bool
    prefill: bytes | None


def exit_of(
    code: int, commanded: bool, out_of_memory: bool, look: ProgressReading, said: str = ""
) -> WorkerExit:
    """Returns the exit of a worker. `code` is Popen's return code, negative for a signal.

    `look` is the last reading of the worker's progress. `said` is the last line of the worker's
    output. If the worker could not begin its work, this line has the reason.
    """
    if commanded:
        return WorkerExit(STOPPED, False, look.request)
    if code == -signal.SIGKILL and out_of_memory:
        return WorkerExit(OUT_OF_MEMORY, True, look.request)
    own = code >= 0 or -code in _FAULTS
    cause = cause_of(code)
    return WorkerExit(f"{cause}: {said}" if said else cause, own, look.request)


def last_line(output: bytes) -> str:
    """Returns the last non-empty line of a process's output, without control characters."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return "".join(char if char.isprintable() else " " for char in last)


def cause_of(code: int) -> str:
    """Returns an exit code in words: `exit code 3`, `killed by SIGSEGV`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
