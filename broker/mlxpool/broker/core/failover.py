"""A worker is lost, hung or drained: its streams go on elsewhere, and a request may be to blame."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.core.admission import Intake
from mlxpool.broker.interface import events as ev
from mlxpool.broker.requests.request import MAX_ALONE, MAX_RESUMES, Request
from mlxpool.broker.workers.placement import POISON, charges, company_of
from mlxpool.broker.workers.worker import Model, Worker, WorkerState
from mlxpool.common.errors import Draining, Poisoned, PoolError, WorkerLost
from mlxpool.common.protocol import kinds


class Losses(Intake):
    """A stream ends in an error only if it is not durable, is poison, or often brought no token."""

    def _condemn(self, worker: Worker, cause: str, now: float, *, own: bool = False) -> None:
        """Fence a worker and move what it runs."""
        prefill = worker.watch.sample.look.request
        if self.fleet.condemn(worker, cause, deaf=worker.watch.sample.stopped):
            if own:
                self._compare(worker, prefill)
            self._lose(worker, cause, now, own=own, prefill=prefill)
            self._go_on(worker, now)

    def _go_on(self, worker: Worker, now: float) -> None:
        """Other workers of the model take what this one had, as far as they have room."""
        model = self.fleet.models[worker.model]
        self._forward_asks(model)
        self._dispatch(model, now)

    def _lose(
        self,
        worker: Worker,
        cause: str,
        now: float,
        *,
        own: bool = False,
        prefill: bytes | None = None,
        counts: bool = True,
    ) -> None:
        """Nothing more comes of its runs: their requests go back to the queue."""
        lost = self._running(worker)
        blame = charges(lost, prefill) if own and lost else {}
        worker.places.clear()
        worker.company.clear()
        for request in lost:
            self._charge(request, blame.get(request.id, 0.0), len(lost))
            cleared = bool(blame) and not blame[request.id]  # another one was named
            request.barren += int(counts and not cleared)
            self._retry(request, worker, cause, now)
        self._ask_again(worker, cause)

    def _running(self, worker: Worker) -> list[Request]:
        """The live requests that a worker runs, the oldest first."""
        found = ((self.requests.get(request_id), run) for request_id, run in worker.places)
        here = (r for r, run in found if r is not None and (r.worker, r.run) == (worker.epoch, run))
        return sorted(here, key=lambda r: r.place)

    def _compare(self, worker: Worker, prefill: bytes | None) -> None:
        """Note whether who is to blame for a worker's own end has ended another one before.

        Then it says nothing new of the model: a few such requests would open its breaker.
        """
        lost = self._running(worker)
        blame = charges(lost, prefill) if lost else {}
        worker.again |= any(request.charge >= 1 and blame[request.id] >= 1 for request in lost)

    def _charge(self, request: Request, blame: float, group: int) -> None:
        if blame:
            request.charge += blame
            request.company = company_of(request.charge, group)

    def _retry(self, request: Request, worker: Worker, cause: str, now: float) -> None:
        where = f"the worker {worker.slot} ended: {cause}"
        details = {"worker": worker.slot, "cause": cause, "tokens": request.taken}
        if request.charge >= POISON:
            self._quarantine(request.digest, now)
            self._fail(request, Poisoned(f"{where}; this request ended two workers"), now)
            return
        if not request.payload.durable:
            error = WorkerLost(f"{where}; send the request again", details=details)
            self._fail(request, error, now)
        elif request.barren > (MAX_RESUMES if request.charge < 1 else MAX_ALONE):
            why = f"{where}, loss {request.barren} in a row without a new token"
            self._fail(request, WorkerLost(why, details=details), now)
        else:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        request.move("requeue")
        request.worker, request.slot, request.run = 0, "", 0
        self.counters.resume(request)
        self._model_of(request).queue.add_back(request)
        self._set_timer(request)

    def on_yield(self, event: ev.WorkerYield, now: float) -> None:
        """A drained worker hands its runs back; that is nobody's fault."""
        worker = self.fleet.worker(event.epoch)
        if worker is None:
            self.counters.fenced += 1
            return
        model = self.fleet.models[worker.model]
        for request_id, run in _runs(event.runs):
            if (request_id, run) not in worker.places:
                continue
            worker.leave((request_id, run))
            request = self.requests.get(request_id)
            if request is not None and (request.worker, request.run) == (worker.epoch, run):
                self._requeue(request)
        self._after_drain(worker, now)
        if model.queue:
            self.fleet.want(model, now)
            self._dispatch(model, now)

    # ---- models that cannot be had -------------------------------------------------------------

    def _give_up(self, model: Model, why: Callable[[str], PoolError], now: float) -> None:
        """The model cannot be had for now: everything that waits for it learns why.

        `why` gives the error to those who asked for it by that name. A pinned model stays wanted:
        it is tried again without being asked for.
        """
        model.wanted = model.wanted and model.config.pin
        for request in list(model.queue):
            self._fail(request, why(request.payload.model), now)
        for ask in model.asks:
            body = why(str(ask.body["model"])).body()
            self._reply(ask.link, kinds.ERROR, ask.id, ask.attempt, body)
        model.asks.clear()

    # ---- drain ---------------------------------------------------------------------------------

    def on_drain(self, event: ev.Drain, now: float) -> None:
        if event.slot is not None:
            self._drain_worker(event.slot, event.grace, now)
        elif event.model is not None:
            self._drain_model(self.fleet.models[event.model], event.grace, now)
        else:
            self._drain_pool(event.grace, now)

    def _drain_worker(self, slot: str, grace: float, now: float) -> None:
        worker = self.fleet.slots[slot].worker
        if worker is None or not worker.drainable:
            return
        worker.move("drain")
        worker.cause = "drained"
        self.timers.set(("drain", slot, worker.epoch), now + grace)
        self._after_drain(worker, now)
        model = self.fleet.models[worker.model]
        self._dispatch(model, now)

    def _after_drain(self, worker: Worker, now: float) -> None:
        """A draining worker that has nothing left may go."""
        idle = not worker.places and not worker.asked
        if worker.state is WorkerState.DRAINING and idle and not worker.dismissed:
            worker.dismissed = True
            self.out.append(ev.StopWorker(worker.slot))

    def _drain_timer(self, slot: str, epoch: int, now: float) -> None:
        """Its time is over: it hands back what it runs, or is ended."""
        place = self.fleet.slots.get(slot)  # None: its model has found its twin
        worker = None if place is None else place.worker
        if worker is None or worker.epoch != epoch or worker.state is not WorkerState.DRAINING:
            return
        if worker.dismissed:
            return
        if worker.yielding:
            self._condemn(worker, "drained", now)
        else:
            worker.yielding = True
            self.fleet.tell(worker, kinds.DRAIN, {})
            self.timers.set(("drain", slot, epoch), now + self.config.stop_grace)

    def _drain_model(self, model: Model, grace: float, now: float) -> None:
        model.closed = True
        self.timers.set(("drained", model.name), now + grace)
        self._settled(model, now)

    def _drain_pool(self, grace: float, now: float) -> None:
        self.stopping = True
        self.timers.set(("drained", ""), now + grace)
        for model in self.fleet.models.values():
            self._settled(model, now)

    def _drained_timer(self, name: str, now: float) -> None:
        """What a drain did not see the end of ends now."""
        error = Draining("the pool is being drained; send the request again later")
        if not name and self.stopping:
            for request in list(self.requests.values()):
                self._fail(request, error, now)
            for model in self.fleet.models.values():
                self._give_up(model, lambda _: error, now)
        elif name in self.fleet.models and self.fleet.models[name].closed:
            for request in list(self.requests.values()):
                if request.model == name:
                    self._fail(request, error, now)
            self._give_up(self.fleet.models[name], lambda _: error, now)  # calls, too
            self.fleet.unload(self.fleet.models[name], "drained")


def _runs(runs: object) -> list[tuple[bytes, int]]:
    if not isinstance(runs, list):
        return []
    return [
        (run[0], run[1])
        for run in runs
        if isinstance(run, list)
        and len(run) == 2
        and isinstance(run[0], bytes)
        and isinstance(run[1], int)
    ]
