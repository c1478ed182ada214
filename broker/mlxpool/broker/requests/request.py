"""One request: where it stands, what workers have made for it, what the client has of it.

The states and their transitions are the table below; an event that is not in it raises and changes
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mlxpool.broker.requests.output_buffer import Chunk
from mlxpool.broker.requests.payload import Payload

MAX_RESUMES = 2  # in a row that brought no new token
MAX_ALONE = 4  # the same of one that runs alone: its worker's next own end judges it


class State(Enum):
    QUEUED = "queued"
    ASSIGNED = "assigned"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = {"finish": State.DONE, "fail": State.FAILED, "cancel": State.CANCELLED}

TRANSITIONS: dict[State, dict[str, State]] = {
    State.QUEUED: {"assign": State.ASSIGNED, "fail": State.FAILED, "cancel": State.CANCELLED},
    State.ASSIGNED: {"stream": State.STREAMING, "requeue": State.QUEUED, **_ENDS},
    State.STREAMING: {"stream": State.STREAMING, "requeue": State.QUEUED, **_ENDS},
    State.DONE: {},
    State.FAILED: {},
    State.CANCELLED: {},
}
TERMINAL = frozenset({State.DONE, State.FAILED, State.CANCELLED})


@dataclass(eq=False, slots=True)
class Request:
    """A live request. `ids` are those taken from workers, `sent` counts those sent to the client.

    Invariant: acked <= sent <= taken, and sent + the ids in `unread` == taken. A resume is made of
    the payload, the seed, the facts and `ids`, never of what was sent.
    """

    id: bytes
    attempt: int
    link: int
    owner: str
    digest: bytes
    payload: Payload
    model: str  # the name under which its model runs; `payload.model` is the one asked for
    seed: int
    accepted_at: float
    deadline: float
    queue_deadline: float  # infinity once it was given to a worker
    first_deadline: float  # infinity once it has a token
    place: int = 0  # in the order of arrival
    state: State = State.QUEUED
    worker: int = 0  # epoch of the worker it is assigned to
    slot: str = ""  # that worker's
    run: int = 0  # what its run in that worker is called; never used twice
    tries: int = 0  # times it was given to a worker
    ids: bytearray = field(default_factory=bytearray)
    facts: Mapping[str, Any] | None = None  # of its first worker
    sent: int = 0
    acked: int = 0
    barren: int = 0  # resumes in a row that brought no new token
    charge: float = 0.0  # how far workers' own ends speak against it; at 2 it is poisoned
    company: int = 0  # how many may run in a worker together with it, itself included; 0: any
    assigned_at: float = 0.0
    first_at: float = 0.0
    timed: int = 0  # ids that the histograms of `figures` know of
    timed_at: float = 0.0  # when the newest of these came; 0: none came yet
    shut_since: float = 0.0  # since when the window has been shut with data behind it; 0: it is not
    prompt_tokens: int = 0
    unread: deque[Chunk] = field(default_factory=deque)
    unread_bytes: int = 0

    @property
    def taken(self) -> int:
        return len(self.ids) // 4

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"request {self.id.hex()} is {self.state.value}: no {event!r} there")
        self.state = following

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is remembered of an ended id, so that a late cancel learns its fate."""

    owner: str
    digest: bytes
    attempt: int
    state: State
    pos: int
    until: float
    final: bool = False  # somebody asked for this end: no later sending begins it again
