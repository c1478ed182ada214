"""Handles lost, hung and drained workers: resumes their streams, and may blame a request."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import JobSetBack, Outbox
from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.dispatcher import Dispatcher
from mlxpool.broker.core.ended_requests import EndedRequests
from mlxpool.broker.core.endings import BulkEndings
from mlxpool.broker.core.state import JOBS_LINK, PoolPhase, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests import blame
from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.errors import Poisoned, PoolError, WorkerLost


class Failover(Struct, eq=False):
    """Moves the streams of a lost, hung or drained worker to other workers.

    A stream fails only if it is not durable, is blamed for lost workers, or was often resumed
    without a new token.
    """

    _state: State
    _outbox: Outbox
    _pool: WorkerPool
    _ended: EndedRequests
    _delivery: Delivery
    _dispatcher: Dispatcher
    _calls: Calls
    _bulk: BulkEndings

    def condemn(self, worker: Worker, cause: str, now: float, *, own: bool = False) -> None:
        """Fences a worker and moves its runs to other workers. `own`: the worker is at fault."""
        sample = worker.watch.sample
        prefill = sample.look.request
        if self._pool.condemn(worker, cause, at_once=sample.stopped):
            if own:
                self.mark_if_ended_by_charged_request(worker, prefill)
            self.move_work(worker, cause, now, own=own, prefill=prefill)
            self.serve_elsewhere(worker, now)

    def serve_elsewhere(self, worker: Worker, now: float) -> None:
        """Gives the requests and calls that a worker had to other workers with credit."""
        model = self._state.model_of_worker(worker)
        self._calls.forward(model)
        self._dispatcher.dispatch(model, now)

    def move_work(
        self,
        worker: Worker,
        cause: str,
        now: float,
        *,
        own: bool = False,
        prefill: bytes | None = None,
        counts: bool = True,
    ) -> None:
        """Queues the requests and calls of a fenced worker again.

        `own`: the worker itself is at fault. `prefill`: the id of the request whose prompt it was
        reading. `counts`: the move is counted as a resume without a new token. A request fails
        after too many such resumes.
        """
        lost = self.running(worker)
        shares = self._shares(worker, prefill) if own else {}
        worker.end_all_leases()
        for request in lost:
            run, share = request.run, shares.get(request.id, 0.0)
            if share:
                run.charge += share
                run.batch_bound = blame.batch_bound(run.charge)
            cleared = bool(shares) and not share  # another request was to blame
            run.resumes_without_progress += int(counts and not cleared)
            if request.reader.link == JOBS_LINK and cause not in exit_causes.COMMANDED:
                self._tell_jobs(request, worker, cause)
            self._resume(request, worker, cause, now)
        self._calls.worker_lost(worker, cause, shares)

    def _shares(self, worker: Worker, prefill: bytes | None) -> dict[bytes, float]:
        """Returns the blame (0 to 1) of each request and call for the end of a worker, by id."""
        ids = [request.id for request in self.running(worker)]
        ids += [call.id for call in self._calls.computed_by(worker)]
        return blame.shares(ids, prefill)

    def running(self, worker: Worker) -> list[Request]:
        """Returns the live requests that a worker runs, in the order of arrival."""
        leases = ((self._state.requests.get(id), number) for id, number in worker.leases)
        leased = (r for r, n in leases if r is not None and r.run.leased_by(worker.epoch, n))
        return sorted(leased, key=lambda r: r.arrival)

    def mark_if_ended_by_charged_request(self, worker: Worker, prefill: bytes | None) -> None:
        """Marks a worker that was ended by a request which had already ended another worker.

        The end of a marked worker is not counted as a failure of the model. Otherwise a single bad
        request could open the model's breaker.
        """
        charges = {request.id: request.run.charge for request in self.running(worker)}
        charges |= {call.id: call.charge for call in self._calls.computed_by(worker)}
        shares = blame.shares([*charges], prefill)
        worker.ended_by_charged_request |= any(
            charge >= blame.ALONE_CHARGE and shares[id] >= 1 for id, charge in charges.items()
        )

    def _tell_jobs(self, request: Request, worker: Worker, cause: str) -> None:
        """Reports a lost worker to the job manager, which stores the charge and the failure."""
        where = exit_causes.ended(worker.slot, cause)
        attempt, charge = request.reader.attempt, request.run.charge
        self._outbox.add(JobSetBack(request.id, attempt, worker.slot, charge, where))

    def _resume(self, request: Request, worker: Worker, cause: str, now: float) -> None:
        """Queues a request of a lost worker again, or fails the request."""
        run, fail = request.run, self._delivery.fail
        where = exit_causes.ended(worker.slot, cause)
        details = {"worker": worker.slot, "cause": cause, "tokens": run.taken}
        if run.charge >= blame.POISON_CHARGE:
            self._ended.quarantine(request.digest, now)
            fail(request, Poisoned(f"{where}; this request ended two workers"), now)
        elif self._state.phase is PoolPhase.CLOSING:
            self._requeue(request, now)  # the pool is about to end all requests
        elif not request.message.durable:
            fail(request, WorkerLost(f"{where}; send the request again", details=details), now)
        elif run.resumes_without_progress > blame.max_resumes(run.charge):
            why = f"{where}, loss {run.resumes_without_progress} in a row without a new token"
            fail(request, WorkerLost(why, details=details), now)
        else:
            self._requeue(request, now)

    def _requeue(self, request: Request, now: float) -> None:
        model = self._state.model_of(request)
        model.places.leave(request.owner, now)
        request.move("requeue")
        request.run.release(now)
        self._state.counters.resume(request)
        model.queue.add_resumed(request)
        self._delivery.set_timer(request)

    def on_yield(self, event: ev.WorkerYield, now: float) -> None:
        """Queues the runs that a drained worker hands back; no request is blamed."""
        worker = self._state.workers.get(event.epoch)
        if worker is None:
            self._state.counters.fenced += 1
            return
        for request_id, number in event.message.runs:
            if (request_id, number) not in worker.leases:
                continue
            worker.end_lease((request_id, number))
            request = self._state.requests.get(request_id)
            if request is not None and request.run.leased_by(worker.epoch, number):
                self._requeue(request, now)
        self._pool.stop_if_drained(worker)
        model = self._state.model_of_worker(worker)
        if model.queue:
            self._pool.require(model, now)
            self._dispatcher.dispatch(model, now)

    def give_up(self, model: Model, why: Callable[[str], PoolError], now: float) -> None:
        """Fails all requests and calls that wait for a model.

        `why` returns the error for the name that a request used for the model. Requests fail a few
        at a time; a request continues if a worker takes it first.
        """
        self._pool.give_up(model)
        self._bulk.begin(
            [request.id for request in model.queue],
            [call.id for call in model.calls],
            lambda request: request.model == model.name and request.state is RequestState.QUEUED,
            now,
            ends_call=lambda call: call.model == model.name and not call.epoch,
            error=lambda each: why(each.message.model),
        )
        self._bulk.end_some(now)
