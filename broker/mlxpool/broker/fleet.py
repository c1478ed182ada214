"""The models and the workers that fill their slots: when to start, to stop, to give up.

Part of the pure core: it appends what it decides to `out`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from mlxpool.broker.events import Action, Note, StartWorker, StopWorker, ToWorker
from mlxpool.broker.policy import restart_delay
from mlxpool.broker.timers import Timers
from mlxpool.broker.workers import Model, Slot, Worker, WorkerState
from mlxpool.common import wire
from mlxpool.common.config import ModelConfig, PoolConfig
from mlxpool.common.errors import ModelUnavailable, PoolError, UnknownModel, from_body
from mlxpool.common.wire import Header


class Fleet:
    """Owns every Model, Slot and Worker. Epochs count up over all slots and never repeat."""

    def __init__(self, config: PoolConfig, boot: int, timers: Timers) -> None:
        self.config = config
        self.boot = boot
        self.timers = timers
        self.out: list[Action] = []
        self.models = {name: _model(name, spec) for name, spec in config.models.items()}
        self.slots = {slot.name: slot for model in self.models.values() for slot in model.slots}
        self.by_epoch: dict[int, Worker] = {}
        self.epoch = 0

    # ---- models --------------------------------------------------------------------------------

    def model(self, name: str) -> Model:
        """The model of that name. Raises UnknownModel naming the nearest one."""
        model = self.models.get(name)
        if model is None:
            near = difflib.get_close_matches(name, self.models, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self.models)}"
            raise UnknownModel(f"there is no model {name!r:.80}; {hint}")
        return model

    def refuse_if_broken(self, model: Model, now: float) -> None:
        """Raises why the model cannot be had until `retry_at`."""
        if now >= model.retry_at or any(w.state is WorkerState.READY for w in model.workers):
            return
        wait_ms = math.ceil((model.retry_at - now) * 1000)
        if model.last_error is not None:
            error = from_body(model.last_error)
            error.retry_after_ms = wait_ms
            raise error
        if model.failures >= self.config.restart_limit:
            raise self.broken(model, wait_ms)

    def broken(self, model: Model, wait_ms: int) -> ModelUnavailable:
        causes = [slot.last_exit for slot in model.slots if slot.last_exit]
        return ModelUnavailable(
            f"model {model.name!r} failed {model.failures} times in a row"
            f" (last: {causes[-1] if causes else 'unknown'}); it is tried again"
            f" in {wait_ms / 1000:.0f} s",
            details={"model": model.name},
            retry_after_ms=wait_ms,
        )

    def want(self, model: Model, now: float) -> None:
        """Somebody needs the model: start what is missing, unless it has to wait."""
        model.wanted = True
        if now < model.retry_at:
            self.timers.set(("restart", model.name), model.retry_at)
            return
        model.last_error = None
        for slot in model.slots:
            if slot.worker is None:
                slot.worker = Worker(slot.name, model.name, started_at=now)
                self.out.append(StartWorker(slot.name, model.name))

    def settle(self, model: Model, now: float) -> None:
        """Set the timer that unloads an idle model."""
        busy = model.queue or model.asks or any(w.places or w.asked for w in model.workers)
        ready = any(worker.state is WorkerState.READY for worker in model.workers)
        if busy or not ready:
            model.idle_since = 0.0
        elif model.idle_since == 0.0:
            model.idle_since = now
            if model.config.keep_alive >= 0:
                self.timers.set(("model", model.name), now + model.config.keep_alive)

    def timer(self, model: Model, now: float) -> None:
        """The model's timer came: start what waited for it, or unload what was idle."""
        missing = any(slot.worker is None for slot in model.slots)
        if model.wanted and missing and now >= model.retry_at:
            self.want(model, now)
        elif model.idle_since and 0 <= model.config.keep_alive <= now - model.idle_since + 1e-9:
            self.unload(model, "idle")

    def unload(self, model: Model, why: str) -> None:
        """End the model's workers; what they run is moved or ended by the caller."""
        model.wanted = False
        for worker in model.workers:
            if worker.state not in (WorkerState.DRAINING, WorkerState.CONDEMNED):
                worker.move("drain")
                self.out.append(StopWorker(worker.slot))
                self._note("info", "worker stopping", worker, why=why)

    # ---- workers -------------------------------------------------------------------------------

    def worker(self, epoch: int) -> Worker | None:
        """The worker of this epoch, unless it was fenced."""
        return self.by_epoch.get(epoch)

    def hello(self, slot_name: str, body: Mapping[str, Any], now: float) -> Worker | None:
        """A worker introduced itself: give it an epoch. None when its slot expects nobody."""
        worker = self.slots[slot_name].worker
        if worker is None or worker.state is not WorkerState.STARTING:
            return None
        self.epoch += 1
        worker.epoch, worker.hello, worker.beat_at = self.epoch, dict(body), now
        worker.move("hello")
        self.by_epoch[worker.epoch] = worker
        self.tell(worker, wire.WELCOME, {"boot": self.boot})
        return worker

    def credit(self, worker: Worker, body: Mapping[str, Any], now: float) -> None:
        """Free places as the worker counts them; the first report makes it READY."""
        worker.sequences = int(body.get("sequences", 0))
        worker.works_seen = int(body.get("works", 0))
        if worker.state is WorkerState.LOADING:
            worker.move("ready")
            worker.ready_at = now
            took = round(now - worker.started_at, 3)
            self._note("info", "worker ready", worker, load_s=took)

    def condemn(self, worker: Worker, why: str) -> None:
        """Fence a worker that broke the rules: nothing it says counts any more."""
        if worker.state in (WorkerState.CONDEMNED, WorkerState.LOST):
            return
        worker.move("condemn")
        self.by_epoch.pop(worker.epoch, None)
        self.out.append(StopWorker(worker.slot))
        self._note("warning", "worker condemned", worker, why=why)

    def exited(self, slot: Slot, cause: str, now: float) -> Worker | None:
        """The slot's process is gone: free the slot, count the failure, plan the restart."""
        worker = slot.worker
        if worker is None:
            return None
        commanded = worker.state is WorkerState.DRAINING
        worker.move("exit")
        self.by_epoch.pop(worker.epoch, None)
        slot.worker, slot.last_exit = None, cause
        model = self.models[slot.model]
        if commanded or worker.served:
            model.failures = 0
        else:
            model.failures += 1
        if not commanded:
            slot.restarts += 1
            self._plan_restart(model, worker, now)
        why = {} if worker.error is None else {"error": worker.error.get("message")}
        level = "info" if commanded else "warning"
        self._note(level, "worker ended", worker, cause=cause, **why)
        return worker

    def _plan_restart(self, model: Model, worker: Worker, now: float) -> None:
        config = self.config
        delay = restart_delay(model.failures, config.restart_delay, config.restart_delay_max)
        if model.failures >= config.restart_limit:
            delay = max(delay, config.probe_interval)
        model.last_error = worker.error
        model.retry_at = now + delay
        if model.wanted:
            self.timers.set(("restart", model.name), model.retry_at)

    def verdict(self, model: Model, now: float) -> PoolError | None:
        """Why what waits for the model should not go on waiting; None when it should."""
        try:
            self.refuse_if_broken(model, now)
        except PoolError as error:
            return error
        return None

    def tell(
        self,
        worker: Worker,
        kind: str,
        body: Mapping[str, Any],
        *,
        id: bytes | None = None,
        attempt: int = 0,
        blobs: tuple[bytes, ...] = (),
    ) -> None:
        header = Header(kind, id, worker.epoch, attempt)
        self.out.append(ToWorker(worker.slot, header, body, blobs))

    def _note(self, level: str, event: str, worker: Worker, **fields: Any) -> None:
        known = {"model": worker.model, "worker": worker.slot, "epoch": worker.epoch}
        self.out.append(Note(level, event, {**known, "pid": worker.pid, **fields}))


def _model(name: str, config: ModelConfig) -> Model:
    slots = [Slot(f"{name}/{number}", name) for number in range(config.replicas)]
    return Model(name, config, slots)
