"""The state of the core. All components share and change one State, which decides nothing."""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

from msgspec import Struct, field

from mlxpool.broker.metrics import Counters
from mlxpool.broker.models.model import Model
from mlxpool.broker.models.registry import Registry
from mlxpool.broker.requests.call import Call
from mlxpool.broker.requests.quotas import Rates
from mlxpool.broker.requests.request import Request, Tombstone
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.errors import Draining

SLACK = 64  # most invalid entries before the heap is compacted

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """A heap of times by key. Only the newest time of a key is valid."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def at(self, key: K) -> float:
        """Returns the time of a key; infinity if it has none."""
        return self._at.get(key, math.inf)

    def set(self, key: K, at: float) -> None:
        """Sets the time of a key; infinity clears the time."""
        if math.isinf(at):
            self._at.pop(key, None)
        elif self._at.get(key) != at:
            self._at[key] = at
            self._count += 1
            heapq.heappush(self._heap, (at, self._count, key))
            if len(self._heap) > SLACK + 4 * len(self._at):
                self._compact()

    def _compact(self) -> None:
        """Drops the outdated entries of the heap, so that they do not fill memory."""
        self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)

    def clear(self, key: K) -> None:
        self._at.pop(key, None)

    def next(self) -> float:
        """Returns the earliest time of all keys; infinity without times."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float, most: float = math.inf) -> list[K]:
        """Returns and clears at most `most` keys whose time has come, the earliest first."""
        keys: list[K] = []
        while len(keys) < most and self.next() <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            keys.append(key)
        return keys


# Seconds of silence (three pings) after which waiting clients get the places of a client.
STALL_GRACE = 3.0
JOBS_LINK = 0  # link number of the broker's own reader: the job manager
QUEUE_RETRY_MS = 1000  # `retry_after_ms` of a request that a full queue or a quota refuses


class PoolPhase(Enum):
    """The phase of the pool. It only moves forward."""

    SERVING = "serving"
    DRAINING = "draining"  # refuses new requests, finishes accepted requests
    DRAINED = "drained"  # StopPool was sent
    CLOSING = "closing"  # the broker ends: all streams have ended, no worker is started


class Link(Struct, eq=False):
    """A client's connection that has live streams or open calls, or sent a frame recently."""

    heard_at: float
    # Ids of the link's live streams and open calls, in the order of arrival.
    ids: dict[bytes, None] = field(default_factory=dict)
    calls: dict[bytes, None] = field(default_factory=dict)
    lost: bool = False  # no message can be sent on it any more


class State(Struct, eq=False):
    """The state of the broker's core, shared by all its components.

    `boot` is the random number of this broker process. The numbers of runs and requests and the
    epochs of workers only increase, so none is ever reused.
    """

    config: PoolConfig
    boot: int
    registry: Registry
    timers: Timers[Hashable] = field(default_factory=Timers)
    counters: Counters = field(default_factory=Counters)
    phase: PoolPhase = PoolPhase.SERVING
    requests: dict[bytes, Request] = field(default_factory=dict)  # live requests, by id
    tombstones: OrderedDict[bytes, Tombstone] = field(default_factory=OrderedDict)  # by id
    quarantine: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # digest -> end time
    owned: Counter[str] = field(default_factory=Counter)  # live requests by owner
    cancel_rates: Rates = field(default_factory=Rates)  # rate of cancels by owner
    links: dict[int, Link] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)  # by epoch, without fenced workers
    calls: dict[bytes, Call] = field(default_factory=dict)  # open calls, by id
    last_epoch: int = 0
    last_run: int = 0  # number of the newest run in a worker
    last_arrival: int = 0  # number of the newest accepted request
    trouble: str = ""  # why new workers and commands cannot reach the broker, else ""

    @property
    def admits(self) -> bool:
        """Returns whether the pool takes new requests."""
        return self.phase is PoolPhase.SERVING

    def check_admits(self, model: Model, name: str) -> None:
        """Raises Draining if the pool or the model, requested as `name`, refuses new work."""
        if not self.admits:
            raise Draining("the broker is going down; send the request again later")
        if not model.admits:
            raise Draining(f"model {name!r} is drained; `mlxpool load {name}` opens it again")

    def model_of(self, request: Request) -> Model:
        return self.registry.models[request.model]

    def model_of_worker(self, worker: Worker) -> Model:
        return self.registry.models[worker.model]

    def worker_in(self, slot: str) -> Worker | None:
        """Returns the worker in a slot; None if the slot is empty or unknown."""
        known = self.registry.slots.get(slot)
        return None if known is None else known.worker

    def has_explained_end(self, epoch: int) -> bool:
        """Returns whether the worker of this epoch has sent `bye`, or is fenced."""
        worker = self.workers.get(epoch)
        return worker is None or worker.said_bye or worker.error is not None

    def leaseholder(self, request: Request) -> Worker | None:
        """Returns the worker that runs a request; None if no worker runs it."""
        return self.workers.get(request.run.epoch)

    # ---- links -------------------------------------------------------------------------------

    def heard(self, link: int, now: float) -> None:
        """Records the time of the last frame on a link; creates the link if it is new."""
        known = self.links.get(link)
        if known is None:
            self.links[link] = Link(now)
            self.watch_link(link, now)
        else:
            known.heard_at = now

    def watch_link(self, link: int, now: float) -> None:
        """Sets the timer that ends a silent link, see Endings.on_link_timer.

        JOBS_LINK gets no timer.
        """
        if link == JOBS_LINK:
            return
        silent_until = now + min(STALL_GRACE, self.config.client_grace)
        self.timers.set(("link", link), silent_until)

    def attach(self, request: Request) -> None:
        """Adds a stream to the link of its reader."""
        self.links[request.reader.link].ids[request.id] = None

    def detach(self, request: Request) -> None:
        self.links[request.reader.link].ids.pop(request.id, None)

    def add_call(self, call: Call) -> None:
        """Adds an open call to the link that sent it."""
        self.calls[call.id] = call
        self.links[call.link].calls[call.id] = None

    def remove_call(self, call: Call) -> None:
        """Removes a call that has ended."""
        del self.calls[call.id]
        self.links[call.link].calls.pop(call.id, None)
