"""The states of a job and their transitions. On the disk none is RUNNING, see store/records."""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.broker.store.records import JobState

RUNNING = "running"  # only in memory: on the disk such a job is waiting

_W, _D, _C = JobState.WAITING, JobState.DONE, JobState.CANCELLED
_X, _E, _G = JobState.DEAD, JobState.EXPIRED, JobState.GONE

# feed: its run was given to the queue of its model.  ids: ids came from a worker.
# retryable: its run failed, or was handed back, and can be tried again.
# final: its run failed and cannot succeed, or was tried often enough.
# boot: the broker ended and another one began.  release: its result is no longer needed, or was
# kept for as long as it should be.
TRANSITIONS: Mapping[str, Mapping[str, str]] = {
    _W: {"feed": RUNNING, "final": _X, "cancel": _C, "deadline": _E, "boot": _W},
    RUNNING: {
        "ids": RUNNING, "finish": _D, "retryable": _W, "final": _X, "cancel": _C, "deadline": _E,
        "boot": _W,
    },
    _D: {"cancel": _D, "boot": _D, "release": _G},
    _C: {"cancel": _C, "boot": _C, "release": _G},
    _X: {"cancel": _X, "boot": _X, "retry": _W, "release": _G},
    _E: {"cancel": _E, "boot": _E, "retry": _W, "release": _G},
    _G: {"cancel": _G, "boot": _G, "release": _G},
}  # fmt: skip


def after(state: str, event: str) -> str:
    """The state that follows. Raises ValueError for an event that is not in the table."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise ValueError(f"a job that is {state} has no {event!r}")
    return following
