"""What the core remembers. Components share one State and change it; it decides nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from mlxpool.broker.core.timers import Timers
from mlxpool.broker.metrics.counters import Counters
from mlxpool.broker.models.model import Model
from mlxpool.broker.models.registry import Registry
from mlxpool.broker.requests.call import Call
from mlxpool.broker.requests.quotas import Rates
from mlxpool.broker.requests.request import Request, Tombstone
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.config.schema import PoolConfig

QUEUE_RETRY_MS = 1000  # `retry_after_ms` of a request that a full queue or a quota refuses


class PoolPhase(Enum):
    """How far the pool is on its way to the end. It only goes forward."""

    SERVING = "serving"
    DRAINING = "draining"  # admits nothing, finishes what was accepted
    DRAINED = "drained"  # StopPool was sent
    CLOSING = "closing"  # the broker ends: every stream has its terminal, no worker is started


@dataclass(eq=False, slots=True)
class Link:
    """A client's connection that has live streams or was heard from lately."""

    heard_at: float
    ids: set[bytes] = field(default_factory=set)  # of its live streams
    lost: bool = False  # nothing can be sent on it any more


@dataclass(eq=False, slots=True)
class State:
    """`boot` is the random number of this broker process. Numbers and epochs never repeat."""

    config: PoolConfig
    boot: int
    registry: Registry
    timers: Timers = field(default_factory=Timers)
    counters: Counters = field(default_factory=Counters)
    phase: PoolPhase = PoolPhase.SERVING
    requests: dict[bytes, Request] = field(default_factory=dict)  # live ones, by id
    tombstones: OrderedDict[bytes, Tombstone] = field(default_factory=OrderedDict)  # by id
    quarantine: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # digest -> until
    owned: Counter[str] = field(default_factory=Counter)  # owner -> live requests
    cancel_rates: Rates = field(default_factory=Rates)  # what each owner spends in cancels
    links: dict[int, Link] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)  # by epoch; not those that are fenced
    calls: dict[bytes, tuple[Call, int]] = field(default_factory=dict)  # id -> call, its epoch
    last_epoch: int = 0
    last_run: int = 0  # number of the newest run given to a worker
    last_arrival: int = 0  # number of the newest accepted request

    @property
    def admits(self) -> bool:
        """Whether the pool takes new requests."""
        return self.phase is PoolPhase.SERVING

    def model_of(self, request: Request) -> Model:
        return self.registry.models[request.model]

    def model_of_worker(self, worker: Worker) -> Model:
        return self.registry.models[worker.model]

    def leaseholder(self, request: Request) -> Worker | None:
        """The worker that runs a request; None if none does."""
        return self.workers.get(request.run.epoch)
