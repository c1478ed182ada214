"""Adds or drains workers of models whose number of workers depends on their load."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.broker.core.actions import Note, Outbox
from mlxpool.broker.core.drain import Drainer
from mlxpool.broker.core.state import State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import Model
from mlxpool.broker.models.replica_scaling import ReplicaLoad, next_scale, waiting_tokens
from mlxpool.broker.workers.worker import SERVING


class ReplicaScaling(Struct, eq=False):
    """Adapts the number of workers that this broker starts for a model to the model's load.

    Other supervisors read the wanted number in the broker's figures, and start their workers
    themselves.
    """

    _state: State
    _outbox: Outbox
    _pool: WorkerPool
    _drainer: Drainer

    def on_timer(self, name: str, now: float) -> None:
        """Handles a model's timer: adds or drains workers according to the model's load."""
        model = self._state.registry.models.get(name)  # None: the name became an alias
        if model is None or not model.scales or not self._state.admits:
            return
        before = model.replicas_wanted
        model.scale = next_scale(model.scale, _load_of(model), model.config.scaling, now)
        wanted = model.replicas_wanted
        if wanted != before:
            fields = {"model": name, "wanted": wanted, "before": before}
            self._outbox.add(Note("info", "replicas wanted", fields))
        if wanted > before:
            self._pool.require(model, now)
        elif wanted < before:
            for slot in model.surplus_slots:
                self._drainer.drain_worker(slot.name, self._state.config.drain_grace, now)
        if model.busy or wanted > model.config.scaling.min:
            self._pool.watch_load(model, now)


def _load_of(model: Model) -> ReplicaLoad:
    return ReplicaLoad(
        len(model.queue),
        waiting_tokens(model.queue, len(model.queue)),
        sum(len(worker.leases) for worker in model.workers),
        model.config.sequences,
        sum(worker.state in SERVING for worker in model.workers),
    )
