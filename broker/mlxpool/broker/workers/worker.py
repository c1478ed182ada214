"""The record of a worker, which is one incarnation of a slot, and the slot."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from mlxpool.broker.routing.route_cost import Route
from mlxpool.broker.workers.liveness import Watch
from mlxpool.common.protocol.from_worker import Beat, Hello


class WorkerState(Enum):
    STARTING = "starting"  # its process exists and has not sent `hello`
    LOADING = "loading"  # it has an epoch and no credit yet
    READY = "ready"
    SUSPECT = "suspect"  # past a limit of liveness: gets no new work
    CONDEMNED = "condemned"  # fenced, its requests moved; its process may still exist
    DRAINING = "draining"  # gets no new work, finishes its runs
    YIELDING = "yielding"  # has to hand back its runs
    STOPPING = "stopping"  # has to exit
    LOST = "lost"  # its process is gone

    @property
    def shown(self) -> str:
        """The name of the state in `ps` and the metrics."""
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


PROVEN_TOKENS = 16  # tokens of a worker that count as having served

RunKey = tuple[bytes, int]  # id of a request, number of its run


@dataclass(eq=False, slots=True)
class Worker:
    """A worker. `leases` has the runs given to it whose ends it has not confirmed.

    Invariant: credit() >= 0, and only a READY worker has credit.
    """

    slot: str
    model: str
    pid: int = 0
    gpus: tuple[str, ...] = ()  # GPUs from the broker, one for each rank
    epoch: int = 0
    state: WorkerState = WorkerState.STARTING
    started_at: float = 0.0
    ready_at: float = 0.0  # 0: never
    served: int = 0  # requests that ended in it
    tokens: int = 0  # tokens taken from it
    sequences: int = 0  # free sequences by its last `credit`
    works_seen: int = 0  # `work` messages it had received by then
    works_sent: int = 0
    ended: int = 0  # leases that ended since its last `credit`, which did not count their places
    leases: set[RunKey] = field(default_factory=set)
    batch_bounds: dict[int, int] = field(default_factory=dict)  # run number -> Run.batch_bound
    reading: set[RunKey] = field(default_factory=set)  # leases whose images it still prepares
    calls: set[bytes] = field(default_factory=set)  # ids of calls in flight
    route: Route = field(default_factory=Route)  # for the choice among workers
    beat: Beat = field(default_factory=Beat)
    beat_at: float = 0.0
    hello: Hello | None = None
    watch: Watch = field(default_factory=Watch)
    suspect_since: float = 0.0  # since when it is past a limit of liveness; 0: it is not
    suspicion: str = ""  # why it is past a limit
    cause: str = ""  # why the broker ended it, or the reason of its `bye`
    ended_by_charged_request: bool = False  # a request that had ended another worker ended it
    said_bye: bool = False  # it sent `bye` without an error
    error: Mapping[str, object] | None = None  # the body of the error it left with
    replace: bool = False  # fill its slot again at once
    remote: bool = False  # it dialled in: another supervisor starts and ends its process

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"worker {self.slot} is {self.state.value}: no {event!r} there")
        self.state = following

    def allows(self, event: str) -> bool:
        """Returns whether the event is legal in its state."""
        return event in TRANSITIONS[self.state]

    @property
    def proven(self) -> bool:
        """Returns whether it has served, so that its end does not count as a failed start."""
        return self.served > 0 or self.tokens >= PROVEN_TOKENS

    @property
    def serves(self) -> bool:
        """Returns whether it is ready and has not reported an error."""
        return self.state is WorkerState.READY and self.error is None

    @property
    def idle(self) -> bool:
        return not self.leases and not self.calls

    @property
    def digest(self) -> str:
        """The digest of its loaded model; "" before `hello`."""
        return "" if self.hello is None else self.hello.digest

    @property
    def context(self) -> int:
        """The context of its model in tokens; 0 before `hello`."""
        return 0 if self.hello is None else self.hello.context

    def credit(self) -> int:
        """Returns how many more requests it may get now."""
        if not self.serves:
            return 0
        return max(0, self.sequences - (self.works_sent - self.works_seen))

    def room(self) -> int:
        """Returns how many more requests may run in it now, within the batch bounds of its runs."""
        bound = min(self.batch_bounds.values(), default=None)
        credit = self.credit()
        return credit if bound is None else max(0, min(credit, bound - len(self.leases)))

    def end_lease(self, key: RunKey, cached: int | None = None) -> None:
        """The worker has confirmed the end of a run, or handed it back.

        `cached`: tokens of its prompt that were in the prefix cache; None: not reported.
        """
        self.route.ended(key[1], cached)
        self.ended += key in self.leases
        self.leases.discard(key)
        self.reading.discard(key)
        self.batch_bounds.pop(key[1], None)

    def end_all_leases(self) -> None:
        self.route.drop_runs()
        self.leases.clear()
        self.reading.clear()
        self.batch_bounds.clear()

    def reset_connection(self) -> None:
        """Clear the values of the old connection."""
        self.sequences = self.works_seen = self.works_sent = self.ended = 0
        self.end_all_leases()
        self.calls.clear()
        self.suspect_since = 0.0


class Slot(Struct, eq=False):
    name: str
    model: str
    worker: Worker | None = None
    restarts: int = 0
    last_exit: str = ""  # the cause of the last worker's end
    remote: bool = False  # for workers that dial in; no process is started here


JITTER = 0.25  # largest share added to a delay


def restart_delay(failures: int, first: float, most: float, boot: int = 0) -> float:
    """Returns the delay after `failures` workers in a row that never served: 1, 2, 4 … * `first`.

    `boot` spreads the restarts of many pools by up to JITTER; 0: no spread.
    """
    if failures <= 0:
        return 0.0
    share = hashlib.blake2b(b"%d %d" % (boot, failures), digest_size=2).digest()
    spread = JITTER * int.from_bytes(share, "big") / 2**16 if boot else 0.0
    return min(most, first * 2.0 ** min(failures - 1, 32)) * (1 + spread)
