"""Waiting requests are given to the workers that have room for them."""

from __future__ import annotations

import math
from typing import Any

from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.placement import choose_worker, prefix_keys, remember, same_facts
from mlxpool.broker.workers.worker import Model, Worker, WorkerState
from mlxpool.common.errors import (
    Draining,
    ModelUnavailable,
)
from mlxpool.common.protocol import kinds

RETRY_QUEUE_MS = 1000  # a client whom a full queue turned away may ask again after this


class Dispatch(Delivery):
    """No work for a worker that is not READY, and never more than it has credit for."""

    def _check_open(self, model: Model, name: str) -> None:
        if self.stopping:
            raise Draining("the broker is going down; send the request again later")
        if model.closed:
            raise Draining(f"model {name!r} is drained; `mlxpool load {name}` opens it again")

    def _dispatch(self, model: Model, now: float) -> None:
        """Give waiting requests to workers that have room: those that were at work before first."""
        workers = model.workers
        for request in list(model.queue.returning):
            if not any(worker.credit() for worker in workers):
                break
            workers = self._take_back(model, request, workers, now)
        while (fresh := model.queue.head()) is not None:
            worker = choose_worker(workers, fresh)
            if worker is None:
                break
            self._assign(fresh, worker, now)
        self._fail_strangers(model, now)
        self.fleet.settle(model, now)

    def _fail_strangers(self, model: Model, now: float) -> None:
        """The model has changed under streams that began with another one: they cannot go on."""
        if not model.queue.returning or not model.settled:
            return
        ready = [worker for worker in model.workers if worker.state is WorkerState.READY]
        for request in list(model.queue.returning):
            if any(same_facts(worker, request) for worker in ready):
                continue
            facts, hello = request.facts or {}, ready[0].hello
            error = ModelUnavailable(
                f"the stream began with model digest {facts.get('digest')}, context"
                f" {facts.get('context')}; {request.payload.model!r} is now {hello.get('digest')},"
                f" {hello.get('context')}; send a new request",
                details={"digest": facts.get("digest"), "context": facts.get("context")},
            )
            self._fail(request, error, now)

    def _take_back(
        self, model: Model, request: Request, workers: list[Worker], now: float
    ) -> list[Worker]:
        """Give it to a worker, or keep one free for it; returns those that others may have."""
        worker = choose_worker(workers, request)
        if worker is not None:
            self._assign(request, worker, now)
            return workers
        if not request.company:
            return workers
        fit = (worker for worker in workers if same_facts(worker, request))
        reserved = min(fit, key=lambda w: len(w.places), default=None)
        return [worker for worker in workers if worker is not reserved]

    def _assign(self, request: Request, worker: Worker, now: float) -> None:
        self._model_of(request).queue.take(request)
        request.move("assign")
        request.worker, request.slot = worker.epoch, worker.slot
        if not request.assigned_at:
            request.assigned_at = now
            self.counters.of(request.payload.model).assigned(request, now)
        request.queue_deadline = math.inf
        request.tries += 1
        self.runs += 1
        request.run = self.runs
        worker.works_sent += 1
        worker.places.add((request.id, request.run))
        if request.company:
            worker.company[request.run] = request.company
        remember(worker, prefix_keys(request))
        self._set_timer(request)
        self._tell_work(request, worker, now)

    def _tell_work(self, request: Request, worker: Worker, now: float) -> None:
        payload = request.payload
        body = {
            **payload.prompt,
            "options": payload.options.to_wire(),
            "seed": request.seed,
            "deadline_ms": max(0, math.ceil((request.deadline - now) * 1000)),
        }
        if request.charge:
            body["suspect"] = True
        blobs = payload.blobs
        if request.ids or request.facts is not None:
            resume: dict[str, Any] = {"count": request.taken, "resumes": request.barren}
            if request.facts is not None:
                resume["facts"] = request.facts
            body["resume"] = resume
            blobs = (*blobs, bytes(request.ids))
        self.fleet.tell(worker, kinds.WORK, body, id=request.id, attempt=request.run, blobs=blobs)
