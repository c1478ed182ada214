"""The states of a job and their transitions."""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    WAITING = "waiting"
    RUNNING = "running"  # only in memory: on the disk such a job is waiting
    DONE = "done"
    CANCELLED = "cancelled"
    DEAD = "dead"  # it failed for good; `retry` has it wait again
    EXPIRED = "expired"  # its deadline passed; `retry` has it wait again
    GONE = "gone"  # its result was deleted; its key answers so until it is deleted, too


_W, _R, _D = JobState.WAITING, JobState.RUNNING, JobState.DONE
_C, _X, _E, _G = JobState.CANCELLED, JobState.DEAD, JobState.EXPIRED, JobState.GONE

# feed: its run was given to the queue of its model.  ids: ids came from a worker.
# retryable: its run failed, or was handed back, and can be tried again.
# final: its run failed and cannot succeed, or was tried often enough.
# boot: the broker ended and another one began.  release: its result is no longer needed, or was
# kept for as long as it should be.
TRANSITIONS: dict[JobState, dict[str, JobState]] = {
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
ENDED = frozenset({_D, _C, _X, _E})
RETRYABLE = frozenset({_X, _E})
RELEASABLE = ENDED


def after(state: JobState, event: str) -> JobState:
    """The state that follows. Raises ValueError for an event that is not in the table."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise ValueError(f"a job that is {state.value} has no {event!r}")
    return following
