"""One worker's states as a literal table, and the model whose slots workers fill."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mlxpool.broker.requests.fair_queue import Queue
from mlxpool.broker.workers.liveness import Watch
from mlxpool.common.config.schema import ModelConfig


class WorkerState(Enum):
    STARTING = "starting"  # the process exists, it has not said hello
    LOADING = "loading"  # it has an epoch
    READY = "ready"
    SUSPECT = "suspect"  # past a limit: no new work
    CONDEMNED = "condemned"  # fenced, its requests moved, its process may still exist
    DRAINING = "draining"  # finishes what it has
    LOST = "lost"  # its process is gone


_GONE = {"exit": WorkerState.LOST}
_LEAVING = {"drain": WorkerState.DRAINING, "condemn": WorkerState.CONDEMNED, **_GONE}
# A `hello` on a new connection: the old one is fenced, the same process begins again.
_AGAIN = {"hello": WorkerState.LOADING}

TRANSITIONS: dict[WorkerState, dict[str, WorkerState]] = {
    WorkerState.STARTING: {**_AGAIN, **_LEAVING},
    WorkerState.LOADING: {"ready": WorkerState.READY, **_AGAIN, **_LEAVING},
    WorkerState.READY: {"suspect": WorkerState.SUSPECT, **_AGAIN, **_LEAVING},
    WorkerState.SUSPECT: {"recover": WorkerState.READY, **_AGAIN, **_LEAVING},
    WorkerState.DRAINING: {"condemn": WorkerState.CONDEMNED, **_GONE},
    WorkerState.CONDEMNED: _GONE,
    WorkerState.LOST: {},
}
COMING = frozenset(
    {WorkerState.STARTING, WorkerState.LOADING, WorkerState.READY, WorkerState.SUSPECT}
)
PROOF = 16  # tokens
FENCED = frozenset({WorkerState.CONDEMNED, WorkerState.LOST})


@dataclass(eq=False, slots=True)
class Worker:
    """One incarnation of a slot. `places` holds the (id, run) pairs it has not confirmed ended.

    Invariant: credit() >= 0; only a READY worker gets work.
    """

    slot: str
    model: str
    pid: int = 0
    epoch: int = 0
    state: WorkerState = WorkerState.STARTING
    started_at: float = 0.0
    ready_at: float = 0.0
    served: int = 0  # requests it ended
    made: int = 0  # tokens taken from it
    sequences: int = 0  # free places by its last `credit`
    works_seen: int = 0  # `work` frames it had received by then
    works_sent: int = 0
    places: set[tuple[bytes, int]] = field(default_factory=set)
    company: dict[int, int] = field(default_factory=dict)  # run -> how many it tolerates
    asked: set[bytes] = field(default_factory=set)  # tokenize calls under way
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # prefixes it has seen
    beat: Mapping[str, Any] = field(default_factory=dict)
    beat_at: float = 0.0
    hello: Mapping[str, Any] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    suspect_since: float = 0.0  # 0: it is not
    suspicion: str = ""  # why it is suspect
    cause: str = ""  # why we ended it, or what it said of its end
    again: bool = False  # ended by a request that had ended another one
    said_bye: bool = False  # it was asked to go, by whomever
    yielding: bool = False  # was told to hand back what it runs
    dismissed: bool = False  # was told to go
    replace: bool = False  # its slot is filled again at once
    remote: bool = False  # it dialled in: another supervisor starts and ends it
    error: Mapping[str, Any] | None = None  # why it said it cannot serve, or no longer

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"worker {self.slot} is {self.state.value}: no {event!r} there")
        self.state = following

    @property
    def proven(self) -> bool:
        """It worked: its end is not a failure to start."""
        return self.served > 0 or self.made >= PROOF

    @property
    def drainable(self) -> bool:
        return "drain" in TRANSITIONS[self.state]

    @property
    def serves(self) -> bool:
        """It is ready, and has not said that it ends."""
        return self.state is WorkerState.READY and self.error is None

    def credit(self) -> int:
        """How many more requests it may be given now."""
        if not self.serves:
            return 0
        return max(0, self.sequences - (self.works_sent - self.works_seen))

    def leave(self, place: tuple[bytes, int]) -> None:
        """A run has ended there, by the worker's word."""
        self.places.discard(place)
        self.company.pop(place[1], None)

    def begin_again(self) -> None:
        """Forget what belongs to one connection."""
        self.sequences = self.works_seen = self.works_sent = 0
        self.places.clear()
        self.company.clear()
        self.asked.clear()
        self.suspect_since = 0.0


@dataclass(eq=False, slots=True)
class Slot:
    """A place for one worker of a model, over all its incarnations."""

    name: str
    model: str
    worker: Worker | None = None
    restarts: int = 0
    last_exit: str = ""
    remote: bool = False  # for workers that dial in; none is started here


@dataclass(frozen=True, slots=True)
class Question:
    """A `tokenize` or `detokenize` of a client; `tries` counts the workers it was put to."""

    id: bytes
    link: int
    attempt: int
    kind: str
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...]
    tries: int = 0


@dataclass(eq=False, slots=True)
class Model:
    """A served model: its slots, what waits for it, and whether it may be started."""

    name: str
    config: ModelConfig
    slots: list[Slot]
    floor: int = 0  # bytes one worker takes at least: its limit, or its files
    need: int = 0  # the floor, or the most seen of it
    queue: Queue = field(default_factory=Queue)
    asks: list[Question] = field(default_factory=list)
    wanted: bool = False  # somebody asked for it since it was last unloaded
    closed: bool = False  # drained: takes no new requests until it is loaded again
    failures: int = 0  # incarnations in a row that ended before they served
    retry_at: float = 0.0
    idle_since: float = 0.0
    last_error: Mapping[str, Any] | None = None

    @property
    def workers(self) -> list[Worker]:
        return [slot.worker for slot in self.slots if slot.worker is not None]

    @property
    def own(self) -> list[Worker]:
        """The workers that we started and can end."""
        return [worker for worker in self.workers if not worker.remote]

    @property
    def settled(self) -> bool:
        """Whether it is ready, and no worker is to come that might be another."""
        states = {worker.state for worker in self.workers}
        coming = {WorkerState.STARTING, WorkerState.LOADING, WorkerState.SUSPECT}
        return WorkerState.READY in states and not states & coming

    @property
    def hopeful(self) -> bool:
        """A worker serves it, or is on its way to: nobody need give up."""
        return any(worker.state in COMING for worker in self.workers)

    @property
    def busy(self) -> bool:
        """Somebody waits for it or is served by it."""
        return bool(self.queue or self.asks or any(w.places or w.asked for w in self.workers))

    @property
    def kept(self) -> bool:
        """Pinned, and nobody has unloaded it."""
        return self.config.pin and self.wanted and not self.closed

    @property
    def quiet(self) -> bool:
        """Nobody uses it, and nothing about it has to be remembered."""
        return not (self.workers or self.busy or self.wanted or self.closed or self.failures)

    def state(self, restart_limit: int) -> str:
        """cold | starting | ready | draining | failed | broken, for people."""
        states = {worker.state for worker in self.workers}
        if self.closed:
            return "draining" if states else "drained"
        if WorkerState.READY in states or WorkerState.SUSPECT in states:
            return "ready"
        if states & {WorkerState.STARTING, WorkerState.LOADING}:
            return "starting"
        if states:
            return "draining"
        if self.last_error is not None:
            return "failed"
        if self.failures >= restart_limit:
            return "broken"
        return "starting" if self.wanted and self.failures else "cold"
