"""The states of a request and their transitions."""

from __future__ import annotations

from enum import Enum


class RequestState(Enum):
    QUEUED = "queued"
    ASSIGNED = "assigned"  # a worker has it; no output came from that worker yet
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_END = {
    "finish": RequestState.DONE,
    "fail": RequestState.FAILED,
    "cancel": RequestState.CANCELLED,
}
_RUNNING = {"stream": RequestState.STREAMING, "requeue": RequestState.QUEUED, **_END}

TRANSITIONS: dict[RequestState, dict[str, RequestState]] = {
    RequestState.QUEUED: {
        "assign": RequestState.ASSIGNED,
        "fail": RequestState.FAILED,
        "cancel": RequestState.CANCELLED,
    },
    RequestState.ASSIGNED: _RUNNING,
    RequestState.STREAMING: _RUNNING,
    RequestState.DONE: {},
    RequestState.FAILED: {},
    RequestState.CANCELLED: {},
}
TERMINAL = frozenset(state for state, events in TRANSITIONS.items() if not events)
