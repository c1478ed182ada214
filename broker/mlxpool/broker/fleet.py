"""The models and the workers that fill their slots: when to start, to judge, to stop, to give up.

Part of the pure core: it appends what it decides to `out`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from mlxpool.broker.events import Action, DumpStacks, Note, StartWorker, StopWorker, ToWorker
from mlxpool.broker.judge import Verdict
from mlxpool.broker.policy import restart_delay, to_evict
from mlxpool.broker.timers import Timers
from mlxpool.broker.workers import FENCED, Model, Slot, Worker, WorkerState
from mlxpool.common import wire
from mlxpool.common.config import ModelConfig, PoolConfig
from mlxpool.common.errors import ModelUnavailable, PoolError, UnknownModel, from_body
from mlxpool.common.wire import Header


class Fleet:
    """Owns every Model, Slot and Worker. Epochs count up over all slots and never repeat."""

    def __init__(
        self, config: PoolConfig, boot: int, timers: Timers, needs: Mapping[str, int], memory: int
    ) -> None:
        self.config = config
        self.boot = boot
        self.timers = timers
        self.memory = memory  # bytes that all workers may take together
        self.out: list[Action] = []
        self.models = {
            name: _model(name, spec, needs.get(name, 0)) for name, spec in config.models.items()
        }
        self.slots = {slot.name: slot for model in self.models.values() for slot in model.slots}
        self.by_epoch: dict[int, Worker] = {}
        self.epoch = 0
        self.closing = False  # nothing is started any more

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
        """Raises why the model cannot be had until `retry_at`, or ever."""
        if model.hopeful:
            return
        if model.floor > self.memory:
            raise ModelUnavailable(
                f"model {model.name!r} needs {model.floor} bytes, the pool's memory_limit is"
                f" {self.memory}; raise memory_limit or take a smaller model",
                details={"model": model.name, "need": model.floor, "memory_limit": self.memory},
            )
        if now >= model.retry_at:
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
        """Somebody needs the model: start what is missing, as far as time and memory allow."""
        if self.closing:
            return
        model.wanted = True
        if now < model.retry_at:
            self.timers.set(("restart", model.name), model.retry_at)
            return
        model.last_error = None
        for slot in model.slots:
            if slot.worker is not None:
                continue
            if model.failures >= self.config.restart_limit and model.workers:
                return  # half open: one worker has to serve before others are started
            if not self._make_room(model, now):
                return
            slot.worker = Worker(slot.name, model.name, started_at=now)
            self.out.append(StartWorker(slot.name, model.name))

    def used(self) -> int:
        """Bytes that all workers take, also those that are ending."""
        return sum(model.need * len(model.workers) for model in self.models.values())

    def _make_room(self, model: Model, now: float) -> bool:
        """Whether one more worker fits. Idle models make room for a first one, not for a second."""
        missing = self.used() + model.need - self.memory
        if missing <= 0:
            return True
        leaving = (w for m in self.models.values() for w in m.workers if _ends(w))
        missing -= sum(self.models[worker.model].need for worker in leaving)
        if missing > 0 and not model.workers:
            others = (m for m in self.models.values() if m is not model)
            for idle in to_evict(others, missing):
                self.unload(idle, f"evicted for {model.name}")
        return False  # what ends tells us, and the model is wanted again

    def starved(self) -> list[Model]:
        """Models that are wanted and that no worker serves: memory was short."""
        return [m for m in self.models.values() if m.wanted and not m.workers]

    def settle(self, model: Model, now: float) -> None:
        """Set the timer that unloads an idle model."""
        ready = any(worker.state is WorkerState.READY for worker in model.workers)
        if model.busy or not ready:
            model.idle_since = 0.0
        elif model.idle_since == 0.0:
            model.idle_since = now
            if model.config.keep_alive >= 0:
                self.timers.set(("model", model.name), now + model.config.keep_alive)
            for other in self.starved():
                self.want(other, now)

    def timer(self, model: Model, now: float) -> None:
        """The model's timer came: start what waited for it, or unload what was idle."""
        missing = any(slot.worker is None for slot in model.slots)
        if model.idle_since and 0 <= model.config.keep_alive <= now - model.idle_since + 1e-9:
            self.unload(model, "idle")
        elif model.wanted and missing and now >= model.retry_at:
            self.want(model, now)

    def unload(self, model: Model, why: str) -> None:
        """End the model's workers; what they run is moved or ended by the caller."""
        model.wanted, model.idle_since = False, 0.0
        for worker in model.workers:
            self.dismiss(worker, why)

    # ---- workers -------------------------------------------------------------------------------

    def worker(self, epoch: int) -> Worker | None:
        """The worker of this epoch, unless it was fenced."""
        return self.by_epoch.get(epoch)

    def hello(self, worker: Worker, body: Mapping[str, Any], token: str, now: float) -> None:
        """A worker introduced itself on a new connection: give it an epoch, fence the old one.

        Raises ValueError when its state does not allow it.
        """
        worker.move("hello")
        self.by_epoch.pop(worker.epoch, None)
        worker.begin_again()
        self.epoch += 1
        worker.epoch, worker.hello, worker.beat_at = self.epoch, dict(body), now
        self.by_epoch[worker.epoch] = worker
        self.tell(worker, wire.WELCOME, {"boot": self.boot, "token": token})

    def credit(self, worker: Worker, body: Mapping[str, Any], now: float) -> None:
        """Free places as the worker counts them; the first report makes it READY."""
        worker.sequences = _natural(body.get("sequences"))
        worker.works_seen = _natural(body.get("works"))
        if worker.state is WorkerState.LOADING:
            worker.move("ready")
            worker.ready_at = now
            took = round(now - worker.started_at, 3)
            self._note("info", "worker ready", worker, load_s=took)

    def measured(self, worker: Worker) -> None:
        """What a worker takes is known best from itself; a set limit stays what was set."""
        model = self.models[worker.model]
        memory = worker.beat.get("memory")
        if isinstance(memory, Mapping) and not model.config.memory_limit:
            taken = memory.get("active", 0)
            most = max(model.need, taken if isinstance(taken, int) else 0)
            # It holds keys and values, too: what fitted once is never too large for the pool.
            model.need = max(model.floor, min(most, self.memory))

    def has_served(self, worker: Worker, now: float) -> None:
        """It ended a request: its model is sound, and what was held back may start."""
        worker.served += 1
        model = self.models[worker.model]
        if model.failures:
            model.failures = 0
            self.want(model, now)

    def judged(self, worker: Worker, verdict: Verdict, now: float) -> None:
        """SUSPECT past a limit, well again before the second strike; CONDEMNED is the core's."""
        worker.suspicion = verdict.cause if verdict.suspect else ""
        if verdict.suspect and not worker.suspect_since:
            worker.suspect_since = now
            if worker.state is WorkerState.READY:
                worker.move("suspect")
            if verdict.dump:
                self.out.append(DumpStacks(worker.slot))
            self._note("warning", "worker suspect", worker, why=verdict.cause)
        elif worker.suspect_since and not verdict.suspect:
            worker.suspect_since = 0.0
            if worker.state is WorkerState.SUSPECT:
                worker.move("recover")
            self._note("info", "worker recovered", worker)

    def condemn(self, worker: Worker, why: str, *, deaf: bool = False) -> bool:
        """Fence a worker: nothing it says counts any more. False when it was already."""
        if worker.state in FENCED:
            return False
        worker.move("condemn")
        worker.cause = why
        self.by_epoch.pop(worker.epoch, None)
        self.out.append(StopWorker(worker.slot, at_once=deaf))
        self._note("warning", "worker condemned", worker, why=why)
        return True

    def dismiss(self, worker: Worker, why: str) -> None:
        """End a worker that did nothing wrong."""
        if worker.state in FENCED or worker.dismissed:
            return
        if worker.drainable:
            worker.move("drain")
        worker.dismissed = True
        worker.cause = worker.cause or "stopped"
        self.out.append(StopWorker(worker.slot))
        self._note("info", "worker stopping", worker, why=why)

    def exited(self, slot: Slot, cause: str, now: float, *, own: bool) -> Worker | None:
        """The slot's process is gone: free the slot, count the failure, plan the restart.

        A worker that did not end by itself (`own`) delays the next one, but opens no breaker.
        """
        worker = slot.worker
        if worker is None:
            return None
        commanded = worker.state is WorkerState.DRAINING
        worker.move("exit")
        self.by_epoch.pop(worker.epoch, None)
        slot.worker, slot.last_exit = None, worker.cause or cause
        model = self.models[slot.model]
        if worker.proven:
            model.failures = 0
        elif not commanded:
            most = model.failures + 1 if own else self.config.restart_limit - 1
            model.failures = max(model.failures, min(model.failures + 1, most))
        if not commanded:
            slot.restarts += 1
            self._plan_restart(model, worker, now)
        why = {} if worker.error is None else {"error": worker.error.get("message")}
        level = "info" if commanded else "warning"
        self._note(level, "worker ended", worker, cause=slot.last_exit, **why)
        return worker

    def _plan_restart(self, model: Model, worker: Worker, now: float) -> None:
        config = self.config
        delay = restart_delay(
            model.failures, config.restart_delay, config.restart_delay_max, self.boot
        )
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


def _natural(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _ends(worker: Worker) -> bool:
    return worker.state in (*FENCED, WorkerState.DRAINING)


def _model(name: str, config: ModelConfig, need: int) -> Model:
    slots = [Slot(f"{name}/{number}", name) for number in range(config.replicas)]
    floor = config.memory_limit or need
    return Model(name, config, slots, floor=floor, need=floor)
