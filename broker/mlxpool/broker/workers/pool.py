"""The workers that fill the slots of models: when to start, to judge, to stop, to give up.

Part of the pure core: it appends what it decides to `out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.broker.core.timers import Timers
from mlxpool.broker.interface.events import (
    Action,
    DumpStacks,
    Note,
    StartWorker,
    StopWorker,
    ToWorker,
)
from mlxpool.broker.models.registry import Roster
from mlxpool.broker.workers.liveness import Verdict
from mlxpool.broker.workers.placement import restart_delay, to_evict
from mlxpool.broker.workers.worker import FENCED, Model, Slot, Worker, WorkerState
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.frames import Header


class Fleet(Roster):
    """Owns every Worker, too. Epochs count up over all slots and never repeat."""

    def __init__(self, config: PoolConfig, boot: int, timers: Timers, memory: int) -> None:
        super().__init__(config, memory)
        self.boot = boot
        self.timers = timers
        self.out: list[Action] = []
        self.by_epoch: dict[int, Worker] = {}
        self.epoch = 0
        self.closing = False  # nothing is started any more

    # ---- starting and unloading ----------------------------------------------------------------

    def want(self, model: Model, now: float) -> None:
        """Somebody needs the model: start what is missing, as far as time and memory allow."""
        if self.closing:
            return
        model.wanted = True
        if now < model.retry_at:
            self.timers.set(("restart", model.name), model.retry_at)
            return
        model.last_error = None
        for slot in self.own_slots(model):
            if slot.worker is not None:
                continue
            if model.failures >= self.config.restart_limit and model.workers:
                return  # half open: one worker has to serve before others are started
            if not self._make_room(model, now):
                return
            slot.worker = Worker(slot.name, model.name, started_at=now)
            self.out.append(StartWorker(slot.name, model.name))

    def used(self) -> int:
        """Bytes that all workers of ours take, also those that are ending."""
        return sum(model.need * len(model.own) for model in self.models.values())

    def _make_room(self, model: Model, now: float) -> bool:
        """Whether one more worker fits. Idle models make room for a first one, not for a second."""
        missing = self.used() + model.need - self.memory
        if missing <= 0:
            return True
        leaving = (w for m in self.models.values() for w in m.own if _ends(w))
        missing -= sum(self.models[worker.model].need for worker in leaving)
        if missing > 0 and not model.workers:
            others = (m for m in self.models.values() if m is not model)
            for idle in to_evict(others, missing):
                self.unload(idle, f"evicted for {model.name}", remote=False)
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
            if model.config.keep_alive >= 0 and model.own:
                self.timers.set(("model", model.name), now + model.config.keep_alive)
            for other in self.starved():
                self.want(other, now)

    def timer(self, model: Model, now: float) -> None:
        """The model's timer came: start what waited for it, or unload what was idle."""
        missing = any(slot.worker is None for slot in self.own_slots(model))
        if model.idle_since and 0 <= model.config.keep_alive <= now - model.idle_since + 1e-9:
            self.unload(model, "idle", remote=False)
        elif model.wanted and missing and now >= model.retry_at:
            self.want(model, now)

    def unload(self, model: Model, why: str, *, remote: bool = True) -> None:
        """End the model's workers, those that dialled in only if `remote`.

        What they run is moved or ended by the caller.
        """
        model.wanted, model.idle_since = False, 0.0
        for worker in model.workers if remote else model.own:
            self.dismiss(worker, why)

    # ---- workers that dial in ------------------------------------------------------------------

    def place_for(self, name: str) -> str:
        """The slot that a worker of this model fills when it dials in; not made yet."""
        known = self.names.model_of(name)
        slots = [] if known is None else self.models[known].slots
        free = (slot.name for slot in slots if slot.remote and slot.worker is None)
        return next(free, f"{known or name}/{len(slots)}")

    def dialled(self, slot_name: str, name: str, pid: int, now: float) -> None:
        """A worker dialled in. A model that nobody has named is served as long as it is there."""
        if name not in self.names.known:
            self.add(name, ModelConfig(replicas=0))
        model = self.model(name)
        slot = self.slots.get(slot_name)
        if slot is None:
            slot = Slot(slot_name, model.name, remote=True)
            model.slots.append(slot)
            self.slots[slot_name] = slot
        slot.worker = Worker(slot_name, model.name, pid, started_at=now, remote=True)

    def _exited_remote(self, slot: Slot, worker: Worker) -> None:
        """Its own supervisor counts its failures and starts the next one."""
        if not worker.dismissed:
            slot.restarts += 1
        if worker.said_bye and not worker.cause:
            slot.last_exit = "it left"
        level = "info" if worker.dismissed or worker.said_bye else "warning"
        self._note(level, "worker ended", worker, cause=slot.last_exit)

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
        self.tell(worker, kinds.WELCOME, {"boot": self.boot, "token": token})

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
        if isinstance(memory, Mapping) and not model.config.memory_limit and not worker.remote:
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

        A worker that did not end by itself (`own`) delays the next one, but opens no breaker. One
        whose end says nothing new of its model (`again`) does not count.
        """
        worker = slot.worker
        if worker is None:
            return None
        commanded = worker.state is WorkerState.DRAINING
        worker.move("exit")
        self.by_epoch.pop(worker.epoch, None)
        slot.worker, slot.last_exit = None, worker.cause or cause
        if worker.remote:
            self._exited_remote(slot, worker)
            return worker
        model = self.models[slot.model]
        if worker.proven:
            model.failures = 0
        elif not commanded and not worker.again:
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
        # What was ready once can be had: its last word is how it ended, see Core.on_bye.
        model.last_error = None if worker.ready_at else worker.error
        model.retry_at = now + delay
        if model.wanted:
            self.timers.set(("restart", model.name), model.retry_at)

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
