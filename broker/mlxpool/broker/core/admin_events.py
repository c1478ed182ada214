"""Handles operators' commands and new settings."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.drain import Drainer
from mlxpool.broker.core.endings import BulkEndings
from mlxpool.broker.core.failover import Failover
from mlxpool.broker.core.state import PoolPhase, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import FAILING
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.exit_causes import BROKER_ENDS, UNLOADED
from mlxpool.common.errors import Draining, WorkerLost

BROKER_RETRY_MS = 1000  # `retry_after_ms` of streams that end because the broker ends


class AdminEvents(Struct, eq=False):
    _state: State
    _pool: WorkerPool
    _delivery: Delivery
    _failover: Failover
    _drainer: Drainer
    _bulk: BulkEndings

    # ---- operators ---------------------------------------------------------------------------

    def on_load(self, event: ev.LoadModel, now: float) -> None:
        """Starts a model, even if it drains or repeated failures have opened its breaker."""
        if not self._state.admits:
            return
        model = self._state.registry.models[event.model]
        model.retry_at, model.failures = 0.0, 0
        model.move("reopen")
        model.need = model.floor
        self._pool.require(model, now)

    def on_want(self, event: ev.WantModel, now: float) -> None:
        """Starts workers for the jobs that wait for a model, as if a request waited for it."""
        model = self._state.registry.models.get(event.model)
        if model is None or not self._state.admits or not model.admits:
            return
        if self._state.registry.unavailable(model, now) is None:
            self._pool.require(model, now)

    def on_unload(self, event: ev.UnloadModel, now: float) -> None:
        """Fails the runs of a model and stops its workers.

        Waiting requests start the model again.
        """
        model = self._state.registry.models[event.model]
        for worker in model.workers:
            error = WorkerLost(
                f"{exit_causes.ended(worker.slot, UNLOADED)}; send the request again",
                details={"worker": worker.slot, "cause": UNLOADED},
            )
            for request in self._failover.running(worker):
                self._delivery.fail(request, error, now)
        self._pool.unload(model, UNLOADED)
        if (model.queue or model.calls) and not model.workers:  # no process exit will start it
            self._pool.require(model, now)

    def on_restart(self, event: ev.RestartWorker, now: float) -> None:
        slot = self._state.registry.slots[event.slot]
        if slot.worker is None:
            self._pool.require(self._state.registry.models[slot.model], now)
        else:
            slot.worker.replace = True
            self._drainer.drain_worker(event.slot, 0.0, now)

    def on_shutdown(self, event: ev.Shutdown, now: float) -> None:
        """Ends all streams and calls, then stops the workers. New requests are refused."""
        state = self._state
        state.phase = PoolPhase.CLOSING
        error = Draining(
            f"{BROKER_ENDS}; send the request again",
            retry_after_ms=None if event.final else BROKER_RETRY_MS,
        )
        self._bulk.begin(
            state.requests,
            state.calls,
            lambda _: True,
            now,
            error=lambda _: error,
            then=self._stop_workers,
        )
        self._bulk.end_some(now)

    def _stop_workers(self, now: float) -> None:
        for model in self._state.registry.models.values():
            self._pool.give_up(model)
            self._pool.unload(model, BROKER_ENDS)

    # ---- settings ----------------------------------------------------------------------------

    def on_reload(self, event: ev.Reload, now: float) -> None:
        self._state.config = event.config
        registry = self._state.registry
        registry.memory, registry.restart_limit = event.memory, event.config.restart_limit

    def on_unreachable(self, event: ev.Unreachable, now: float) -> None:
        """Lets failed models start workers again, once workers can reach the broker again."""
        self._state.trouble = event.why
        failed = (m for m in self._state.registry.models.values() if m.state in FAILING)
        for model in failed if not event.why else ():
            model.retry_at, model.failures, model.last_error = 0.0, 0, None
            model.move("mended")

    def on_model_found(self, event: ev.ModelFound, now: float) -> None:
        self._state.registry.add(event.name, event.config, event.location, event.need)

    def on_model_described(self, event: ev.ModelDescribed, now: float) -> None:
        self._state.registry.describe(event.name, event.about)

    def on_model_gone(self, event: ev.ModelGone, now: float) -> None:
        """Drains a model that was removed from the settings. New requests get UnknownModel."""
        model = self._state.registry.remove(event.name)
        if model is not None:
            self._drainer.drain_model(model, event.grace, now)

    def on_model_changed(self, event: ev.ModelChanged, now: float) -> None:
        """Replaces the workers of a model whose settings have changed.

        Old workers finish their streams. They hand over streams that have not ended after `grace`
        seconds.
        """
        registry = self._state.registry
        for worker in registry.change(event.name, event.config, event.location, event.need):
            model = self._state.model_of_worker(worker)
            worker.replace = registry.slots[worker.slot] in model.local_slots
            self._drainer.drain_worker(worker.slot, event.grace, now)
        if (name := registry.names.model_of(event.name)) is not None:
            self._pool.watch_load(registry.models[name], now)  # fewer workers may be required now
