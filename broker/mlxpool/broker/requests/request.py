"""The record of a live request, and what stays of it when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpool.broker.requests.reader import Reader
from mlxpool.broker.requests.request_states import TERMINAL, TRANSITIONS, RequestState
from mlxpool.broker.requests.run import Run
from mlxpool.common.protocol.to_broker import Generate


@dataclass(eq=False, slots=True)
class Request:
    """A live request: a run and its reader. Times are seconds on the core's clock."""

    id: bytes
    owner: str
    digest: bytes  # equal for all sendings of the same request
    message: Generate
    model: str  # the name under which its model runs; `message.model` is the one asked for
    run: Run
    reader: Reader
    accepted_at: float
    deadline: float
    queue_deadline: float  # infinity once it was given to a worker
    first_token_deadline: float  # infinity once it has a token
    arrival: int = 0  # its number in the order of arrival
    state: RequestState = RequestState.QUEUED

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"request {self.id.hex()} is {self.state.value}: no {event!r} there")
        self.state = following

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL

    @property
    def attempt(self) -> int:
        """The newest sending of its client."""
        return self.reader.attempt


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is remembered of an ended id: a late cancel learns its fate, a late sending is refused.

    `final`: its end was asked for, so that no later sending starts it again.
    """

    owner: str
    digest: bytes
    attempt: int
    state: RequestState
    pos: int
    until: float
    final: bool = False
