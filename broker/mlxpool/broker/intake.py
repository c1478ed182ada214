"""Requests come: checked, queued, given to workers; and the small questions beside them."""

from __future__ import annotations

import math
from typing import Any

from mlxpool.broker import events as ev
from mlxpool.broker.delivery import Delivery
from mlxpool.broker.policy import choose_worker, next_request
from mlxpool.broker.requests import Payload, Request, Tombstone
from mlxpool.broker.workers import Model, Worker, WorkerState
from mlxpool.common import wire
from mlxpool.common.errors import BadRequest, Draining, DuplicateId, PoolError, QueueFull
from mlxpool.common.wire import Header

RETRY_QUEUE_MS = 1000


class Intake(Delivery):
    """No work for a worker that is not READY, and never more than it has credit for."""

    def on_generate(self, event: ev.Generate, now: float) -> None:
        self._heard(event.link, now)
        digest = wire.request_digest(event.body, event.blobs)
        known = self.requests.get(event.id) or self.tombstones.get(event.id)
        if known is not None and not self._may_send_again(known, event, digest):
            return
        try:
            payload = Payload.parse(event.body, event.blobs)
            self._admit(event, payload, digest, now)
        except PoolError as error:
            self._refuse(event, error, now)

    def _may_send_again(
        self, known: Request | Tombstone, event: ev.Generate, digest: bytes
    ) -> bool:
        """A higher attempt of the same request takes over; anything else ends here."""
        if (known.owner, known.digest) != (event.owner, digest):
            self._duplicate(event, "is in use by another request")
        elif event.attempt > known.attempt:
            return True
        elif isinstance(known, Tombstone):
            self._duplicate(event, f"has ended: {known.state.value}")
        elif event.attempt == known.attempt:
            self._accepted(known, event.link)
        return False

    def _refuse(self, event: ev.Generate, error: PoolError, now: float) -> None:
        """Answer with the terminal; a run that this sending should have replaced ends with it."""
        before = self.requests.get(event.id)
        if before is None:
            self.counters.rejected[error.code] += 1
            self._answer(event, wire.ERROR, error.body())
            return
        self.links[before.link].ids.discard(before.id)
        before.link, before.attempt = event.link, event.attempt
        self.links[event.link].ids.add(before.id)
        before.unread.clear()
        self._fail(before, error, now)

    def _duplicate(self, event: ev.Generate, why: str) -> None:
        self.counters.rejected[DuplicateId.code] += 1
        error = DuplicateId(f"the id {event.id.hex()} {why}; make a new id for each request")
        header = Header(wire.ERROR, None, self.boot, event.attempt)
        body = {**error.body(), "about": event.id}
        self.out.append(ev.ToClient(event.link, header, body))

    def _admit(self, event: ev.Generate, payload: Payload, digest: bytes, now: float) -> None:
        if self.stopping:
            raise Draining("the broker is going down; send the request again later")
        model = self.fleet.model(payload.model)
        before = self.requests.get(event.id)
        if before is None:
            self._check_queue(model, payload)
        self.fleet.refuse_if_broken(model, now)
        request = self._new_request(event, payload, digest, now)
        if before is not None:
            self._take_over(before, request)
        else:
            self.counters.accepted += 1
        self.tombstones.pop(request.id, None)
        self.requests[request.id] = request
        self.links[event.link].ids.add(request.id)
        self._watch_link(event.link, now)
        self._set_timer(request)
        self._enqueue(model, request)
        self._accepted(request, request.link)
        self.fleet.want(model, now)
        self._dispatch(model, now)

    def _check_queue(self, model: Model, payload: Payload) -> None:
        limit, most = self.config.queue_limit, self.config.queue_bytes
        if len(model.queue) >= limit or model.queue_bytes + payload.size > most:
            raise QueueFull(
                f"{len(model.queue)} requests with {model.queue_bytes} bytes of prompt wait for"
                f" model {model.name!r}, at most {limit} and {most}; retry later",
                retry_after_ms=RETRY_QUEUE_MS,
            )

    def _new_request(
        self, event: ev.Generate, payload: Payload, digest: bytes, now: float
    ) -> Request:
        total = self.config.deadline
        if payload.deadline_ms is not None:
            total = payload.deadline_ms / 1000
        waits = math.inf if payload.queue_ms is None else payload.queue_ms / 1000
        seed = _seed(payload, event.entropy)
        have = len(payload.resume_ids) // 4
        return Request(
            event.id,
            event.attempt,
            event.link,
            event.owner,
            digest,
            payload,
            seed,
            accepted_at=now,
            deadline=now + total,
            queue_deadline=now + waits,
            taken=have,
            sent=have,
            acked=have,
        )

    def _take_over(self, before: Request, request: Request) -> None:
        """The client sent again: its ids are what counts, the old run is fenced and stopped."""
        self._leave_worker(before)
        self._unqueue(before)
        self.links[before.link].ids.discard(before.id)
        request.tries = before.tries
        request.accepted_at = before.accepted_at

    def _accepted(self, request: Request, link: int) -> None:
        body = {
            "boot": self.boot,
            "link": link,
            "queue_position": self._position(request),
            "seed": request.seed,
        }
        self._reply(link, wire.ACCEPTED, request.id, request.attempt, body)

    def _dispatch(self, model: Model, now: float) -> None:
        """Give waiting requests to workers that have room."""
        while (worker := choose_worker(model.workers)) is not None:
            request = next_request(model.queue)
            if request is None:
                break
            self._assign(request, worker, now)
        self.fleet.settle(model, now)

    def _assign(self, request: Request, worker: Worker, now: float) -> None:
        self._unqueue(request)
        request.move("assign")
        request.worker, request.slot, request.assigned_at = worker.epoch, worker.slot, now
        request.tries += 1
        self.runs += 1
        request.run = self.runs
        worker.works_sent += 1
        worker.places.add((request.id, request.run))
        self._set_timer(request)
        payload = request.payload
        body = {
            **payload.prompt,
            "options": payload.options.to_wire(),
            "seed": request.seed,
            "deadline_ms": math.ceil((request.deadline - now) * 1000),
        }
        blobs = payload.blobs
        if payload.resume is not None:
            body["resume"] = payload.resume
            blobs = (*blobs, payload.resume_ids)
        self.fleet.tell(worker, wire.WORK, body, id=request.id, attempt=request.run, blobs=blobs)

    def on_ask(self, event: ev.Ask, now: float) -> None:
        self._heard(event.link, now)
        if event.kind == wire.PING:
            body: dict[str, Any] = {"boot": self.boot, "link": event.link, "version": wire.VERSION}
            self._answer(event, wire.PONG, body)
        elif event.kind == wire.MODELS:
            self._answer(event, wire.MODELS, {"models": self.model_list()})
        else:
            self._ask_worker(event, now)

    def model_list(self) -> list[dict[str, Any]]:
        """What a client may know of the models."""
        limit = self.config.restart_limit
        return [
            {
                "name": model.name,
                "state": model.state(limit),
                "queued": len(model.queue),
                "context": max(
                    (int(w.hello.get("context", 0)) for w in model.workers),
                    default=model.config.context,
                ),
            }
            for model in self.fleet.models.values()
        ]

    def _ask_worker(self, event: ev.Ask, now: float) -> None:
        try:
            if self.stopping:
                raise Draining("the broker is going down")
            if not isinstance(event.body.get("model"), str):
                raise BadRequest(f"{event.kind}: model must be a name")
            model = self.fleet.model(event.body["model"])
            self.fleet.refuse_if_broken(model, now)
            self._check_asks(model, event)
        except PoolError as error:
            self._answer(event, wire.ERROR, error.body())
            return
        model.asks.append(
            (event.id, event.link, event.attempt, event.kind, event.body, event.blobs)
        )
        self.fleet.want(model, now)
        self._forward_asks(model)
        self.fleet.settle(model, now)

    def _check_asks(self, model: Model, event: ev.Ask) -> None:
        if event.id in self.asked or any(event.id == ask[0] for ask in model.asks):
            raise DuplicateId(f"a call with the id {event.id.hex()} is under way")
        limit = self.config.queue_limit
        if len(model.asks) >= limit:
            raise QueueFull(f"{limit} calls wait for model {model.name!r} already")

    def _forward_asks(self, model: Model) -> None:
        ready = [w for w in model.workers if w.state is WorkerState.READY]
        if not ready:
            return
        for request_id, link, attempt, kind, body, blobs in model.asks:
            self.asked[request_id] = (link, attempt, ready[0].epoch)
            ready[0].asked.add(request_id)
            self.fleet.tell(ready[0], kind, body, id=request_id, blobs=blobs)
        model.asks.clear()

    def on_tokens(self, event: ev.WorkerTokens, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is not None:
            worker.asked.discard(event.id)
            self.fleet.settle(self.fleet.models[worker.model], now)
        asked = self.asked.pop(event.id, None)
        if asked is not None:
            kind = wire.ERROR if "code" in event.body else wire.TOKENS
            self._reply(asked[0], kind, event.id, asked[1], event.body, event.blobs)


def _seed(payload: Payload, entropy: int) -> int:
    """The request's own, else the one that its earlier sending was given, else a new one."""
    if payload.options.seed >= 0:
        return payload.options.seed
    return entropy if payload.resume is None else payload.resume.get("seed", entropy)
