"""The states of a worker and their transitions."""

from __future__ import annotations

from enum import Enum


class WorkerState(Enum):
    STARTING = "starting"  # its process exists and has not sent `hello`
    LOADING = "loading"  # it has an epoch and no credit yet
    READY = "ready"
    SUSPECT = "suspect"  # past a limit of liveness: gets no new work
    CONDEMNED = "condemned"  # fenced, its requests moved; its process may still exist
    DRAINING = "draining"  # gets no new work, finishes what it has
    YIELDING = "yielding"  # was told to hand back what it has
    STOPPING = "stopping"  # was told to exit
    LOST = "lost"  # its process is gone

    @property
    def shown(self) -> str:
        """The state as `ps` and the metrics name it."""
        return "draining" if self in LEAVING else self.value


_EXIT = {"exit": WorkerState.LOST}
_CONDEMN = {"condemn": WorkerState.CONDEMNED, **_EXIT}
_STOP = {"stop": WorkerState.STOPPING, **_CONDEMN}
_ACTIVE = {
    # `hello` on a new connection fences the old one: the same process starts over.
    "hello": WorkerState.LOADING,
    "drain": WorkerState.DRAINING,
    **_STOP,
}

TRANSITIONS: dict[WorkerState, dict[str, WorkerState]] = {
    WorkerState.STARTING: _ACTIVE,
    WorkerState.LOADING: {"ready": WorkerState.READY, **_ACTIVE},
    WorkerState.READY: {"suspect": WorkerState.SUSPECT, **_ACTIVE},
    WorkerState.SUSPECT: {"recover": WorkerState.READY, **_ACTIVE},
    WorkerState.DRAINING: {"yield": WorkerState.YIELDING, **_STOP},
    WorkerState.YIELDING: _STOP,
    WorkerState.STOPPING: _CONDEMN,
    WorkerState.CONDEMNED: _EXIT,
    WorkerState.LOST: {},
}
COMING = frozenset({WorkerState.STARTING, WorkerState.LOADING})
SERVING = frozenset({WorkerState.READY, WorkerState.SUSPECT})
LEAVING = frozenset({WorkerState.DRAINING, WorkerState.YIELDING, WorkerState.STOPPING})
FENCED = frozenset({WorkerState.CONDEMNED, WorkerState.LOST})
