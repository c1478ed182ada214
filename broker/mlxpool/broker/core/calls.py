"""Answers `ping`, `models` and `keep`, and forwards model calls, such as `embed`, to workers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import JobSetBack, Outbox
from mlxpool.broker.core.state import JOBS_LINK, QUEUE_RETRY_MS, PoolPhase, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models import listing
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests import blame
from mlxpool.broker.requests.call import Call
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.errors import (
    DeadlineExceeded,
    DuplicateId,
    Poisoned,
    PoolError,
    QueueFull,
    WorkerLost,
)
from mlxpool.common.protocol.frames import VERSION, Content
from mlxpool.common.protocol.from_client import KEEP_FOREVER, TOKENIZE, Cancel, Keep, ModelCall
from mlxpool.common.protocol.to_client import Done, Failed, Kept, ModelList, Pong

MAX_LOSSES = 2  # lost workers after which a call of the tokenizer fails
# Lost workers after which a computed call fails. More than MAX_LOSSES, because the end of a worker
# affects many calls.
MAX_LOSSES_COMPUTED = 20
MAX_IN_WORKER = 64  # calls that a worker computes or has queued; further calls wait for any worker


class Calls(Struct, eq=False):
    """Answers each call once, unless it is cancelled.

    Calls of a lost worker go to other workers.
    """

    _state: State
    _outbox: Outbox
    _pool: WorkerPool

    def on_ping(self, event: ev.ClientPing, now: float) -> None:
        self._state.heard(event.link, now)
        pong = Pong(self._state.boot, event.link, VERSION)
        self._outbox.send(event.link, pong, event.id, event.attempt)

    def on_list_models(self, event: ev.ClientListModels, now: float) -> None:
        self._state.heard(event.link, now)
        registry, message = self._state.registry, event.message
        answer: Content
        try:
            if isinstance(message, PoolError):
                raise message
            if message.model is None:
                rows = listing.brief(listing.rows(registry, now))
            else:
                registry.model(message.model)  # raises UnknownModel
                rows = [listing.detailed(registry, message.model, now)]
            if not self._state.admits:
                rows = [{**row, "state": "draining"} for row in rows]
            if self._state.trouble:
                rows = [
                    {**row, "trouble": self._state.trouble[: listing.MAX_ERROR]} for row in rows
                ]
            answer = ModelList(rows)
        except PoolError as error:
            answer = Failed.of(error)
        self._outbox.send(event.link, answer, event.id, event.attempt)

    def on_keep(self, event: ev.ClientKeep, now: float) -> None:
        self._state.heard(event.link, now)
        answer: Content
        try:
            answer = Kept(self._keep(event.message, now))
        except PoolError as error:
            answer = Failed.of(error)
        self._outbox.send(event.link, answer, event.id, event.attempt)

    def _keep(self, message: Keep | PoolError, now: float) -> int:
        """Sets the time for which an idle model stays loaded, as a client asks.

        Returns the time in milliseconds, within the bounds of `allowed_keep`. Raises PoolError if
        the message is invalid or the model is unavailable.
        """
        if isinstance(message, PoolError):
            raise message
        registry, name = self._state.registry, message.model
        model = registry.model(name)
        if message.keep_ms:
            self._state.check_admits(model, name)
            registry.check_available(model, now, name)
        usual = model.config.keep_alive
        seconds = allowed_keep(message.keep_ms, usual, self._state.config.client_keep_alive)
        if usual >= 0:
            self._pool.keep(model, seconds, now)
        if message.keep_ms:
            self._pool.require(model, now)
        return KEEP_FOREVER if seconds < 0 else round(seconds * 1000)

    def on_call(self, event: ev.ClientModelCall, now: float) -> None:
        self._state.heard(event.link, now)
        try:
            self._queue(event, now)
        except PoolError as error:
            self._outbox.send(event.link, Failed.of(error), event.id, event.attempt)

    def _queue(self, event: ev.ClientModelCall, now: float) -> None:
        """Queues a client's call. Raises PoolError if it is invalid, or cannot be answered now."""
        if isinstance(event.message, PoolError):
            raise event.message
        model = self._checked(event.message, now)
        if self._redirect(event, event.message):
            return
        self._add(
            model, Call(event.id, model.name, event.link, event.attempt, event.message, now), now
        )

    def start_job(self, event: ev.StartJob, message: ModelCall, now: float) -> None:
        """Queues the call of a job; its answer goes to JOBS_LINK.

        Raises PoolError if the model cannot answer the call now, or if an open call has its id.
        """
        if event.id in self._state.calls:
            raise DuplicateId(f"an open call has the id of the job {event.id.hex()}")
        model = self._checked(message, now)
        call = Call(event.id, model.name, JOBS_LINK, event.attempt, message, now)
        call.charge, call.alone = event.charge, event.alone
        self._add(model, call, now)

    def _checked(self, message: ModelCall, now: float) -> Model:
        """Returns the model of a call.

        Raises PoolError if the model can never answer such a call, or cannot answer it now.
        """
        registry, name = self._state.registry, message.model
        model = registry.model(name)
        self._state.check_admits(model, name)
        registry.check_available(model, now, name)
        registry.check_task(name, message.kind)
        if message.kind == TOKENIZE and message.fields.get("messages") is not None:
            registry.check_template(model)
        return model

    def _add(self, model: Model, call: Call, now: float) -> None:
        """Queues a call at its model. Raises QueueFull if the model has too many open calls."""
        self._check_bounds(model, call)
        self._state.add_call(call)
        model.calls.add(call)
        if call.message.deadline_ms is not None:
            self._state.timers.set(("call", call.id), now + call.message.deadline_ms / 1000)
        self._pool.require(model, now)
        self.forward(model)
        self._pool.update_idle_timer(model, now)

    def _redirect(self, event: ev.ClientModelCall, message: ModelCall) -> bool:
        """Makes the answer of a known call go to the link of this attempt.

        Returns False for a new call.

        Raises DuplicateId if another call has this id.
        """
        call = self._state.calls.get(event.id)
        if call is None:
            return False
        if call.link == JOBS_LINK or not call.same_as(message):
            raise DuplicateId(f"another call with the id {event.id.hex()} is under way")
        self._state.remove_call(call)
        call.link, call.attempt = event.link, event.attempt
        self._state.add_call(call)
        return True

    def _check_bounds(self, model: Model, call: Call) -> None:
        """Raises QueueFull if the open calls of a model are too many or have too many bytes."""
        config, calls = self._state.config, self._state.calls
        in_work = [calls[id] for worker in model.workers for id in worker.calls]
        count = len(model.calls) + len(in_work)
        held = model.calls.bytes + sum(each.size for each in in_work)
        if count >= config.queue_limit or held + call.size > config.queue_bytes:
            raise QueueFull(
                f"{count} calls with {held} bytes are open for model {model.name!r} already,"
                f" at most {config.queue_limit} and {config.queue_bytes}",
                retry_after_ms=QUEUE_RETRY_MS,
            )

    def forward(self, model: Model) -> None:
        """Gives waiting calls to the workers with the fewest calls, up to MAX_IN_WORKER each."""
        if self._state.phase is PoolPhase.CLOSING:
            return  # all calls are about to end
        serving = [worker for worker in model.workers if worker.serves]
        while model.calls and serving:
            worker = min(serving, key=lambda worker: len(worker.calls))
            if len(worker.calls) >= MAX_IN_WORKER:
                return
            call = model.calls.take()
            call.epoch = worker.epoch
            worker.calls.add(call.id)
            self._outbox.tell(worker, call.for_worker(), id=call.id)

    # ---- ends --------------------------------------------------------------------------------

    def on_answer(self, event: ev.WorkerAnswer, now: float) -> None:
        """Handles a worker's answer to a call."""
        worker = self._state.workers.get(event.epoch)
        if worker is None or event.id not in worker.calls:
            self._state.counters.fenced += 1
            return
        worker.calls.discard(event.id)
        call, answer = self._state.calls[event.id], event.message
        if call.message.computes:
            self._pool.served(worker, now)
        self._answer(call, Failed(answer.fields) if answer.failed else answer)
        self._pool.stop_if_drained(worker)
        model = self._state.model_of_worker(worker)
        self.forward(model)
        self._pool.work_ended(model, now)

    def on_timer(self, id: bytes, now: float) -> None:
        """Fails a call whose deadline has passed."""
        call = self._state.calls.get(id)
        if call is not None:
            why = f"no answer to {call.message.kind} after {now - call.accepted_at:.3f} s"
            where = "a worker has it" if call.epoch else "no worker has it"
            self.cancel(call, now, DeadlineExceeded(f"{why} (deadline_ms), {where}"))

    def known(self, id: bytes, owner: str | None) -> Call | None:
        """Returns the open call with this id, if it belongs to `owner` or if `owner` is None."""
        call = self._state.calls.get(id)
        return call if call is not None and owner in (None, call.message.owner) else None

    def cancel(self, call: Call, now: float, error: PoolError | None = None) -> None:
        """Ends a call with an error, or without an answer, and cancels it in its worker.

        The job manager gets a message for the end of each job's call, with or without an error.
        """
        silent = Done("cancelled") if call.link == JOBS_LINK else None
        self._answer(call, silent if error is None else Failed.of(error))
        worker = self._state.workers.get(call.epoch)
        if worker is None:
            model = self._state.registry.models[call.model]
            model.calls.remove(call)
        else:
            model = self._state.model_of_worker(worker)
            worker.calls.discard(call.id)
            self._outbox.tell(worker, Cancel(), id=call.id)
            self._pool.stop_if_drained(worker)
            self.forward(model)
        self._pool.work_ended(model, now)

    def computed_by(self, worker: Worker) -> list[Call]:
        """Returns the calls that the model of a worker computes or has queued."""
        calls = [self._state.calls[id] for id in sorted(worker.calls)]
        return [call for call in calls if call.message.computes]

    def worker_lost(self, worker: Worker, cause: str, shares: Mapping[bytes, float]) -> None:
        """Queues the calls of a lost worker again, or fails them.

        A call fails if it is to blame for the loss, or if too many workers were lost while they had
        this call. `shares`: the blame of each call for the loss, 0 to 1, by call id (blame.py).
        """
        model = self._state.model_of_worker(worker)
        lost = sorted((self._state.calls[id] for id in worker.calls), key=lambda c: c.accepted_at)
        for call in reversed(lost):  # newest first: each call becomes the first of the queue
            call.charge += shares.get(call.id, 0.0)
            call.losses += cause not in exit_causes.COMMANDED
            if call.link == JOBS_LINK and cause not in exit_causes.COMMANDED:
                self._tell_jobs(call, worker, cause)
            error = _reason_to_fail(call, exit_causes.ended(worker.slot, cause), cause)
            if error is None:
                call.epoch = 0
                model.calls.add_first(call)
            else:
                self._answer(call, Failed.of(error))
        worker.calls.clear()

    def _tell_jobs(self, call: Call, worker: Worker, cause: str) -> None:
        """Reports a lost worker to the job manager, which stores the charge and the failure."""
        where = exit_causes.ended(worker.slot, cause)
        self._outbox.add(JobSetBack(call.id, call.attempt, worker.slot, call.charge, where))

    def _answer(self, call: Call, answer: Content | None) -> None:
        """Ends a call; all calls end here. If `answer` is None, nobody gets an answer."""
        self._state.remove_call(call)
        self._state.timers.clear(("call", call.id))
        if answer is not None:
            self._outbox.send(call.link, answer, call.id, call.attempt)


def allowed_keep(asked_ms: int, usual: float, longest: float) -> float:
    """Returns the seconds for which an idle model stays loaded, at the request of a client.

    `asked_ms`: the requested milliseconds. `usual`: the model's keep_alive in seconds. `longest`:
    the most seconds that a client may request. For each of these times, and for the result, a
    negative value means no limit. A client can always request up to `usual`. If `usual` has no
    limit, a client cannot shorten it.
    """
    if usual < 0:
        return usual
    seconds_asked = math.inf if asked_ms < 0 else asked_ms / 1000
    bound = math.inf if longest < 0 else max(longest, usual)
    seconds = min(seconds_asked, bound)
    return -1.0 if math.isinf(seconds) else seconds


def _reason_to_fail(call: Call, where: str, cause: str) -> PoolError | None:
    """Returns why a call of a lost worker fails; None if another worker gets the call."""
    if call.charge >= blame.POISON_CHARGE:
        return Poisoned(f"{where}; this call ended two workers")
    most = MAX_LOSSES_COMPUTED if call.message.computes else MAX_LOSSES
    if call.losses < most:
        return None
    return WorkerLost(f"{call.losses} workers ended while they were asked: {cause}")
