"""Answers `ping` and `models`, and has workers answer `tokenize` and `detokenize`."""

from __future__ import annotations

from dataclasses import replace

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.outbox import Outbox
from mlxpool.broker.core.state import QUEUE_RETRY_MS, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models import listing
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests.call import Call
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.errors import DuplicateId, PoolError, QueueFull, WorkerLost
from mlxpool.common.protocol.frames import VERSION
from mlxpool.common.protocol.to_client import Failed, ModelList, Pong

MAX_TRIES = 2  # workers that a call is sent to, one after the other


class Calls:
    """A call is answered once. If its worker is lost it is sent to one more."""

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
        call = Call(event.id, event.link, event.attempt, event.message)
        if self._redirect(model, call):
            return
        self._check_bounds(model, call)
        model.calls.append(call)
        self._pool.require(model, now)
        self.forward(model)
        self._pool.update_idle_timer(model, now)

    def _redirect(self, model: Model, resent: Call) -> bool:
        """Whether a call was known before: then its answer goes to the link of this sending.

        Raises DuplicateId if its id is that of another call.
        """
        if resent.id in self._state.calls:
            call, epoch = self._state.calls[resent.id]
            if not call.same_as(resent.message):
                raise DuplicateId(f"another call with the id {resent.id.hex()} is under way")
            self._state.calls[resent.id] = (_redirected(call, resent), epoch)
            return True
        others = (m for m in self._state.registry.models.values() if m is not model)
        if any(call.id == resent.id for other in others for call in other.calls):
            raise DuplicateId(f"another call with the id {resent.id.hex()} is waiting")
        for index, call in enumerate(model.calls):
            if call.id == resent.id:
                model.calls[index] = _redirected(call, resent)
                return True
        return False

    def _check_bounds(self, model: Model, call: Call) -> None:
        config, waiting = self._state.config, len(model.calls)
        held = sum(each.size for each in model.calls)
        if waiting >= config.queue_limit or held + call.size > config.queue_bytes:
            raise QueueFull(
                f"{waiting} calls with {held} bytes wait for model {model.name!r} already,"
                f" at most {config.queue_limit} and {config.queue_bytes}",
                retry_after_ms=QUEUE_RETRY_MS,
            )

    def forward(self, model: Model) -> None:
        """Send the waiting calls to the first worker that serves the model, if one does."""
        worker = next((w for w in model.workers if w.serves), None)
        if worker is None:
            return
        for call in model.calls:
            self._state.calls[call.id] = (replace(call, tries=call.tries + 1), worker.epoch)
            worker.calls.add(call.id)
            self._outbox.tell(worker, call.message, id=call.id)
        model.calls.clear()

    def on_tokens(self, event: ev.WorkerTokens, now: float) -> None:
        """A worker has answered a call."""
        worker = self._state.workers.get(event.epoch)
        if worker is None or event.id not in worker.calls:
            self._state.counters.fenced += 1
            return
        worker.calls.discard(event.id)
        call, _ = self._state.calls.pop(event.id)
        answer = event.message
        message = Failed(answer.fields) if answer.failed else answer
        self._outbox.send(call.link, message, call.id, call.attempt)
        self._pool.stop_if_drained(worker)
        self._pool.work_ended(self._state.model_of_worker(worker), now)

    def worker_lost(self, worker: Worker, cause: str) -> None:
        """Queue the calls of a lost worker again; those that were tried enough fail."""
        model = self._state.model_of_worker(worker)
        for call_id in sorted(worker.calls):
            known = self._state.calls.get(call_id)
            if known is None or known[1] != worker.epoch:
                continue
            call = self._state.calls.pop(call_id)[0]
            if call.tries < MAX_TRIES:
                model.calls.append(call)
            else:
                self.fail(call, WorkerLost(f"two workers ended while they were asked: {cause}"))
        worker.calls.clear()

    def fail(self, call: Call, error: PoolError) -> None:
        self._outbox.send(call.link, Failed.of(error), call.id, call.attempt)


def _redirected(call: Call, resent: Call) -> Call:
    return replace(call, link=resent.link, attempt=resent.attempt)
