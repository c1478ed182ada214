"""A snapshot of the pool, taken on the broker's thread. All reports are rendered from a snapshot.

Invariant: a snapshot never changes after it was taken, so other threads may read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from msgspec import Struct

from mlxpool.broker.core.state import State
from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.metrics import Counters, Figures
from mlxpool.broker.models import listing as model_listing
from mlxpool.broker.models.listing import Fault
from mlxpool.broker.models.model import Model
from mlxpool.broker.models.registry import Registry
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.liveness import Watch
from mlxpool.broker.workers.worker import Slot, Worker
from mlxpool.common.metrics import Frozen, Histogram
from mlxpool.common.protocol.from_worker import Beat

GATEWAY = "gateway"  # used in place of a slot's name; a real slot's name has a slash
MAX_LIVE = 12  # most requests in a snapshot
MAX_PHASE_CHARS = 20  # most characters of a phase, a word that the worker chooses
_NO_FIGURES = Figures()  # figures of a model without requests


class BrokerInfo(Struct, frozen=True):
    """Figures of the broker. The fields are the keys of `broker` in `ps` and `stats`."""

    pid: int
    boot: int
    state: str  # ready | draining | stopping
    uptime_s: float
    run_dir: str
    local_workers: bool
    links: int  # connections of clients
    full_links: int  # full client connections, see Backlogs
    backlog_bytes: int  # bytes waiting for full connections
    given_up: int  # connections closed because their client read too little
    front_shut: int  # number of times that the front socket was unbound
    turned_out: int  # connections closed because memory was short
    descriptors: int  # limit on the file descriptors of this process
    endpoints: Mapping[str, list[str]]  # endpoints outside the run directory
    metrics: str | None  # the URL of the HTTP server
    trouble: str = ""  # why new workers and commands cannot reach the pool, else ""
    slow_blas: str = ""  # why workers compute slowly on this CPU, and the remedy


class GatewayInfo(Struct, frozen=True):
    """Figures of the gateway. The fields are the keys of `gateway` in `ps` and `stats`."""

    url: str
    state: str  # starting | ready | restarting | draining | stopped
    pid: int | None  # None if no process runs
    uptime_s: float | None
    rss: int  # bytes
    restarts: int
    last_exit: str | None


class ModelSnapshot(Struct, frozen=True):
    """The state and the figures of a model.

    `histograms` is empty until the model's first request, so that unused models cost little.
    """

    name: str
    state: str
    available: bool  # True if new requests for the model are accepted
    used: bool  # True if the model has workers or waiting requests, or had a request
    waiting: int
    waiting_bytes: int
    oldest_wait: float  # wait of the oldest queued request, in seconds; 0 for an empty queue
    running: int  # requests assigned to workers
    workers: Mapping[str, int]  # number of workers by state
    replicas_wanted: int  # the target number of workers; 0 if other supervisors start all workers
    counts: Mapping[str, int]  # the integer counters of metrics.Figures, by name
    outcomes: Mapping[str, int]
    histograms: Mapping[str, Frozen]
    kv: str  # the setting `kv`: the storage of keys and values

    @property
    def failed(self) -> int:
        """Number of streams that ended with an error since the broker's start."""
        asked_for = sum(self.outcomes.get(reason, 0) for reason in ("stop", "length", "cancelled"))
        return sum(self.outcomes.values()) - asked_for


class RankSnapshot(Struct, frozen=True):
    """The state of a rank above 0 in a group, a worker with one process (rank) per device.

    `pid` is 0 until the process of the rank has begun.
    """

    pid: int
    phase: str
    progress_age: float  # seconds since the rank's progress counter changed
    rss: int  # bytes


class WorkerSnapshot(Struct, frozen=True):
    """A slot, and its worker if there is one. Times are seconds.

    Without a worker `state` is "none", and the worker's fields are None, 0 or empty.
    """

    slot: str
    model: str
    restarts: int
    last_exit: str
    state: str = "none"
    pid: int | None = None
    epoch: int | None = None
    running: int = 0  # requests that the broker assigned to the worker
    tokens: int = 0  # tokens received from the worker
    uptime: float = 0.0
    load_s: float | None = None  # seconds from the worker's start until it was ready
    beat_age: float = 0.0  # seconds since the worker's last heartbeat, or its start
    progress_age: float = 0.0  # seconds since the worker's progress counter changed
    suspect: bool = False
    cause: str = ""  # why the worker is suspect, or why the broker ended it
    remote: bool = False
    host: str | None = None
    context: int | None = None
    beat: Beat | None = None  # the last heartbeat, or an empty one; None without a worker
    ranks: tuple[RankSnapshot, ...] = ()  # ranks above 0 of a group on this machine
    gpus: tuple[str, ...] = ()  # GPUs of the worker, one for each rank

    @property
    def shown_state(self) -> str:
        """The state that operators see."""
        return "suspect" if self.suspect else self.state

    @property
    def phase(self) -> str:
        return "" if self.beat is None else (self.beat.phase or "boot")[:MAX_PHASE_CHARS]

    @property
    def load_phases(self) -> dict[str, float]:
        """Seconds of each begun phase of the worker's load, see LOAD_PHASES."""
        return {} if self.beat is None else self.beat.load.shown

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the worker's memory by kind; empty without a heartbeat."""
        return {} if self.beat is None else _integers(self.beat.memory)

    @property
    def prefix(self) -> dict[str, int]:
        """Counters of the worker's prefix cache, by name; empty without a heartbeat."""
        return {} if self.beat is None else _integers(self.beat.prefix)

    @property
    def speculation(self) -> dict[str, int]:
        """Counters of the worker's drafts, by name; empty without a heartbeat or speculation."""
        return {} if self.beat is None else _integers(self.beat.speculation)

    @property
    def acceptance(self) -> float | None:
        """The accepted fraction of checked draft tokens, 0 to 1; None without checked tokens."""
        drafted = self.speculation.get("drafted", 0)
        return self.speculation.get("accepted", 0) / drafted if drafted > 0 else None

    @property
    def memory_used(self) -> int:
        """Bytes of memory in use: the greater of two incomplete measures.

        The resident set does not include device memory. The worker's own figure, `total`, includes
        only memory that MLX has allocated.
        """
        memory = self.memory
        return max(memory.get("total", memory.get("active", 0)), memory.get("rss", 0))


class LiveRequest(Struct, frozen=True):
    """A live request without its contents. `slot` is "" without a worker."""

    id: bytes
    model: str
    state: str  # queued | assigned | streaming
    slot: str
    tokens: int
    age: float  # seconds since the request was accepted


class Snapshot(Struct, frozen=True):
    """The state of the whole pool. `versions` is filled in when metrics are rendered."""

    broker: BrokerInfo
    counters: Counters  # a copy
    sizes: Mapping[str, int]  # number of entries in each map of the core
    models: tuple[ModelSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    lag: float  # lag of the broker's loop in seconds, see LoopLag in edge/loop.py
    memory_limit: int  # bound on the bytes of all workers together
    listing: tuple[Mapping[str, Any], ...] = ()  # a row for each model name, with its path
    faults: tuple[Fault, ...] = ()  # unavailable models, with the reasons that `ps` prints
    live: tuple[LiveRequest, ...] = ()  # the oldest live requests, at most MAX_LIVE
    versions: tuple[str, ...] = ("unknown",) * 4  # versions of mlxpool, Python, pyzmq, libzmq
    gateway: GatewayInfo | None = None  # None without a gateway
    jobs: JobFigures | None = None  # None without jobs

    @property
    def restarts(self) -> dict[str, int]:
        """Unrequested exits since the broker's start, of each slot's workers and of the gateway."""
        gateway = {} if self.gateway is None else {GATEWAY: self.gateway.restarts}
        return {**{worker.slot: worker.restarts for worker in self.workers}, **gateway}


def take(
    state: State,
    broker: BrokerInfo,
    lag: float,
    now: float,
    *,
    listing: bool = False,
    gateway: GatewayInfo | None = None,
    jobs: JobFigures | None = None,
) -> Snapshot:
    """Takes a snapshot.

    If `listing` is set, the snapshot includes the list of models, which only `ps` prints.
    """
    registry = state.registry
    slots = registry.slots.values()
    return Snapshot(
        broker,
        state.counters.copy(),
        _sizes(state),
        (
            *(_model(state, model, now) for model in registry.models.values()),
            *_joined_models(state),
        ),
        tuple(_worker(slot, now) for slot in slots if slot.worker or slot.last_exit),
        lag,
        registry.memory,
        tuple(_listing(registry, now)) if listing else (),
        faults=tuple(model_listing.faults(registry, now)),
        live=tuple(_live(request, now) for request in islice(state.requests.values(), MAX_LIVE)),
        gateway=gateway,
        jobs=jobs,
    )


def _sizes(state: State) -> dict[str, int]:
    """Returns the number of entries in each of the core's maps.

    In an idle pool only the maps of tombstones, of quarantined digests, and of their timers have
    entries.
    """
    workers = [worker for model in state.registry.models.values() for worker in model.workers]
    return {
        "requests": len(state.requests),
        "links": len(state.links),
        "asked": len(state.calls),
        "tombstones": len(state.tombstones),
        "poisoned": len(state.quarantine),
        "timers": len(state.timers),
        "epochs": len(state.workers),
        "places": sum(len(worker.leases) for worker in workers),
        "prefixes": sum(len(worker.route.index) for worker in workers),
    }


def _live(request: Request, now: float) -> LiveRequest:
    return LiveRequest(
        request.id,
        request.model,
        request.state.value,
        request.run.slot,
        request.run.taken,
        now - request.accepted_at,
    )


def _listing(registry: Registry, now: float) -> Iterable[Mapping[str, Any]]:
    known = registry.names.known
    rows = model_listing.rows(registry, now)
    return ({"path": known[row["name"]].config.path, **row} for row in rows)


def _joined_models(state: State) -> Iterable[ModelSnapshot]:
    """Yields the counts of models that had requests and have since become aliases.

    The name of such a model now refers to another model. Without its counts, sums over models
    would decrease.
    """
    registry = state.registry
    for name, figures in state.counters.models.items():
        if name not in registry.models:
            kv = registry.names.known[name].config.kv
            yield ModelSnapshot(
                name, "cold", False, True, 0, 0, 0.0, 0, {}, 0, *_counted(figures), kv
            )


def _model(state: State, model: Model, now: float) -> ModelSnapshot:
    figures = state.counters.models.get(model.name, _NO_FIGURES)
    admits = state.admits and model.admits
    return ModelSnapshot(
        model.name,
        model.shown_state(state.registry.restart_limit),
        admits and state.registry.unavailable(model, now) is None,
        bool(model.workers or model.queue or model.name in state.counters.models),
        len(model.queue),
        model.queue.bytes,
        max(0.0, now - model.queue.waiting_since()),
        sum(len(worker.leases) for worker in model.workers),
        Counter(worker.state.shown for worker in model.workers),
        model.replicas_wanted,
        *_counted(figures),
        model.config.kv,
    )


def _counted(figures: Figures) -> tuple[dict[str, int], dict[str, int], dict[str, Frozen]]:
    """Returns the fields `counts`, `outcomes` and `histograms` of a ModelSnapshot."""
    values = vars(figures).items()
    histograms = {name: value.frozen() for name, value in values if type(value) is Histogram}
    return (
        {name: value for name, value in values if type(value) is int},
        dict(figures.outcomes),
        histograms if figures.accepted else {},
    )


def _worker(slot: Slot, now: float) -> WorkerSnapshot:
    worker = slot.worker
    if worker is None:
        return WorkerSnapshot(slot.name, slot.model, slot.restarts, slot.last_exit)
    hello = worker.hello
    return WorkerSnapshot(
        slot.name,
        slot.model,
        slot.restarts,
        slot.last_exit,
        worker.state.shown,
        worker.pid,
        worker.epoch,
        running=len(worker.leases),
        tokens=worker.tokens,
        uptime=now - worker.started_at,
        load_s=_load_seconds(worker),
        beat_age=max(0.0, now - (worker.beat_at or worker.started_at)),
        progress_age=worker.watch.still,
        suspect=bool(worker.suspect_since),
        cause=worker.cause or worker.suspicion,
        remote=worker.remote,
        host=None if hello is None else hello.host,
        context=None if hello is None else hello.context,
        beat=worker.beat,
        ranks=tuple(_rank(watch) for watch in worker.watch.others),
        gpus=worker.gpus,
    )


def _rank(watch: Watch) -> RankSnapshot:
    look = watch.sample.look
    return RankSnapshot(look.pid, look.phase, watch.still, watch.sample.rss)


def _load_seconds(worker: Worker) -> float | None:
    return worker.ready_at - worker.started_at if worker.ready_at else None


def _integers(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns only the integer values: a worker might send values of other types."""
    return {str(key): value for key, value in values.items() if type(value) is int}
