"""A live request: its run, its reader, and its tombstone after its end."""

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


IDLE_RANK = 0  # rank of an idle job
RANKS = 2 * (MAX_PRIORITY + 1) + 1


def rank_of(priority: int, *, kept: bool, idle: bool) -> int:
    """Returns a rank below RANKS; a charged job lets requests of a higher rank go first.

    An idle job has the lowest rank. Within a priority a job (`kept`) is below streams.
    """
    return IDLE_RANK if idle else 1 + 2 * priority + (not kept)


@dataclass(eq=False, slots=True)
class Run:
    """A completion in the making, over all workers that it is given to.

    `ids` are the packed ids received from workers, delivered or not. A resume consists of the
    message, the seed, the facts and `ids`. The lease (`epoch`, `slot`, `number`) names the worker
    that runs it. `number` identifies the run there and is never used twice.
    """

    seed: int
    ids: bytearray = field(default_factory=bytearray)
    facts: Facts | None = None  # facts of its first worker
    prompt_tokens: int = 0
    reported: int = 0  # tokens of the prompt that workers have reported
    epoch: int = 0  # 0: no worker has it
    slot: str = ""
    number: int = 0
    tries: int = 0  # times it was given to a worker
    leased_at: float = 0.0  # when it was given to the newest worker
    resumes_without_progress: int = 0  # in a row
    charge: float = 0.0  # its share in the ends of workers, see `blame`
    batch_bound: int = 0  # most runs in its worker, itself included; 0: any
    assigned_at: float = 0.0  # first given to a worker; 0: not yet
    first_token_at: float = 0.0  # 0: no token yet
    lost_at: float = 0.0  # when it was released, until the next worker has it; else 0
    resumes: list[tuple[float, float]] = field(default_factory=list)  # released, leased again
    measured_ids: int = 0  # ids that the histograms have counted
    measured_at: float = 0.0  # when the newest of these came; 0: never

    @property
    def taken(self) -> int:
        """Returns the number of ids received from workers."""
        return count_of(self.ids)

    def lease(self, epoch: int, slot: str, number: int, now: float = 0.0) -> None:
        """Give the run to a worker."""
        if self.lost_at:
            self.resumes.append((self.lost_at, now))
            self.lost_at = 0.0
        self.epoch, self.slot, self.number, self.leased_at = epoch, slot, number, now
        self.tries += 1

    def release(self, now: float = 0.0) -> None:
        """Take the run from its worker."""
        if self.epoch:
            self.lost_at = now
        self.epoch, self.slot, self.number = 0, "", 0

    def leased_by(self, epoch: int, number: int) -> bool:
        return self.epoch == epoch and self.number == number


@dataclass(eq=False, slots=True)
class Reader:
    """A client that reads a run.

    Flow control with these values is in core/delivery.py. Counts are of token ids. Invariant:
    acked <= sent <= taken, and sent + the ids in `unread` == taken.
    """

    link: int
    attempt: int  # number of the client's sending that the messages answer
    # Ids sent and not acknowledged at which nothing more is sent; a chunk may exceed it.
    window: int
    batch: bool  # deltas of a step are merged with those of other streams on this link
    sent: int = 0
    acked: int = 0
    unread: deque[StreamDelta] = field(default_factory=deque)
    unread_bytes: int = 0
    blocked_since: float = 0.0  # since when output waits for a full window; 0: it does not


@dataclass(eq=False, slots=True)
class Request:
    """A live request: a run and its reader. Times are seconds on the core's clock."""

    id: bytes
    owner: str
    digest: bytes  # equal for all sendings of the same request
    message: Generate
    model: str  # the name under which its model runs; `message.model` is the name in the request
    run: Run
    reader: Reader
    accepted_at: float
    deadline: float
    queue_deadline: float  # infinity once it was given to a worker
    first_token_deadline: float  # infinity once it has a token
    arrival: int = 0  # its number in the order of arrival
    rank: int = IDLE_RANK  # see rank_of
    passed: int = 0  # later requests of its owner that workers got before it
    pieces: PromptPieces | None = None  # of its prompt, once a worker was chosen among several
    state: RequestState = RequestState.QUEUED

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"request {self.id.hex()} is {self.state.value}: no {event!r} there")
        self.state = following

    @property
    def other_name(self) -> str | None:
        """The name in the request, if its model runs under another name."""
        return self.message.model if self.message.model != self.model else None

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL

    @property
    def waiting_since(self) -> float:
        """The time of its newest token, else of its arrival: a queued request waits since then."""
        return self.run.measured_at or self.accepted_at

    @property
    def attempt(self) -> int:
        """The number of the newest sending of its client."""
        return self.reader.attempt


class Tombstone(Struct, frozen=True):
    """The record of an ended request: a late cancel gets its state, a late sending is refused.

    `final`: it was ended on request, so that no later sending starts it again.
    """

    owner: str
    digest: bytes
    attempt: int
    state: RequestState
    pos: int
    until: float
    final: bool = False


# ---- output that waits for its reader ------------------------------------------------------------


MAX_CHUNK = 64 * 1024  # bytes of text, ids and log-probabilities in one chunk


def append_output(
    chunks: deque[StreamDelta],
    pos: int,
    text: str,
    ids: bytes,
    logprobs: list[Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> int:
    """Add the output of a step. Returns its size in bytes."""
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
