"""Handles messages of workers and the reports of their supervisor."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import Outbox
from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.dispatcher import Dispatcher
from mlxpool.broker.core.failover import Failover
from mlxpool.broker.core.state import PoolPhase, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import ModelState
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.liveness import judge
from mlxpool.broker.workers.placement import observe_beat, observe_prefill
from mlxpool.broker.workers.worker import FENCED, LEAVING, WorkerState
from mlxpool.common.errors import ModelLoadFailed, from_body, sendable
from mlxpool.common.protocol.to_worker import Heard


class WorkerEvents(Struct, eq=False):
    """Handles the events of workers. Messages of a fenced epoch are counted and dropped."""

    _state: State
    _outbox: Outbox
    _pool: WorkerPool
    _dispatcher: Dispatcher
    _calls: Calls
    _failover: Failover

    # ---- messages ----------------------------------------------------------------------------

    def on_hello(self, event: ev.WorkerHello, now: float) -> None:
        worker = self._state.registry.slots[event.slot].worker
        if worker is not None and worker.state in LEAVING and worker.epoch:
            self._failover.condemn(worker, exit_causes.DRAINED, now)
        if worker is None or not worker.allows("hello"):
            self._state.counters.fenced += 1
            return
        if worker.epoch:  # a lost connection, not a lost process: no request is blamed
            self._failover.move_work(worker, exit_causes.NEW_CONNECTION, now, counts=False)
        self._pool.welcome(worker, event.message, event.token, now)
        self._failover.serve_elsewhere(worker, now)

    def on_dialled(self, event: ev.WorkerDialled, now: float) -> None:
        if not self._state.admits:
            return  # the worker connects again, to the next broker
        self._pool.add_remote(event.slot, event.model, event.message.pid, now)
        self.on_hello(ev.WorkerHello(event.slot, event.message, event.token), now)

    def on_beat(self, event: ev.WorkerBeat, now: float) -> None:
        worker = self._state.workers.get(event.epoch)
        if worker is None:
            self._state.counters.fenced += 1
            return
        worker.beat, worker.beat_at = event.message, now
        observe_beat(worker, self._state.model_of_worker(worker).speed)
        self._pool.measure(worker)
        self._outbox.tell(worker, Heard())

    def on_credit(self, event: ev.WorkerCredit, now: float) -> None:
        worker = self._state.workers.get(event.epoch)
        if worker is None:
            self._state.counters.fenced += 1
            return
        self._pool.credit(worker, event.message, now)
        model = self._state.model_of_worker(worker)
        self._calls.forward(model)
        self._dispatcher.dispatch(model, now)
        self._pool.work_ended(model, now)

    def on_bye(self, event: ev.WorkerBye, now: float) -> None:
        worker = self._state.workers.get(event.epoch)
        if worker is None:
            return
        if event.message.error is None:
            worker.error, worker.said_bye = None, True
            return
        error = from_body(event.message.error)
        worker.error, worker.said_bye = error.body(), False
        if worker.ready_at:
            worker.cause = sendable(error.message) or exit_causes.CANNOT_SERVE

    # ---- processes ---------------------------------------------------------------------------

    def on_spawned(self, event: ev.Spawned, now: float) -> None:
        worker = self._state.registry.slots[event.slot].worker
        if worker is not None:
            worker.pid, worker.gpus = event.pid, event.gpus

    def on_spawn_failed(self, event: ev.SpawnFailed, now: float) -> None:
        worker = self._state.registry.slots[event.slot].worker
        if worker is not None:
            worker.error = ModelLoadFailed(event.message).body()
            self.on_exited(ev.WorkerExited(event.slot, event.message, own=True), now)

    def on_looked(self, event: ev.Looked, now: float) -> None:
        """Judges a worker by a sample of its process.

        A worker that exceeds a limit becomes SUSPECT, and is fenced and stopped at twice the limit.
        """
        worker = self._state.registry.slots[event.slot].worker
        if worker is None or worker.state in FENCED:
            return
        worker.watch.observe(event.sample, worker.beat_at, now, event.tick)
        model = self._state.model_of_worker(worker)
        observe_prefill(worker, event.sample.look, model.speed)
        verdict = judge(
            worker.watch,
            self._state.config,
            welcomed=worker.epoch != 0,
            memory_limit=model.config.memory_limit,
        )
        if verdict.hung:
            self._failover.condemn(worker, verdict.cause, now, own=verdict.own)
            return
        self._pool.judge(worker, verdict, now)
        if worker.state is WorkerState.READY:
            self._dispatcher.dispatch(model, now)

    def on_exited(self, event: ev.WorkerExited, now: float) -> None:
        state, slot = self._state, self._state.registry.slots[event.slot]
        own = event.own and not (slot.worker is not None and slot.worker.said_bye)
        if own and slot.worker is not None:
            self._failover.mark_if_ended_by_charged_request(slot.worker, event.prefill)
        worker = self._pool.exited(slot, event.cause, now, own=own)
        if worker is None:
            return
        self._failover.move_work(worker, slot.last_exit, now, own=own, prefill=event.prefill)
        model, unavailable = state.registry.models[slot.model], state.registry.unavailable
        error = unavailable(model, now)
        kept = model.config.pin and model.state is ModelState.WANTED
        if error is not None:
            self._failover.give_up(model, lambda name: unavailable(model, now, name) or error, now)
        elif state.phase in (PoolPhase.SERVING, PoolPhase.DRAINING) and (
            model.queue or model.calls or worker.replace or kept
        ):
            self._pool.require(model, now)
        self._pool.require_those_without_worker(now)
        self._failover.serve_elsewhere(worker, now)
