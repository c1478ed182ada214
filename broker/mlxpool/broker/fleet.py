"""The models and the workers that fill their slots: when to start, to judge, to stop, to give up.

Part of the pure core: it appends what it decides to `out`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mlxpool.broker.events import Action, DumpStacks, Note, StartWorker, StopWorker, ToWorker
from mlxpool.broker.judge import Verdict
from mlxpool.broker.names import SHARED, Names
from mlxpool.broker.policy import restart_delay, to_evict
from mlxpool.broker.timers import Timers
from mlxpool.broker.workers import FENCED, Model, Slot, Worker, WorkerState
from mlxpool.common import wire
from mlxpool.common.config import ModelConfig, PoolConfig
from mlxpool.common.errors import ModelUnavailable, PoolError, UnknownModel, from_body
from mlxpool.common.wire import Header


class Fleet:
    """Owns every Model, Slot and Worker. Epochs count up over all slots and never repeat."""

    def __init__(self, config: PoolConfig, boot: int, timers: Timers, memory: int) -> None:
        self.config = config
        self.boot = boot
        self.timers = timers
        self.memory = memory  # bytes that all workers may take together
        self.out: list[Action] = []
        self.names = Names()
        self.models: dict[str, Model] = {}  # by the name under which they run
        self.slots: dict[str, Slot] = {}
        self.by_epoch: dict[int, Worker] = {}
        self.epoch = 0
        self.closing = False  # nothing is started any more

    # ---- models --------------------------------------------------------------------------------

    def add(self, name: str, config: ModelConfig, place: str = "", need: int = 0) -> None:
        """A name that can be asked for. It gets a model of its own unless a twin has one.

        `place` is where its files are ("": it has no twin), `need` the bytes of a worker at least.
        """
        if name in self.names.known:
            self._take_back(name, config)
            return
        if self.names.add(name, config, place) == name:
            self._found(name, need)
        else:
            self._fit(self.models[self.names.known[name].model])

    def _take_back(self, name: str, config: ModelConfig) -> None:
        """A name that was gone can be asked for again."""
        known = self.names.known[name]
        if known.gone:
            known.gone, known.config = False, config
            model = self.models[known.model]
            model.closed = False
            self._fit(model)

    def gone(self, name: str) -> Model | None:
        """Nobody can ask for this name any more; its model, if it has no other name."""
        known = self.names.known.get(name)
        if known is None or known.gone:
            return None
        known.gone = True
        model = self.models[known.model]
        self._fit(model)
        members = self.names.members(model.name)
        return model if all(self.names.known[member].gone for member in members) else None

    def changed(self, name: str, config: ModelConfig, place: str, need: int) -> list[Worker]:
        """A name has other settings; returns the workers that were started with the old ones."""
        known = self.names.known.get(name)
        if known is None or known.gone:
            return []
        before, known.config, known.place = known.config, config, place
        model = self.models[known.model]
        renewed = any(getattr(before, key) != getattr(config, key) for key in (*SHARED, "path"))
        if renewed:
            known.about = {}
            model.floor = model.need = config.memory_limit or need
            model.failures, model.retry_at, model.last_error = 0, 0.0, None
        for stray in self.names.strays(model.name):
            self.names.known[stray].model = stray
            self._found(stray, self.models[model.name].floor)
        self._fit(model)
        kept = self.own_slots(model)
        own = [slot for slot in model.slots if slot.worker is not None and not slot.remote]
        return [slot.worker for slot in own if slot.worker and (renewed or slot not in kept)]

    def own_slots(self, model: Model) -> list[Slot]:
        """The slots that we fill: fewer than there are when replicas were taken away."""
        return [slot for slot in model.slots if not slot.remote][: model.config.replicas]

    def described(self, name: str, about: Mapping[str, Any]) -> None:
        """What a look at its files has found; they may turn out to be another name's, or no more.

        A model that anybody wants stays what it is until it is quiet and looked at again.
        """
        known = self.names.known.get(name)
        if known is None:
            return
        if known.fault is not None and not about.get("problems"):
            self.models[known.model].last_error = None  # its files have been mended since
        known.about = about
        self._learn_size(self.models[known.model], about.get("size"))
        for stray in self.names.strays(known.model):
            need = self.models[known.model].floor
            self.names.known[stray].model = stray
            self._found(stray, need)
        self._join(self.models[known.model])

    def _join(self, model: Model) -> None:
        """Have the workers of another model serve all names of this one, if they can."""
        twin, members = self.names.twin(model.name), self.names.members(model.name)
        if twin is None or not model.quiet:
            return
        if not all(self.names.are_twins(member, twin) for member in members):
            return  # one that has not been looked at yet; its own look comes here again
        del self.models[model.name]
        for slot in model.slots:
            del self.slots[slot.name]
        for member in members:
            self.names.known[member].model = twin
        self._fit(self.models[twin])

    def _learn_size(self, model: Model, size: object) -> None:
        """What a model takes at least, where its files could not be weighed before."""
        if isinstance(size, int) and not model.floor and not model.workers:
            model.floor, model.need = size, max(model.need, size)

    def _found(self, name: str, need: int) -> None:
        config = self.names.known[name].config
        floor = config.memory_limit or need
        self.models[name] = Model(name, config, [], floor=floor, need=floor)
        self._fit(self.models[name])

    def _fit(self, model: Model) -> None:
        """As many slots as the one asks for that asks for most."""
        model.config = self.names.config_of(model.name)
        own = sum(not slot.remote for slot in model.slots)
        for number in range(len(model.slots), len(model.slots) + model.config.replicas - own):
            slot = Slot(f"{model.name}/{number}", model.name)
            model.slots.append(slot)
            self.slots[slot.name] = slot

    def model(self, name: str) -> Model:
        """The model that a name means. Raises UnknownModel naming the nearest name."""
        model = self.names.model_of(name)
        if model is None:
            known = self.names.offered()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {_few(known)}"
            raise UnknownModel(f"there is no model {name!r:.80}; {hint}")
        return self.models[model]

    def refuse_if_broken(self, model: Model, now: float, name: str) -> None:
        """Raises why the model, asked for as `name`, cannot be had until `retry_at`, or ever."""
        if model.hopeful:
            return
        if model.floor > self.memory:
            raise ModelUnavailable(
                f"model {name!r} needs {model.floor} bytes, the pool's memory_limit is"
                f" {self.memory}; raise memory_limit or take a smaller model",
                details={"model": name, "need": model.floor, "memory_limit": self.memory},
            )
        if now >= model.retry_at:
            return
        wait_ms = math.ceil((model.retry_at - now) * 1000)
        if model.last_error is not None:
            error = from_body(model.last_error)
            error.retry_after_ms = wait_ms
            raise error
        if model.failures >= self.config.restart_limit:
            raise self.broken(model, wait_ms, name)

    def broken(self, model: Model, wait_ms: int, name: str) -> ModelUnavailable:
        causes = [slot.last_exit for slot in model.slots if slot.last_exit]
        return ModelUnavailable(
            f"model {name!r} failed {model.failures} times in a row"
            f" (last: {causes[-1] if causes else 'unknown'}); it is tried again"
            f" in {wait_ms / 1000:.0f} s",
            details={"model": name},
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

        A worker that did not end by itself (`own`) delays the next one, but opens no breaker.
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

    def verdict(self, model: Model, now: float, name: str = "") -> PoolError | None:
        """Why what waits for the model should not go on waiting; None when it should."""
        try:
            self.refuse_if_broken(model, now, name or model.name)
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


def _few(names: Iterable[str], most: int = 20) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")


def _natural(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _ends(worker: Worker) -> bool:
    return worker.state in (*FENCED, WorkerState.DRAINING)
