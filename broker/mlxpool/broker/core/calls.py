"""Answers `ping` and `models`, and has workers answer `tokenize` and `detokenize`."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.outbox import Outbox
from mlxpool.broker.core.state import QUEUE_RETRY_MS, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models import listing
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests.call import Call
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.errors import DuplicateId, PoolError, QueueFull, WorkerLost
from mlxpool.common.protocol.frames import VERSION, Content
from mlxpool.common.protocol.to_broker import Cancel, TokenizerCall
from mlxpool.common.protocol.to_client import Failed, ModelList, Pong

MAX_LOSSES = 2  # of workers that had a call


class Calls:
    """A call is answered once, unless it is cancelled. A lost worker's is sent to one more."""

    def __init__(self, state: State, outbox: Outbox, pool: WorkerPool) -> None:
        self._state = state
        self._outbox = outbox
        self._pool = pool

    def on_ping(self, event: ev.ClientPing, now: float) -> None:
        self._state.heard(event.link, now)
        pong = Pong(self._state.boot, event.link, VERSION)
        self._outbox.send(event.link, pong, event.id, event.attempt)

    def on_list_models(self, event: ev.ClientListModels, now: float) -> None:
        self._state.heard(event.link, now)
        rows = listing.brief(listing.rows(self._state.registry, now))
        self._outbox.send(event.link, ModelList(rows), event.id, event.attempt)

    def on_call_tokenizer(self, event: ev.ClientTokenizerCall, now: float) -> None:
        self._state.heard(event.link, now)
        try:
            self._queue(event, now)
        except PoolError as error:
            self._outbox.send(event.link, Failed.of(error), event.id, event.attempt)

    def _queue(self, event: ev.ClientTokenizerCall, now: float) -> None:
        """Queue a call. Raises PoolError if it is bad, or cannot be answered now."""
        if isinstance(event.message, PoolError):
            raise event.message
        registry, name = self._state.registry, event.message.model
        model = registry.model(name)
        self._state.check_admits(model, name)
        registry.check_available(model, now, name)
        if self._redirect(event, event.message):
            return
        call = Call(event.id, model.name, event.link, event.attempt, event.message)
        self._check_bounds(model, call)
        self._state.add_call(call)
        model.calls[call.id] = call
        self._pool.require(model, now)
        self.forward(model)
        self._pool.update_idle_timer(model, now)

    def _redirect(self, event: ev.ClientTokenizerCall, message: TokenizerCall) -> bool:
        """Whether a call was known before: then its answer goes to the link of this sending.

        Raises DuplicateId if its id is that of another call.
        """
        call = self._state.calls.get(event.id)
        if call is None:
            return False
        if not call.same_as(message):
            raise DuplicateId(f"another call with the id {event.id.hex()} is under way")
        self._state.remove_call(call)
        call.link, call.attempt = event.link, event.attempt
        self._state.add_call(call)
        return True

    def _check_bounds(self, model: Model, call: Call) -> None:
        """Raises QueueFull when too many calls of a model wait, or are with its workers."""
        config, calls = self._state.config, self._state.calls
        in_work = [calls[id] for worker in model.workers for id in worker.calls]
        count = len(model.calls) + len(in_work)
        held = sum(each.size for each in (*model.calls.values(), *in_work))
        if count >= config.queue_limit or held + call.size > config.queue_bytes:
            raise QueueFull(
                f"{count} calls with {held} bytes are open for model {model.name!r} already,"
                f" at most {config.queue_limit} and {config.queue_bytes}",
                retry_after_ms=QUEUE_RETRY_MS,
            )

    def forward(self, model: Model) -> None:
        """Send the waiting calls to the first worker that serves the model, if one does."""
        worker = next((w for w in model.workers if w.serves), None)
        if worker is None:
            return
        for call in model.calls.values():
            call.epoch = worker.epoch
            worker.calls.add(call.id)
            self._outbox.tell(worker, call.message, id=call.id)
        model.calls.clear()

    # ---- ends --------------------------------------------------------------------------------

    def on_tokens(self, event: ev.WorkerTokens, now: float) -> None:
        """A worker has answered a call."""
        worker = self._state.workers.get(event.epoch)
        if worker is None or event.id not in worker.calls:
            self._state.counters.fenced += 1
            return
        worker.calls.discard(event.id)
        answer = event.message
        self._answer(
            self._state.calls[event.id], Failed(answer.fields) if answer.failed else answer
        )
        self._pool.stop_if_drained(worker)
        self._pool.work_ended(self._state.model_of_worker(worker), now)

    def known(self, id: bytes, owner: str | None) -> Call | None:
        """The open call with this id, if this owner may know of it; `owner` None may know all."""
        call = self._state.calls.get(id)
        return call if call is not None and owner in (None, call.message.owner) else None

    def cancel(self, call: Call, now: float, error: PoolError | None = None) -> None:
        """End a call with an error, or without an answer; its worker no longer prepares it."""
        self._answer(call, None if error is None else Failed.of(error))
        worker = self._state.workers.get(call.epoch)
        if worker is None:
            model = self._state.registry.models[call.model]
            del model.calls[call.id]
        else:
            model = self._state.model_of_worker(worker)
            worker.calls.discard(call.id)
            self._outbox.tell(worker, Cancel(), id=call.id)
            self._pool.stop_if_drained(worker)
        self._pool.work_ended(model, now)

    def worker_lost(self, worker: Worker, cause: str) -> None:
        """Queue the calls of a lost worker again; those that lost too many fail."""
        model = self._state.model_of_worker(worker)
        error = WorkerLost(f"two workers ended while they were asked: {cause}")
        for call in [self._state.calls[id] for id in sorted(worker.calls)]:
            call.losses += cause not in exit_causes.COMMANDED
            if call.losses < MAX_LOSSES:
                call.epoch = 0
                model.calls[call.id] = call
            else:
                self._answer(call, Failed.of(error))
        worker.calls.clear()

    def give_up(self, model: Model, why: Callable[[str], PoolError]) -> None:
        """Fail the calls that wait for a model. `why` makes the error for a name of it."""
        for call in model.calls.values():
            self._answer(call, Failed.of(why(call.message.model)))
        model.calls.clear()

    def _answer(self, call: Call, answer: Content | None) -> None:
        """The one place where a call ends; None: nobody waits for an answer."""
        self._state.remove_call(call)
        if answer is not None:
            self._outbox.send(call.link, answer, call.id, call.attempt)
