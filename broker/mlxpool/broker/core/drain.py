"""Lets a worker, a model or the pool finish its work within a grace period."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import Outbox
from mlxpool.broker.core.dispatcher import Dispatcher
from mlxpool.broker.core.endings import BulkEndings
from mlxpool.broker.core.failover import Failover
from mlxpool.broker.core.state import PoolPhase, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import Model
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.errors import Draining
from mlxpool.common.protocol import to_worker


class Drainer(Struct, eq=False):
    _state: State
    _outbox: Outbox
    _pool: WorkerPool
    _dispatcher: Dispatcher
    _failover: Failover
    _bulk: BulkEndings

    def on_drain(self, event: ev.StartDrain, now: float) -> None:
        if event.slot is not None:
            self.drain_worker(event.slot, event.grace, now)
        elif event.model is not None:
            self.drain_model(self._state.registry.models[event.model], event.grace, now)
        else:
            self._drain_pool(event.grace, now)

    # ---- a worker ----------------------------------------------------------------------------

    def drain_worker(self, slot: str, grace: float, now: float) -> None:
        """Gives the worker of a slot no new work. Its runs may continue for `grace` seconds."""
        worker = self._state.registry.slots[slot].worker
        if worker is None or not worker.allows("drain"):
            return
        worker.move("drain")
        worker.cause = exit_causes.DRAINED
        self._state.timers.set(("drain", slot, worker.epoch), now + grace)
        self._pool.stop_if_drained(worker)
        self._dispatcher.dispatch(self._state.model_of_worker(worker), now)

    def on_worker_timer(self, slot_name: str, epoch: int, now: float) -> None:
        """Ends the grace period of a draining worker: the worker must hand back its runs.

        If it has not handed them back when the timer is due again, its process is stopped.
        """
        slot = self._state.registry.slots.get(slot_name)  # None: its model became an alias
        worker = None if slot is None else slot.worker
        if worker is None or worker.epoch != epoch:
            return
        if worker.state is WorkerState.YIELDING:
            self._failover.condemn(worker, exit_causes.DRAINED, now)
        elif worker.state is WorkerState.DRAINING:
            worker.move("yield")
            self._outbox.tell(worker, to_worker.Drain())
            grace = self._state.config.stop_grace
            self._state.timers.set(("drain", slot_name, epoch), now + grace)

    # ---- a model, the pool -------------------------------------------------------------------

    def drain_model(self, model: Model, grace: float, now: float) -> None:
        """Refuses new requests of a model. Accepted requests may continue for `grace` seconds."""
        model.move("drain")
        self._state.timers.set(("drained", model.name), now + grace)
        self._pool.work_ended(model, now)

    def _drain_pool(self, grace: float, now: float) -> None:
        if self._state.phase is PoolPhase.SERVING:
            self._state.phase = PoolPhase.DRAINING
        self._state.timers.set(("drained", ""), now + grace)
        for model in self._state.registry.models.values():
            self._pool.work_ended(model, now)

    def on_timer(self, name: str, now: float) -> None:
        """Ends the grace period of a model, or of the pool (""): fails the remaining requests."""
        models = self._state.registry.models
        if not name and not self._state.admits:
            self._fail(list(models.values()), self._give_up_all, now)
        elif name in models and not models[name].admits:
            self._fail([models[name]], partial(self._unload_drained, models[name]), now)

    def _fail(self, models: list[Model], then: Callable[[float], None], now: float) -> None:
        """Fails the requests and the waiting calls of `models`, then calls `then`."""
        state, names = self._state, {model.name for model in models}
        error = Draining("the pool is being drained; send the request again later")
        self._bulk.begin(
            [request.id for request in state.requests.values() if request.model in names],
            [call.id for model in models for call in model.calls],
            lambda request: request.model in names,
            now,
            ends_call=lambda call: call.model in names and not call.epoch,
            error=lambda _: error,
            then=then,
        )
        self._bulk.end_some(now)

    def _give_up_all(self, now: float) -> None:
        for model in self._state.registry.models.values():
            self._pool.give_up(model)

    def _unload_drained(self, model: Model, now: float) -> None:
        """Stops the workers of a drained model, unless the model was opened again meanwhile.

        If a new drain has begun, the workers stop at the end of that drain's grace period.
        """
        if not model.admits and ("drained", model.name) not in self._state.timers:
            self._pool.give_up(model)
            self._pool.unload(model, exit_causes.DRAINED)
