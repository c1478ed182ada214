"""Starts, fences, stops and restarts the workers in the slots of models."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.broker.core.actions import DumpStacks, Outbox, StartWorker, StopPool
from mlxpool.broker.core.state import PoolPhase, State
from mlxpool.broker.models.model import DEMANDED, Model, ModelState
from mlxpool.broker.models.registry import to_evict
from mlxpool.broker.models.replica_scaling import ReplicaScale
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.liveness import Verdict
from mlxpool.broker.workers.worker import FENCED, LEAVING, Slot, Worker, WorkerState, restart_delay
from mlxpool.common.protocol.from_client import Cancel
from mlxpool.common.protocol.from_worker import Credit, Hello
from mlxpool.common.protocol.to_worker import Welcome

LOOK_INTERVAL = 1.0  # seconds between two checks of a model's load
ROUNDING = 1e-9  # seconds by which a timer may fire early


class WorkerPool(Struct, eq=False):
    """Starts, fences and stops workers, and owns every Worker.

    Epochs increase over all slots and are never reused.
    """

    _state: State
    _outbox: Outbox

    # ---- starting ----------------------------------------------------------------------------

    def require(self, model: Model, now: float) -> None:
        """Starts workers in the slots of a needed model, if restart delays and memory allow."""
        state = self._state
        if state.phase is PoolPhase.CLOSING:
            return
        model.move("want")
        self.watch_load(model, now)
        if now < model.retry_at:
            state.timers.set(("restart", model.name), model.retry_at)
            return
        model.move("start")
        model.last_error = None
        for slot in model.local_slots:
            if slot.worker is not None:
                continue
            if model.failures >= state.config.restart_limit and model.workers:
                return  # half open: one worker has to serve before other workers start
            if not self._free_memory(model):
                return
            slot.worker = Worker(slot.name, model.name, started_at=now)
            self._outbox.add(StartWorker(slot.name, model.name))

    def watch_load(self, model: Model, now: float) -> None:
        """Sets the timer of a model whose number of workers depends on its load (core.scaling)."""
        key, timers = ("replicas", model.name), self._state.timers
        if model.scales and key not in timers:
            timers.set(key, now + LOOK_INTERVAL)

    def memory_used(self) -> int:
        """Returns the bytes of all local workers, including ending workers."""
        models = self._state.registry.models.values()
        return sum(model.need * len(model.local_workers) for model in models)

    def _free_memory(self, model: Model) -> bool:
        """Returns whether another worker of a model fits in memory now.

        If it does not fit, and the model has no worker, evicts idle models. The new worker is
        started once the workers of the evicted models have ended.
        """
        registry = self._state.registry
        missing = self.memory_used() + model.need - registry.memory
        if missing <= 0:
            return True
        models = registry.models.values()
        ending = (w for m in models for w in m.local_workers if w.state in FENCED | LEAVING)
        missing -= sum(registry.models[worker.model].need for worker in ending)
        if missing > 0 and not model.workers:
            others = (m for m in models if m is not model)
            for idle in to_evict(others, missing):
                self.unload(idle, exit_causes.evicted_for(model.name), remote=False)
        return False  # the ends of the stopped workers will start the model

    def require_those_without_worker(self, now: float) -> None:
        """Starts workers for needed models that have none.

        Called when memory may have become free.
        """
        models = self._state.registry.models.values()
        for model in [m for m in models if m.state in DEMANDED and not m.workers]:
            self.require(model, now)

    # ---- timers ------------------------------------------------------------------------------

    def on_timer(self, what: str, name: str, now: float) -> None:
        """Handles the `idle` or the `restart` timer of a model."""
        model = self._state.registry.models.get(name)  # None: the name became an alias
        if model is None or self._state.phase in (PoolPhase.DRAINED, PoolPhase.CLOSING):
            return
        if what == "idle":
            self._unload_if_idle(model, now)
        elif now >= model.retry_at and not all(slot.worker for slot in model.local_slots):
            self.require(model, now)

    def _unload_if_idle(self, model: Model, now: float) -> None:
        idle = now - model.idle_since + ROUNDING
        if model.idle_since and 0 <= model.keep_alive <= idle:
            self.unload(model, exit_causes.IDLE, remote=False)

    # ---- unloading ---------------------------------------------------------------------------

    def work_ended(self, model: Model, now: float) -> None:
        """Handles the end of work of a model: sets its idle timer, and may complete a drain."""
        self.update_idle_timer(model, now)
        if not model.admits and not model.busy:
            self.unload(model, exit_causes.DRAINED)
        state = self._state
        if state.phase is PoolPhase.DRAINING and not state.requests:
            state.phase = PoolPhase.DRAINED
            self._outbox.add(StopPool())

    def update_idle_timer(self, model: Model, now: float) -> None:
        """Sets the timer that unloads an idle model."""
        ready = any(worker.state is WorkerState.READY for worker in model.workers)
        if model.busy or not ready:
            model.idle_since = 0.0
        elif model.idle_since == 0.0:
            model.idle_since = now
            if model.keep_alive >= 0 and model.local_workers:
                self._state.timers.set(("idle", model.name), now + model.keep_alive)
            self.require_those_without_worker(now)

    def keep(self, model: Model, seconds: float, now: float) -> None:
        """Keeps an idle model loaded for `seconds` from now on, or without limit if negative.

        The time replaces the setting keep_alive until the model's workers are unloaded.
        """
        model.kept = seconds if model.workers or seconds else None
        model.idle_since = 0.0
        self._state.timers.clear(("idle", model.name))
        self.update_idle_timer(model, now)

    def unload(self, model: Model, why: str, *, remote: bool = True) -> None:
        """Stops the model's workers; workers of other supervisors only if `remote`.

        The caller moves or ends their runs.
        """
        self._end_demand(model, "unload")
        model.idle_since = 0.0
        model.scale = ReplicaScale()
        for worker in model.workers if remote else model.local_workers:
            self.stop(worker, why)

    def give_up(self, model: Model) -> None:
        """Stops the attempts to start a worker of a model, unless the model is pinned."""
        if not model.config.pin:
            self._end_demand(model, "give up")

    def _end_demand(self, model: Model, event: str) -> None:
        self._state.timers.clear(("restart", model.name))
        model.kept = None
        model.move(event)
        if model.state is ModelState.COLD and model.failures >= self._state.config.restart_limit:
            model.move("breaker opened")

    # ---- connections -------------------------------------------------------------------------

    def add_remote(self, slot_name: str, name: str, pid: int, now: float) -> None:
        """Adds a worker of another supervisor for a model."""
        slot = self._state.registry.remote_slot(slot_name, name)
        slot.worker = Worker(slot.name, slot.model, pid, started_at=now, remote=True)

    def welcome(self, worker: Worker, hello: Hello, token: str, now: float) -> None:
        """Assigns a new epoch to a worker that sent `hello`, and fences the worker's old epoch.

        Raises ValueError if the worker's state does not allow this.
        """
        state = self._state
        worker.move("hello")
        state.workers.pop(worker.epoch, None)
        worker.reset_connection()
        state.last_epoch += 1
        worker.epoch, worker.hello, worker.beat_at = state.last_epoch, hello, now
        state.workers[worker.epoch] = worker
        self._outbox.tell(worker, Welcome(state.boot, token))

    def credit(self, worker: Worker, credit: Credit, now: float) -> None:
        """Records the free sequences that a worker reports.

        The first report makes the worker READY.
        """
        worker.sequences, worker.works_seen = credit.sequences, credit.works
        worker.ended = 0
        if worker.state is WorkerState.LOADING:
            worker.move("ready")
            worker.ready_at = now
            took = round(now - worker.started_at, 3)
            self._outbox.note_worker("info", "worker ready", worker, load_s=took)

    def measure(self, worker: Worker) -> None:
        """Raises the estimated memory of a model's workers to the memory that a heartbeat reports.

        A `memory_limit` in the settings is never changed.
        """
        model = self._state.model_of_worker(worker)
        if model.config.memory_limit or worker.remote:
            return
        active = worker.beat.memory.get("active", 0)
        most = max(model.need, active if isinstance(active, int) else 0)
        # `active` includes keys and values, so `need` has a bound: a model that once fitted is
        # never too large for the pool.
        model.need = max(model.floor, min(most, self._state.registry.memory))

    def served(self, worker: Worker, now: float) -> None:
        """Records that a worker ended a request, which shows that the model works.

        If earlier workers failed, the slots that were left empty are filled again.
        """
        worker.served += 1
        model = self._state.model_of_worker(worker)
        if model.failures:
            model.failures = 0
            model.move("served")
            self.require(model, now)

    def cancel_run(self, request: Request) -> None:
        """Stops a run, if a worker has it. The lease lasts until the worker confirms the stop."""
        worker, key = self._state.leaseholder(request), (request.id, request.run.number)
        if worker is not None and key in worker.leases:
            self._outbox.tell(worker, Cancel(), id=request.id, run=request.run.number)

    # ---- ends --------------------------------------------------------------------------------

    def judge(self, worker: Worker, verdict: Verdict, now: float) -> None:
        """Makes a worker SUSPECT if it exceeds a limit, and READY when it has recovered.

        Failover stops hung workers.
        """
        worker.suspicion = verdict.cause if verdict.suspect else ""
        if verdict.suspect and not worker.suspect_since:
            worker.suspect_since = now
            if worker.state is WorkerState.READY:
                worker.move("suspect")
            if verdict.dump:
                self._outbox.add(DumpStacks(worker.slot))
            self._outbox.note_worker("warning", "worker suspect", worker, why=verdict.cause)
        elif worker.suspect_since and not verdict.suspect:
            worker.suspect_since = 0.0
            if worker.state is WorkerState.SUSPECT:
                worker.move("recover")
            self._outbox.note_worker("info", "worker recovered", worker)

    def condemn(self, worker: Worker, why: str, *, at_once: bool = False) -> bool:
        """Fences a worker and stops its process. Returns False if the worker was fenced already."""
        if worker.state in FENCED:
            return False
        worker.move("condemn")
        worker.cause = why
        self._state.workers.pop(worker.epoch, None)
        self._outbox.stop_process(worker, at_once=at_once)
        self._outbox.note_worker("warning", "worker condemned", worker, why=why)
        return True

    def stop(self, worker: Worker, why: str) -> None:
        """Stops a worker that has no fault, unless it is already stopping. Logs `why`."""
        if not worker.allows("stop"):
            return
        worker.move("stop")
        worker.cause = worker.cause or exit_causes.STOPPED
        self._outbox.stop_process(worker)
        self._outbox.note_worker("info", "worker stopping", worker, why=why)

    def stop_if_drained(self, worker: Worker) -> None:
        """Stops a draining worker that has no work."""
        if worker.state in (WorkerState.DRAINING, WorkerState.YIELDING) and worker.idle:
            worker.move("stop")
            self._outbox.stop_process(worker)

    def exited(self, slot: Slot, cause: str, now: float, *, own: bool) -> Worker | None:
        """Handles the end of a slot's process: frees the slot, counts the failure, plans a restart.

        If the process was ended from outside (`own` is False), the next process is delayed too, but
        such failures alone do not open the breaker. No failure of the model is counted if the
        process was ended by a request that had already ended another worker
        (`ended_by_charged_request`).
        """
        worker = slot.worker
        if worker is None:
            return None
        was = worker.state
        worker.move("exit")
        self._state.workers.pop(worker.epoch, None)
        slot.worker, slot.last_exit = None, worker.cause or cause
        if worker.remote:
            self._exited_remote(slot, worker, stopped=was is WorkerState.STOPPING)
            return worker
        model = self._state.registry.models[slot.model]
        # Also true for a worker that was fenced because it left late, or came back while it left.
        commanded = was in LEAVING or worker.cause in exit_causes.COMMANDED
        if worker.proven:
            model.failures = 0
        elif not commanded and not worker.ended_by_charged_request:
            most = model.failures + 1 if own else self._state.config.restart_limit - 1
            model.failures = max(model.failures, min(model.failures + 1, most))
        if not commanded:
            slot.restarts += 1
            self._plan_restart(model, worker, now)
        why = {} if worker.error is None else {"error": worker.error.get("message")}
        level = "info" if commanded else "warning"
        self._outbox.note_worker(level, "worker ended", worker, cause=slot.last_exit, **why)
        return worker

    def _plan_restart(self, model: Model, worker: Worker, now: float) -> None:
        state, config = self._state, self._state.config
        delay = restart_delay(
            model.failures, config.restart_delay, config.restart_delay_max, state.boot
        )
        broken = model.failures >= config.restart_limit
        if broken:
            delay = max(delay, config.probe_interval)
        model.retry_at = now + delay
        demanded = model.state in DEMANDED or ("restart", model.name) in state.timers
        # A worker that was ready had loaded the model, so its error concerns only this worker.
        model.last_error = None if worker.ready_at else worker.error
        if model.last_error is not None:
            model.move("load failed")
        else:
            model.move("breaker opened" if broken else "worker failed")
        if demanded:
            model.move("want")
            state.timers.set(("restart", model.name), model.retry_at)

    def _exited_remote(self, slot: Slot, worker: Worker, *, stopped: bool) -> None:
        """Logs the exit of a worker of another supervisor.

        That supervisor counts the worker's failures and starts the next worker.
        """
        if not stopped:
            slot.restarts += 1
        if worker.said_bye and not worker.cause:
            slot.last_exit = exit_causes.LEFT
        level = "info" if stopped or worker.said_bye else "warning"
        self._outbox.note_worker(level, "worker ended", worker, cause=slot.last_exit)
