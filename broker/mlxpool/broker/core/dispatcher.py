"""Assigns waiting requests to workers that report free sequences (credit)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, takewhile

from msgspec import Struct

from mlxpool.broker.core.actions import Outbox
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.endings import BulkEndings
from mlxpool.broker.core.state import JOBS_LINK, PoolPhase, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests import blame
from mlxpool.broker.requests.call import Call
from mlxpool.broker.requests.place_shares import Held, Wanted, decide
from mlxpool.broker.requests.request import IDLE_RANK, Request, RequestState
from mlxpool.broker.routing.route_cost import MAX_PASSED
from mlxpool.broker.workers.placement import (
    choose_pair,
    could_have,
    demand_of,
    fits_facts,
    group_of,
)
from mlxpool.broker.workers.worker import Worker, WorkerState
from mlxpool.common.config.schema import CACHE_AWARE
from mlxpool.common.errors import ModelUnavailable
from mlxpool.common.protocol.resume import Facts, Resume
from mlxpool.common.protocol.to_worker import Work


class Dispatcher(Struct, eq=False):
    """Assigns waiting requests to workers.

    Only READY workers get requests, and never more requests than their credit (free sequences).
    """

    _state: State
    _outbox: Outbox
    _pool: WorkerPool
    _delivery: Delivery
    _bulk: BulkEndings
    _sharing: PlaceSharing

    def dispatch(self, model: Model, now: float) -> None:
        """Assigns the model's waiting requests: first resumed requests, then fresh requests.

        A place (batch slot) that was promised to an owner goes to that owner's requests first. Jobs
        that yield to other requests, because they are blamed for lost workers, come last.
        """
        if self._state.phase is PoolPhase.CLOSING:
            return  # all requests are about to end
        workers = model.workers
        self._keep_promises(model, workers, now)
        resumed = model.queue.resumed
        waiting = list(resumed) if resumed and any(w.credit() for w in workers) else []
        last: list[Request] = []
        for request in waiting:
            if not any(worker.credit() for worker in workers):
                break
            if _gives_way(request, model, now):
                last.append(request)
            else:
                workers = self._assign_resumed(request, workers, now)
        while (pair := self._choose_fresh(model, workers, now)) is not None:
            self._assign(*pair, now)
        for request in last:
            if (pair := _choose(model, [request], workers)) is not None:
                self._assign(*pair, now)
        self._fail_incompatible(model, now)
        if not _keeps_worker_free(model, now):
            self._sharing.share(model, now)
        self._pool.update_idle_timer(model, now)

    def _keep_promises(self, model: Model, workers: list[Worker], now: float) -> None:
        """Assigns promised batch slots, once they are free, to requests of the promised owners.

        If no request of a promised owner can use a slot, the slot is free for all owners.
        """
        places = model.places
        for owner in list(places.promised):
            while places.promised[owner] and any(worker.credit() for worker in workers):
                waiting = islice(model.queue.of_owner(owner), MAX_WANTED)
                pairs = (_choose(model, [request], workers) for request in waiting)
                if (pair := next(filter(None, pairs), None)) is None:
                    places.break_promise(owner)
                else:
                    self._assign(*pair, now)

    def _choose_fresh(
        self, model: Model, workers: list[Worker], now: float
    ) -> tuple[Request, Worker] | None:
        """Returns the next fresh request and its worker; None if no worker has room for any."""
        queue, places = model.queue, model.places
        heads = queue.heads(places.held)
        if heads and _is_kept_from(heads[0].owner, model, workers, now):
            return None
        often_passed = [request for request in heads if request.passed >= MAX_PASSED]
        pair = _choose(model, often_passed[:1] or heads, workers)
        if pair is None and any(request.message.prompt.images for request in heads):
            text = queue.head(places.held, without_images=True)
            pair = None if text is None else _choose(model, [text], workers)
        if pair is None and any(request.message.choice or request.run.facts for request in heads):
            pair = _behind_bound(model, workers)
        if pair is not None:
            for request in takewhile(lambda each: each is not pair[0], heads):
                request.passed += 1
        return pair

    def _assign_resumed(self, request: Request, workers: list[Worker], now: float) -> list[Worker]:
        """Assigns a resumed request, or reserves a worker for it.

        Returns the workers that may get other requests.
        """
        model = self._state.model_of(request)
        pair = _choose(model, [request], workers)
        if pair is not None:
            self._assign(*pair, now)
            return workers
        if not request.run.batch_bound:
            return workers
        fitting = (worker for worker in workers if fits_facts(worker, request))
        reserved = min(fitting, key=lambda w: len(w.leases), default=None)
        return [worker for worker in workers if worker is not reserved]

    def _fail_incompatible(self, model: Model, now: float) -> None:
        """Fails the waiting streams that began with weights which no ready worker has.

        Only a worker with the same weights can resume a stream. Thousands of streams may wait, so
        each is compared only once with the same ready workers.
        """
        if not model.queue.begun or not model.stable:
            return
        ready = _ready(model)
        unchecked = model.queue.unchecked_resumed(tuple(worker.epoch for worker in ready))
        ids = [request.id for request in unchecked if _is_incompatible(request, ready)]
        if ids:
            ends, error = partial(self._still_incompatible, model), partial(_changed, model)
            self._bulk.begin(ids, (), ends, now, error=error)
            self._bulk.end_some(now)

    def _still_incompatible(self, model: Model, request: Request) -> bool:
        """Returns whether a stream still has to fail: no ready worker can resume it.

        Called just before the stream would fail, because the workers may have changed since the
        first check.
        """
        if not model.stable:
            model.queue.forget_checks()  # the decision waits for the next ready worker
            return False
        waits = request.model == model.name and request.state is RequestState.QUEUED
        return waits and _is_incompatible(request, _ready(model))

    def _assign(self, request: Request, worker: Worker, now: float) -> None:
        state, run = self._state, request.run
        model = state.model_of(request)
        model.queue.take(request)
        request.move("assign")
        state.last_run += 1
        run.lease(worker.epoch, worker.slot, state.last_run, now)
        model.places.get(request.owner)
        if not run.assigned_at:
            run.assigned_at = now
            state.counters.of(request.model).assigned(request, now)
        request.queue_deadline = math.inf
        worker.works_sent += 1
        worker.leases.add((request.id, run.number))
        if request.message.prompt.images:
            worker.reading.add((request.id, run.number))
        if run.batch_bound:
            worker.batch_bounds[run.number] = run.batch_bound
        if (group := group_of(request)) is not None:
            worker.route.has_group(group)
        if len(model.slots) > 1 and _cache_aware(model):
            worker.route.sent(run.number, demand_of(request, model.answer_tokens))
        self._delivery.set_timer(request)
        left_ms = max(0, math.ceil((request.deadline - now) * 1000))
        self._outbox.tell(worker, work_of(request, left_ms), request.id, run.number)


def _is_kept_from(owner: str, model: Model, workers: list[Worker], now: float) -> bool:
    """Returns whether an owner may use none of the free batch slots.

    This is so if they are all reserved for other owners that have no waiting requests.
    """
    kept = model.places.kept_from(owner, now)
    if not kept:
        return False
    waiting = model.queue.owners()
    credit = sum(worker.credit() for worker in workers)
    return credit <= sum(other not in waiting for other in kept)


def _keeps_worker_free(model: Model, now: float) -> bool:
    """Returns whether a charged request (blamed for a lost worker) waits for a nearly free worker.

    A charged request may run only in a small batch. So other requests must leave a worker free for
    it.
    """
    if not model.queue.charged:
        return False
    charged = (request for request in model.queue.resumed if request.run.batch_bound)
    return any(not _gives_way(request, model, now) for request in charged)


def _gives_way(request: Request, model: Model, now: float) -> bool:
    """Returns whether a charged job (blamed for a lost worker) still yields to higher ranks.

    A charged job shares its worker with few requests, so requests of a higher rank would have to
    wait. After `blame.max_wait` a worker is reserved for the job, as for a charged stream.
    """
    return (
        request.run.batch_bound > 0
        and request.reader.link == JOBS_LINK
        and now < request.waiting_since + blame.max_wait(request.rank)
        and model.queue.outranks(request)
    )


def _ready(model: Model) -> list[Worker]:
    return [worker for worker in model.workers if worker.state is WorkerState.READY]


def _is_incompatible(request: Request, ready: Sequence[Worker]) -> bool:
    return not any(fits_facts(worker, request) for worker in ready)


def _changed(model: Model, request: Request | Call) -> ModelUnavailable:
    """Returns the error of a stream that no ready worker can resume: the model has changed."""
    assert isinstance(request, Request)
    facts, worker = request.run.facts or Facts(), _ready(model)[0]
    return ModelUnavailable(
        f"the stream began with model digest {facts.digest}, context"
        f" {facts.context}; {request.message.model!r} is now {worker.digest},"
        f" {worker.context}; send a new request",
        details={"digest": facts.digest, "context": facts.context},
    )


def _cache_aware(model: Model) -> bool:
    return model.config.routing == CACHE_AWARE


def _choose(
    model: Model, waiting: Sequence[Request], workers: Sequence[Worker]
) -> tuple[Request, Worker] | None:
    return choose_pair(
        waiting,
        workers,
        model.speed,
        model.answer_tokens,
        cache_aware=_cache_aware(model),
        behind=max(0, len(model.queue) - 1),
    )


def _behind_bound(model: Model, workers: Sequence[Worker]) -> tuple[Request, Worker] | None:
    """Returns the first fresh request that a worker can run now, and the worker; None without one.

    Called if the first request of the queue must wait for a certain worker. One of several choices
    waits for the worker that runs the other choices. A stream that has begun waits for a worker
    with the same weights.
    """
    if not any(worker.credit() for worker in workers):
        return None
    waiting: set[tuple[str, str]] = set()
    for request in model.queue.in_turn():
        group = group_of(request)
        if group in waiting:
            continue
        pair = _choose(model, [request], workers)
        if pair is not None:
            return pair
        if group is not None:
            waiting.add(group)
        elif request.run.facts is None:
            break  # no worker has room for the request's images
    return None


def work_of(request: Request, deadline_ms: int) -> Work:
    """Returns the `work` message of a request.

    If the run already has output, the message has a `resume`: the ids received so far, and the data
    about the first worker's model (facts).
    """
    message, run, resume = request.message, request.run, None
    if run.ids or run.facts is not None:
        losses, reported = run.resumes_without_progress, run.reported
        resume = Resume(bytes(run.ids), run.facts, resumes=losses, reported=reported)
    return Work(
        message.prompt,
        message.options,
        run.seed,
        deadline_ms,
        resume,
        suspect=run.charge > 0,
        owner=request.owner,
        shared=message.choice is not None and message.choice.of > 1,
    )


# ---- places for waiting owners -----------------------------------------------------------------


MAX_WANTED = 64  # most waiting requests in one decision


class PlaceSharing(Struct, eq=False):
    """Divides the places (batch slots) of a model among owners.

    Does nothing while the pool has only one owner.
    """

    _state: State
    _pool: WorkerPool
    _delivery: Delivery

    def share(self, model: Model, now: float) -> None:
        """Stops runs, so that waiting requests of other owners can take the runs' batch slots."""
        key, timers = ("places", model.name), self._state.timers
        again = model.places.kept_until(now) if model.queue else math.inf
        if not model.queue or len(self._state.owned) < 2:
            timers.set(key, again)
            return
        serving = [worker for worker in model.workers if worker.serves]
        wanted = [*islice(self._wanted(model, serving), MAX_WANTED)]
        if wanted:
            held, coming = self._held(serving)
            decision = decide(held, wanted, model.places.held, coming, now)
            for request, taker in decision.gives:
                self._give(model, request, taker, now)
            again = min(again, decision.again)
        timers.set(key, again)

    def _wanted(self, model: Model, serving: list[Worker]) -> Iterator[Wanted]:
        """Yields waiting requests that may take a place (batch slot) from a run of another owner.

        The owner of such a request has fewer places than another owner. Idle jobs are left out,
        because they take no place from other requests. Charged requests are left out too, because a
        worker is reserved for them.
        """
        counts = model.places.held
        most = max(counts.values(), default=0)
        for request in model.queue.first_of_owners(sum(counts.values())):
            own = counts[request.owner]
            if own and own + 2 > most:
                continue
            if request.rank == IDLE_RANK or request.run.batch_bound:
                continue
            workers = frozenset(
                worker.epoch for worker in serving if could_have(worker, request, model.workers)
            )
            if workers:
                yield Wanted(request, workers)

    def _held(self, serving: list[Worker]) -> tuple[list[Held], dict[int, int]]:
        """Returns the runs of workers, and the number of free places (batch slots) of each worker.

        Places whose runs are being stopped are counted as free.
        """
        held: list[Held] = []
        coming: dict[int, int] = {}
        for worker in serving:
            coming[worker.epoch] = worker.credit() + worker.ended
            for id, number in worker.leases:
                request = self._state.requests.get(id)
                if request is None or not request.run.leased_by(worker.epoch, number):
                    coming[worker.epoch] += 1  # a cancel is under way: the place becomes free
                elif not request.run.batch_bound:
                    proven = request.state is RequestState.STREAMING
                    held.append(Held(request, worker.epoch, request.run.leased_at, proven))
        return held, coming

    def _give(self, model: Model, request: Request, taker: str, now: float) -> None:
        """Stops a run in its worker and queues its request again.

        The place (batch slot) is promised to the owner `taker`, and free once the worker confirms
        the stop.
        """
        self._pool.cancel_run(request)
        request.move("requeue")
        request.run.release(now)
        self._state.counters.preempt(request)
        model.places.give(request.owner, taker)
        model.queue.add_preempted(request)
        self._delivery.set_timer(request)
