"""The small questions beside requests: ping, models, and what a worker's tokenizer is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxpool.broker.core.dispatcher import RETRY_QUEUE_MS, Dispatch
from mlxpool.broker.interface import events as ev
from mlxpool.broker.telemetry import stats
from mlxpool.broker.workers.worker import Model, Question, Worker
from mlxpool.common.errors import (
    BadRequest,
    DuplicateId,
    PoolError,
    QueueFull,
    WorkerLost,
)
from mlxpool.common.protocol import frames, kinds

ASK_TRIES = 2


class Calls(Dispatch):
    """A call is answered once; one that a lost worker had is asked again, once."""

    def on_ask(self, event: ev.Ask, now: float) -> None:
        self._heard(event.link, now)
        if event.kind == kinds.PING:
            body: dict[str, Any] = {
                "boot": self.boot,
                "link": event.link,
                "version": frames.VERSION,
            }
            self._answer(event, kinds.PONG, body)
        elif event.kind == kinds.MODELS:
            self._answer(event, kinds.MODELS, {"models": stats.brief(self.model_list(now))})
        else:
            self._ask_worker(event, now)

    def model_list(self, now: float) -> list[dict[str, Any]]:
        """What a client may know of the models."""
        return stats.models(self.fleet, self.config.restart_limit, now)

    def _ask_worker(self, event: ev.Ask, now: float) -> None:
        try:
            if not isinstance(event.body.get("model"), str):
                raise BadRequest(f"{event.kind}: model must be a name")
            name = event.body["model"]
            model = self.fleet.model(name)
            self._check_open(model, name)
            self.fleet.refuse_if_broken(model, now, name)
            if self._asked_again(model, event):
                return
            self._check_asks(model, event)
        except PoolError as error:
            self._answer(event, kinds.ERROR, error.body())
            return
        model.asks.append(
            Question(event.id, event.link, event.attempt, event.kind, event.body, event.blobs)
        )
        self.fleet.want(model, now)
        self._forward_asks(model)
        self.fleet.settle(model, now)

    def _asked_again(self, model: Model, event: ev.Ask) -> bool:
        """The same call on a new connection: its answer goes there. Whoever has its id made it."""
        if event.id in self.asked:
            ask, epoch = self.asked[event.id]
            if not _same_call(ask, event):
                raise DuplicateId(f"another call with the id {event.id.hex()} is under way")
            self.asked[event.id] = (_moved(ask, event), epoch)
            return True
        if any(
            ask.id == event.id
            for m in self.fleet.models.values()
            if m is not model
            for ask in m.asks
        ):
            raise DuplicateId(f"another call with the id {event.id.hex()} is waiting")
        for place, ask in enumerate(model.asks):
            if ask.id == event.id:
                model.asks[place] = _moved(ask, event)
                return True
        return False

    def _check_asks(self, model: Model, event: ev.Ask) -> None:
        limit, most = self.config.queue_limit, self.config.queue_bytes
        held = sum(len(blob) for ask in model.asks for blob in ask.blobs)
        if len(model.asks) >= limit or held + sum(map(len, event.blobs)) > most:
            raise QueueFull(
                f"{len(model.asks)} calls with {held} bytes wait for model {model.name!r} already,"
                f" at most {limit} and {most}",
                retry_after_ms=RETRY_QUEUE_MS,
            )

    def _forward_asks(self, model: Model) -> None:
        ready = [w for w in model.workers if w.serves]
        if not ready:
            return
        for ask in model.asks:
            self.asked[ask.id] = (replace(ask, tries=ask.tries + 1), ready[0].epoch)
            ready[0].asked.add(ask.id)
            self.fleet.tell(ready[0], ask.kind, ask.body, id=ask.id, blobs=ask.blobs)
        model.asks.clear()

    def _ask_again(self, worker: Worker, cause: str) -> None:
        """Calls that a lost worker had: the next one gets them, once."""
        model = self.fleet.models[worker.model]
        for ident in sorted(worker.asked):
            ask, epoch = self.asked.get(ident, (None, 0))
            if ask is None or epoch != worker.epoch:
                continue
            del self.asked[ident]
            if ask.tries < ASK_TRIES:
                model.asks.append(ask)
            else:
                error = WorkerLost(f"two workers ended while they were asked: {cause}")
                self._reply(ask.link, kinds.ERROR, ask.id, ask.attempt, error.body())
        worker.asked.clear()


def _same_call(ask: Question, event: ev.Ask) -> bool:
    return (ask.kind, ask.body.get("model")) == (event.kind, event.body.get("model"))


def _moved(ask: Question, event: ev.Ask) -> Question:
    return replace(ask, link=event.link, attempt=event.attempt)
