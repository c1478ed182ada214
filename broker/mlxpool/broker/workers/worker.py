"""The records of a slot and of a worker, which is one incarnation of the slot."""

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
    STARTING = "starting"  # the process exists and has not sent `hello`
    LOADING = "loading"  # the worker has an epoch and no credit yet
    READY = "ready"
    SUSPECT = "suspect"  # without progress for too long; the worker gets no new work
    CONDEMNED = "condemned"  # fenced: its requests were moved; its process may still exist
    DRAINING = "draining"  # the worker gets no new work and finishes its runs
    YIELDING = "yielding"  # the worker must hand back its unfinished runs
    STOPPING = "stopping"  # the worker must exit
    LOST = "lost"  # the process has ended

    @property
    def shown(self) -> str:
        """The name of the state in `ps` and in the metrics."""
        return "draining" if self in LEAVING else self.value


_EXIT = {"exit": WorkerState.LOST}
_CONDEMN = {"condemn": WorkerState.CONDEMNED, **_EXIT}
_STOP = {"stop": WorkerState.STOPPING, **_CONDEMN}
_ACTIVE = {
    # `hello` on a new connection fences the old connection. The worker begins anew.
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


PROVEN_TOKENS = 16  # tokens after which a worker counts as proven

RunKey = tuple[bytes, int]  # (id of a request, number of its run)


@dataclass(eq=False, slots=True)
class Worker:
    """A worker. `leases` has the runs that it was sent, until it confirms their ends.

    Invariant: credit(), the number of further requests that it may get, is at least 0, and above 0
    only in the state READY.
    """

    slot: str
    model: str
    pid: int = 0
    gpus: tuple[str, ...] = ()  # GPUs of the worker, one for each rank
    epoch: int = 0
    state: WorkerState = WorkerState.STARTING
    started_at: float = 0.0
    ready_at: float = 0.0  # 0: never
    served: int = 0  # requests that ended in this worker
    tokens: int = 0  # tokens received from this worker
    sequences: int = 0  # free sequences in the last `credit`
    works_seen: int = 0  # `work` messages that the worker had received before that `credit`
    works_sent: int = 0
    ended: int = 0  # leases ended since the last `credit`; it does not count their sequences
    leases: set[RunKey] = field(default_factory=set)
    batch_bounds: dict[int, int] = field(default_factory=dict)  # run number -> Run.batch_bound
    reading: set[RunKey] = field(default_factory=set)  # leases whose images the worker prepares
    calls: set[bytes] = field(default_factory=set)  # ids of the worker's open calls
    route: Route = field(default_factory=Route)  # for the choice among workers
    beat: Beat = field(default_factory=Beat)
    beat_at: float = 0.0
    hello: Hello | None = None
    watch: Watch = field(default_factory=Watch)
    suspect_since: float = 0.0  # time at which the worker became suspect; 0: not suspect
    suspicion: str = ""  # the exceeded limit, as text
    cause: str = ""  # why the broker ended the worker, or the reason in the worker's `bye`
    ended_by_charged_request: bool = False  # ended by a request that had ended another worker
    said_bye: bool = False  # the worker sent `bye` without an error
    error: Mapping[str, object] | None = None  # the body of the error in the `bye`
    replace: bool = False  # True: the slot gets its next worker without a delay
    remote: bool = False  # another supervisor starts and ends the process

    def move(self, event: str) -> None:
        """Changes state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"worker {self.slot} is {self.state.value}: no {event!r} there")
        self.state = following

    def allows(self, event: str) -> bool:
        """Returns whether the event is legal in the worker's state."""
        return event in TRANSITIONS[self.state]

    @property
    def proven(self) -> bool:
        """True if the worker has ended a request or has made PROVEN_TOKENS tokens.

        The end of such a worker is not a failed start.
        """
        return self.served > 0 or self.tokens >= PROVEN_TOKENS

    @property
    def serves(self) -> bool:
        """Returns whether the worker is ready and has reported no error."""
        return self.state is WorkerState.READY and self.error is None

    @property
    def idle(self) -> bool:
        return not self.leases and not self.calls

    @property
    def digest(self) -> str:
        """The digest of the worker's model; "" before `hello`."""
        return "" if self.hello is None else self.hello.digest

    @property
    def context(self) -> int:
        """The context of the worker's model in tokens; 0 before `hello`."""
        return 0 if self.hello is None else self.hello.context

    def credit(self) -> int:
        """Returns the number of further requests that the worker may get now."""
        if not self.serves:
            return 0
        return max(0, self.sequences - (self.works_sent - self.works_seen))

    def room(self) -> int:
        """Returns the number of further requests that the worker may get within its batch limits.

        It is the credit. If a running request limits the size of its batch, the number is at most
        the number of requests that this limit still allows.
        """
        bound = min(self.batch_bounds.values(), default=None)
        credit = self.credit()
        return credit if bound is None else max(0, min(credit, bound - len(self.leases)))

    def end_lease(self, key: RunKey, cached: int | None = None) -> None:
        """Ends a lease, because the worker has ended its run or returned it unfinished.

        `cached` is the number of the prompt's tokens from the prefix cache, or None if the worker
        did not report it.
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
        """Clears the values that belong to the old connection."""
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
    remote: bool = False  # another supervisor starts the workers; this broker starts none


JITTER = 0.25  # largest random part of a delay, as a share


def restart_delay(failures: int, first: float, most: float, boot: int = 0) -> float:
    """Returns the seconds to wait before the next worker is started.

    `failures`: how many workers in a row ended without having served. The delay is `first` after
    the first failure, and doubles with each further failure, up to `most`. With a `boot` other than
    0, up to JITTER times the delay is added, so that the restarts of many pools are spread.
    """
    if failures <= 0:
        return 0.0
    share = hashlib.blake2b(b"%d %d" % (boot, failures), digest_size=2).digest()
    spread = JITTER * int.from_bytes(share, "big") / 2**16 if boot else 0.0
    return min(most, first * 2.0 ** min(failures - 1, 32)) * (1 + spread)
