"""Gives waiting requests to workers that have credit for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.outbox import Outbox
from mlxpool.broker.core.state import State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests.fair_queue import Queue
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.placement import (
    choose_worker,
    fits_facts,
    prefix_keys,
    remember_prefixes,
)
from mlxpool.broker.workers.worker import Worker
from mlxpool.broker.workers.worker_states import WorkerState
from mlxpool.common.errors import ModelUnavailable
from mlxpool.common.protocol.resume import Facts, Resume
from mlxpool.common.protocol.to_worker import Work


class Dispatcher:
    """No work goes to a worker that is not READY, and never more than it has credit for."""

    def __init__(self, state: State, outbox: Outbox, pool: WorkerPool, delivery: Delivery) -> None:
        self._state = state
        self._outbox = outbox
        self._pool = pool
        self._delivery = delivery

    def dispatch(self, model: Model, now: float) -> None:
        """Assign the model's waiting requests: first the resumed ones, then the fresh ones."""
        workers = model.workers
        for request in list(model.queue.resumed):
            if not any(worker.credit() for worker in workers):
                break
            workers = self._assign_resumed(request, workers, now)
        while (fresh := model.queue.head()) is not None:
            worker = choose_worker(workers, fresh)
            if worker is None and fresh.message.prompt.images:
                fresh = model.queue.head(without_images=True)
                worker = None if fresh is None else choose_worker(workers, fresh)
            if worker is None and fresh is not None and fresh.message.choice is not None:
                fresh, worker = _behind_choices(model.queue, workers)
            if fresh is None or worker is None:
                break
            self._assign(fresh, worker, now)
        self._fail_incompatible(model, now)
        self._pool.update_idle_timer(model, now)

    def _assign_resumed(self, request: Request, workers: list[Worker], now: float) -> list[Worker]:
        """Assign it, or reserve a worker for it; returns the workers that others may have."""
        worker = choose_worker(workers, request)
        if worker is not None:
            self._assign(request, worker, now)
            return workers
        if not request.run.batch_bound:
            return workers
        fitting = (worker for worker in workers if fits_facts(worker, request))
        reserved = min(fitting, key=lambda w: len(w.leases), default=None)
        return [worker for worker in workers if worker is not reserved]

    def _fail_incompatible(self, model: Model, now: float) -> None:
        """Fail streams that began with other weights than the model has now: none can resume."""
        if not model.queue.resumed or not model.stable:
            return
        ready = [worker for worker in model.workers if worker.state is WorkerState.READY]
        for request in list(model.queue.resumed):
            if any(fits_facts(worker, request) for worker in ready):
                continue
            facts, worker = request.run.facts or Facts(), ready[0]
            error = ModelUnavailable(
                f"the stream began with model digest {facts.digest}, context"
                f" {facts.context}; {request.message.model!r} is now {worker.digest},"
                f" {worker.context}; send a new request",
                details={"digest": facts.digest, "context": facts.context},
            )
            self._delivery.fail(request, error, now)

    def _assign(self, request: Request, worker: Worker, now: float) -> None:
        state, run = self._state, request.run
        state.model_of(request).queue.take(request)
        request.move("assign")
        state.last_run += 1
        run.lease(worker.epoch, worker.slot, state.last_run)
        if not run.assigned_at:
            run.assigned_at = now
            state.counters.of(request.message.model).assigned(request, now)
        request.queue_deadline = math.inf
        worker.works_sent += 1
        worker.leases.add((request.id, run.number))
        if request.message.prompt.images:
            worker.reading.add((request.id, run.number))
        if run.batch_bound:
            worker.batch_bounds[run.number] = run.batch_bound
        remember_prefixes(worker, prefix_keys(request))
        self._delivery.set_timer(request)
        left_ms = max(0, math.ceil((request.deadline - now) * 1000))
        self._outbox.tell(worker, work_of(request, left_ms), request.id, run.number)


def _behind_choices(
    queue: Queue, workers: Sequence[Worker]
) -> tuple[Request | None, Worker | None]:
    """The first request that may go past choices, which wait for the worker of their group."""
    if not any(worker.credit() for worker in workers):
        return None, None
    waiting: set[tuple[str, str]] = set()
    for request in queue.in_turn():
        choice = request.message.choice
        group = None if choice is None else (request.owner, choice.group)
        if group in waiting:
            continue
        worker = choose_worker(workers, request)
        if worker is not None:
            return request, worker
        if group is None:
            break  # an image that no worker has room for, or a request that runs alone
        waiting.add(group)
    return None, None


def work_of(request: Request, deadline_ms: int) -> Work:
    """The `work` of a request: with a resume if it has ids, or facts of its first worker."""
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
