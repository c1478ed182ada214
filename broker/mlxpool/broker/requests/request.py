"""A live request: its run, its reader, and the tombstone that remains after its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec import Struct

from mlxpool.broker.routing.prefix_index import PromptPieces
from mlxpool.common.protocol.deltas import size_of_logprobs
from mlxpool.common.protocol.from_client import MAX_PRIORITY, Generate
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.to_client import StreamDelta
from mlxpool.common.protocol.token_ids import count_of


class RequestState(Enum):
    QUEUED = "queued"
    ASSIGNED = "assigned"  # a worker has the request and has not sent output
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


IDLE_RANK = 0  # rank of an idle job
RANKS = 2 * (MAX_PRIORITY + 1) + 1


def rank_of(priority: int, *, kept: bool, idle: bool) -> int:
    """Returns the rank of a request: an integer below RANKS that orders it against others.

    An idle job has the lowest rank. Within a priority a job (`kept`) ranks below streams. A job
    that is blamed for a lost worker yields to requests of a higher rank.
    """
    return IDLE_RANK if idle else 1 + 2 * priority + (not kept)


@dataclass(eq=False, slots=True)
class Run:
    """A completion in progress, across all workers that run it.

    `ids` are the packed ids received from workers, delivered or not. To resume the run, a worker
    gets the message, the seed, the facts (data about the first worker's model) and `ids`. The lease
    (`epoch`, `slot`, `number`) names the worker that has the run; `number` is never reused.
    """

    seed: int
    ids: bytearray = field(default_factory=bytearray)
    facts: Facts | None = None  # model data from its first worker
    prompt_tokens: int = 0
    reported: int = 0  # prompt tokens that workers have reported as read
    epoch: int = 0  # epoch of its worker; 0: no worker has it
    slot: str = ""
    number: int = 0
    tries: int = 0  # workers that have had it
    leased_at: float = 0.0  # time at which the newest worker got it
    resumes_without_progress: int = 0  # consecutive
    charge: float = 0.0  # its blame for lost workers, see blame.py
    batch_bound: int = 0  # largest batch that may contain it; 0: any
    assigned_at: float = 0.0  # time of its first lease; 0: none yet
    first_token_at: float = 0.0  # time of its first token; 0: none yet
    lost_at: float = 0.0  # time of its release, until the next lease; else 0
    resumes: list[tuple[float, float]] = field(default_factory=list)  # released, leased again
    measured_ids: int = 0  # ids that the histograms have counted
    measured_at: float = 0.0  # time at which the newest measured id came; 0: never

    @property
    def taken(self) -> int:
        """Returns the number of ids received from workers."""
        return count_of(self.ids)

    def lease(self, epoch: int, slot: str, number: int, now: float = 0.0) -> None:
        """Leases the run to a worker."""
        if self.lost_at:
            self.resumes.append((self.lost_at, now))
            self.lost_at = 0.0
        self.epoch, self.slot, self.number, self.leased_at = epoch, slot, number, now
        self.tries += 1

    def release(self, now: float = 0.0) -> None:
        """Ends the lease of the run."""
        if self.epoch:
            self.lost_at = now
        self.epoch, self.slot, self.number = 0, "", 0

    def leased_by(self, epoch: int, number: int) -> bool:
        return self.epoch == epoch and self.number == number


@dataclass(eq=False, slots=True)
class Reader:
    """The client that reads a run, with its flow-control values (core/delivery.py).

    Counts are numbers of token ids. Invariant: acked <= sent <= taken, and sent + the ids in
    `unread` == taken.
    """

    link: int
    attempt: int  # number of the client's attempt that the messages answer
    # Unacknowledged ids at which no more output is sent; a chunk may exceed the number.
    window: int
    batch: bool  # merge deltas of a step with deltas of other streams on this link
    sent: int = 0
    acked: int = 0
    unread: deque[StreamDelta] = field(default_factory=deque)
    unread_bytes: int = 0
    blocked_since: float = 0.0  # time since when output waits for the window; 0: no wait


@dataclass(eq=False, slots=True)
class Request:
    """A live request: a run and its reader. Times are seconds on the core's clock."""

    id: bytes
    owner: str
    digest: bytes  # equal for all attempts of a request
    message: Generate
    model: str  # the name under which its model runs; `message.model` is the name in the request
    run: Run
    reader: Reader
    accepted_at: float
    deadline: float
    queue_deadline: float  # infinity after its first lease
    first_token_deadline: float  # infinity after its first token
    arrival: int = 0  # its number in the order of arrival
    rank: int = IDLE_RANK  # see rank_of
    passed: int = 0  # later requests of its owner that overtook it
    pieces: PromptPieces | None = None  # pieces of its prompt, once it had a choice of workers
    state: RequestState = RequestState.QUEUED

    def move(self, event: str) -> None:
        """Changes state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"request {self.id.hex()} is {self.state.value}: no {event!r} there")
        self.state = following

    @property
    def other_name(self) -> str | None:
        """The name in the request, if its model runs under another name, else None."""
        return self.message.model if self.message.model != self.model else None

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL

    @property
    def waiting_since(self) -> float:
        """The time since when the client waits: the time of the newest token, or of the arrival."""
        return self.run.measured_at or self.accepted_at

    @property
    def attempt(self) -> int:
        """The number of the newest attempt of the request's client."""
        return self.reader.attempt


class Tombstone(Struct, frozen=True):
    """The record of an ended request. A late cancel gets its state; a late retry is refused.

    `final`: the request was ended by a command, so that no later retry starts it again.
    """

    owner: str
    digest: bytes
    attempt: int
    state: RequestState
    pos: int
    until: float
    final: bool = False


# ---- output that waits for its reader ------------------------------------------------------------


MAX_CHUNK = 64 * 1024  # most bytes of text, ids and log-probabilities in one chunk


def append_output(
    chunks: deque[StreamDelta],
    pos: int,
    text: str,
    ids: bytes,
    logprobs: list[Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> int:
    """Appends the output of a step to `chunks`. Returns its size in bytes."""
    size = 4 * len(text) + len(ids)
    if logprobs:
        size += size_of_logprobs(logprobs)
    if chunks and chunks[-1].size + size <= MAX_CHUNK:
        last = chunks[-1]
    else:
        last = StreamDelta(pos)
        chunks.append(last)
    last.texts.append(text)
    last.ids += ids
    last.size += size
    if logprobs:
        last.logprobs.extend(logprobs)
    if facts is not None:
        last.facts = last.facts or facts
    return size
