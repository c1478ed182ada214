"""The core: `handle(event, now) -> actions`. Pure: no I/O, no clock, no random number.

Invariants:
- An accepted id and attempt gets one terminal message, and no message after it.
- The `pos` of consecutive deltas has no gaps.
- A worker that is not READY gets no work.
- Every live request has a timer.
- accepted = done + failed + cancelled + live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import Action, Outbox
from mlxpool.broker.core.admin_events import AdminEvents
from mlxpool.broker.core.admission import Admission
from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.dispatcher import Dispatcher, PlaceSharing
from mlxpool.broker.core.drain import Drainer
from mlxpool.broker.core.ended_requests import EndedRequests
from mlxpool.broker.core.endings import BULK_TIMER, BulkEndings, Endings
from mlxpool.broker.core.failover import Failover
from mlxpool.broker.core.scaling import ReplicaScaling
from mlxpool.broker.core.state import State
from mlxpool.broker.core.token_ingest import TokenIngest
from mlxpool.broker.core.worker_events import WorkerEvents
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.registry import Registry
from mlxpool.common.config.schema import PoolConfig

NO_LIMIT = 1 << 62  # bytes
MAX_DUE = 64  # most timers that one `Wake` handles; other events come before the remaining timers

Handler = Callable[..., None]  # (event, time) -> None, for one type of event


class Core:
    """Builds the components and routes each event to its handler."""

    def __init__(
        self,
        config: PoolConfig,
        boot: int,
        needs: Mapping[str, int] | None = None,
        memory: int = NO_LIMIT,
        locations: Mapping[str, str] | None = None,
    ) -> None:
        """`needs`: the bytes that a worker of each model needs, by name.

        `memory`: the bound on the bytes of all workers together. `locations`: the path of each
        model's files. Models with equal paths may share workers.
        """
        registry = Registry(memory, config.restart_limit)
        for name, spec in config.models.items():
            registry.add(name, spec, (locations or {}).get(name, ""), (needs or {}).get(name, 0))
        self.state = state = State(config, boot, registry)
        self.outbox = outbox = Outbox(state)
        self.ended = ended = EndedRequests(state)
        self.pool = pool = WorkerPool(state, outbox)
        delivery = Delivery(state, outbox, pool, ended)
        self._calls = calls = Calls(state, outbox, pool)
        self._bulk = bulk = BulkEndings(state, delivery, calls)
        self._dispatcher = dispatcher = Dispatcher(
            state, outbox, pool, delivery, bulk, PlaceSharing(state, pool, delivery)
        )
        self.admission = admission = Admission(
            state, outbox, pool, ended, delivery, dispatcher, calls
        )
        failover = Failover(state, outbox, pool, ended, delivery, dispatcher, calls, bulk)
        self._drainer = drainer = Drainer(state, outbox, pool, dispatcher, failover, bulk)
        self._scaling = ReplicaScaling(state, outbox, pool, drainer)
        ingest = TokenIngest(state, pool, delivery, failover, dispatcher)
        workers = WorkerEvents(state, outbox, pool, dispatcher, calls, failover)
        self._endings = endings = Endings(state, outbox, ended, delivery, calls, bulk)
        self._sweeps = {  # handlers of timers, by the keys of the timers
            "tombstones": ended.expire_tombstones,
            "quarantine": ended.expire_quarantine,
            BULK_TIMER: bulk.end_some,
        }
        admin_events = AdminEvents(state, pool, delivery, failover, drainer, bulk)
        self._handlers: dict[type, Handler] = {
            ev.ClientGenerate: admission.on_generate,
            ev.StartJob: admission.on_start_job,
            ev.WantModel: admin_events.on_want,
            ev.Quarantine: ended.on_quarantine,
            ev.CancelRequest: endings.on_cancel,
            ev.ClientAck: delivery.on_ack,
            ev.ClientPing: calls.on_ping,
            ev.ClientListModels: calls.on_list_models,
            ev.ClientKeep: calls.on_keep,
            ev.ClientModelCall: calls.on_call,
            ev.ClientHeard: endings.on_heard,
            ev.LinkLost: endings.on_link_lost,
            ev.Revoked: endings.on_revoked,
            ev.Spawned: workers.on_spawned,
            ev.SpawnFailed: workers.on_spawn_failed,
            ev.WorkerHello: workers.on_hello,
            ev.WorkerDialled: workers.on_dialled,
            ev.WorkerDeltas: ingest.on_deltas,
            ev.WorkerPrompts: ingest.on_prompts,
            ev.WorkerBeat: workers.on_beat,
            ev.WorkerCredit: workers.on_credit,
            ev.WorkerAnswer: calls.on_answer,
            ev.WorkerYield: failover.on_yield,
            ev.WorkerBye: workers.on_bye,
            ev.WorkerExited: workers.on_exited,
            ev.Looked: workers.on_looked,
            ev.ModelFound: admin_events.on_model_found,
            ev.ModelDescribed: admin_events.on_model_described,
            ev.ModelGone: admin_events.on_model_gone,
            ev.ModelChanged: admin_events.on_model_changed,
            ev.Reload: admin_events.on_reload,
            ev.LoadModel: admin_events.on_load,
            ev.UnloadModel: admin_events.on_unload,
            ev.StartDrain: drainer.on_drain,
            ev.RestartWorker: admin_events.on_restart,
            ev.Shutdown: admin_events.on_shutdown,
            ev.Unreachable: admin_events.on_unreachable,
            ev.Wake: self._on_wake,
            ev.Late: endings.on_late,
        }

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Returns the actions that follow from one event, in order."""
        self.outbox.open()
        self._bulk.open()
        self._handlers[type(event)](event, now)
        return self.outbox.close()

    @property
    def ends_more(self) -> bool:
        """Returns whether the next events have streams or calls left to end (BulkEndings)."""
        return len(self._bulk) > 0

    def next_wake(self) -> float:
        """Returns the latest time for the next `Wake`; infinity if nothing is scheduled."""
        return self.state.timers.next()

    def _on_wake(self, event: ev.Wake, now: float) -> None:
        timers = self.state.timers
        due = deque(timers.due(now, MAX_DUE))
        try:
            while due:
                self._on_timer(due.popleft(), now)
        finally:
            for key in due:  # an exception costs one timer; a later `Wake` handles the others
                if key not in timers:
                    timers.set(key, now)

    def _on_timer(self, key: Hashable, now: float) -> None:
        match key:
            case ("call", bytes(id)):
                self._calls.on_timer(id, now)
            case bytes():  # a request's id
                self._endings.on_request_timer(key, now)
            case ("link", int(number)):
                self._endings.on_link_timer(number, now)
            case ("drain", str(slot), int(epoch)):
                self._drainer.on_worker_timer(slot, epoch, now)
            case ("drained", str(name)):
                self._drainer.on_timer(name, now)
            case ("idle" | "restart" | "replicas" | "places" as what, str(name)):
                self._on_model_timer(what, name, now)
            case str(sweep):
                self._sweeps[sweep](now)

    def _on_model_timer(self, what: str, name: str, now: float) -> None:
        if what == "replicas":
            self._scaling.on_timer(name, now)
        elif what == "places":
            model = self.state.registry.models.get(name)  # None: the name became an alias
            if model is not None:
                self._dispatcher.dispatch(model, now)
        else:
            self.pool.on_timer(what, name, now)
