"""The states of a job and their transitions, for all modules but the store."""

from __future__ import annotations

from enum import Enum

from mlxpool.broker.store.records import JobState


class JobPhase(Enum):
    """The states of a job: the states in the store, and RUNNING.

    RUNNING exists only in memory. In the store a running job has the state WAITING.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    DEAD = "dead"  # it failed and is not tried again
    EXPIRED = "expired"  # its deadline passed
    GONE = "gone"  # its result is deleted


_W, _R, _D = JobPhase.WAITING, JobPhase.RUNNING, JobPhase.DONE
_C, _X, _E, _G = JobPhase.CANCELLED, JobPhase.DEAD, JobPhase.EXPIRED, JobPhase.GONE

# Events of a job:
# feed: the job's run was given to the queue of its model.  ids: ids came from a worker.
# retryable: the run failed or was handed back, and the job can be tried again.
# final: the run failed, and the job cannot succeed or was tried often enough.
# boot: the broker ended and another broker began.  release: the job's result is no longer needed,
# or its retention has expired.
TRANSITIONS: dict[JobPhase, dict[str, JobPhase]] = {
    _W: {"feed": _R, "final": _X, "cancel": _C, "deadline": _E, "boot": _W},
    _R: {
        "ids": _R, "finish": _D, "retryable": _W, "final": _X, "cancel": _C, "deadline": _E,
        "boot": _W,
    },
    _D: {"cancel": _D, "boot": _D, "release": _G},
    _C: {"cancel": _C, "boot": _C, "release": _G},
    _X: {"cancel": _X, "boot": _X, "retry": _W, "release": _G},
    _E: {"cancel": _E, "boot": _E, "retry": _W, "release": _G},
    _G: {"cancel": _G, "boot": _G, "release": _G},
}  # fmt: skip


def phase_of(state: JobState, *, runs: bool) -> JobPhase:
    """Returns the phase of a job that is stored in `state`. `runs`: the core has a run of it."""
    return _R if runs and state is JobState.WAITING else JobPhase(state.value)
