"""Requests come: checked, queued, given to workers; and the small questions beside them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mlxpool.broker import events as ev
from mlxpool.broker import stats
from mlxpool.broker.delivery import Delivery
from mlxpool.broker.payload import Payload
from mlxpool.broker.policy import choose_worker, prefix_keys, remember, same_facts
from mlxpool.broker.queue import tokens_of
from mlxpool.broker.requests import Request, State, Tombstone
from mlxpool.broker.security.quotas import milliseconds
from mlxpool.broker.workers import Model, Question, Worker, WorkerState
from mlxpool.common import wire
from mlxpool.common.errors import (
    BadRequest,
    Draining,
    DuplicateId,
    ModelUnavailable,
    OverQuota,
    Poisoned,
    PoolError,
    QueueFull,
    WorkerLost,
)
from mlxpool.common.wire import Header

RETRY_QUEUE_MS = 1000
ASK_TRIES = 2
RESUMED = 4  # times the bounds of a queue, for streams that another broker had accepted


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
        elif isinstance(known, Tombstone) and known.final:
            self._duplicate(event, f"has ended: {known.state.value}")
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
        before = self.requests.get(event.id)
        model = self.fleet.model(payload.model) if before is None else self._model_of(before)
        if before is None:
            self._check_open(model, payload.model)
            # What was accepted once is not refused for want of room, within reason.
            factor = RESUMED if payload.resume_ids else 1
            self._check_quota(event.owner, payload, factor, now)
            self._check_queue(model, payload, factor)
            self._check_poison(digest)
        else:
            _check_ids(before, payload)
        self.fleet.refuse_if_broken(model, now, payload.model)
        request = self._new_request(event, payload, model, digest, now)
        waits = before is not None and before.state is State.QUEUED
        if before is not None:
            self._take_over(before, request)
        else:
            self.counters.accept(request)
            self.owned[request.owner] += 1
        self.tombstones.pop(request.id, None)
        self.requests[request.id] = request
        self.links[event.link].ids.add(request.id)
        self._watch_link(event.link, now)
        self._set_timer(request)
        if before is not None and waits:
            model.queue.replace(before, request)
        elif before is None and not payload.resume_ids:
            model.queue.add(request)
        else:
            model.queue.add_back(request)
        self._accepted(request, request.link)
        self.fleet.want(model, now)
        self._dispatch(model, now)

    def _check_open(self, model: Model, name: str) -> None:
        if self.stopping:
            raise Draining("the broker is going down; send the request again later")
        if model.closed:
            raise Draining(f"model {name!r} is drained; `mlxpool load {name}` opens it again")

    def _check_poison(self, digest: bytes) -> None:
        until = self.poisoned.get(digest)
        if until is not None:
            raise Poisoned(
                "this request ended two workers; it is refused for"
                f" {self.config.poison_life / 60:g} minutes"
            )

    def _check_queue(self, model: Model, payload: Payload, factor: int) -> None:
        limit, most = factor * self.config.queue_limit, factor * self.config.queue_bytes
        if len(model.queue) >= limit or model.queue.bytes + payload.size > most:
            raise QueueFull(
                f"{len(model.queue)} requests with {model.queue.bytes} bytes of prompt wait for"
                f" model {payload.model!r}, at most {limit} and {most}; retry later",
                retry_after_ms=RETRY_QUEUE_MS,
            )

    def _check_quota(self, owner: str, payload: Payload, factor: int, now: float) -> None:
        """One owner's share of the pool; it holds for first sendings, as the queue's bounds do."""
        config = self.config
        live, most = self.owned[owner], factor * config.quota_requests
        if 0 < most <= live:
            raise OverQuota(
                f"{owner} has {live} live requests, at most {most} (quota_requests); wait until one"
                " ends",
                details={"owner": owner, "value": live, "bound": most},
                retry_after_ms=RETRY_QUEUE_MS,
            )
        most = factor * config.quota_tokens
        if most and (waiting := self._tokens_waiting(owner)) + tokens_of(payload) > most:
            raise OverQuota(
                f"{owner} has about {waiting} tokens of prompt waiting, with this request more than"
                f" {most} (quota_tokens); wait until some are read",
                details={"owner": owner, "value": waiting, "bound": most},
                retry_after_ms=RETRY_QUEUE_MS,
            )
        wait = self.cancels.wait(owner, config.quota_cancels, now)
        if wait:
            raise OverQuota(
                f"{owner} cancels more than {config.quota_cancels} requests a second"
                " (quota_cancels); cancel less, or wait",
                details={"owner": owner, "bound": config.quota_cancels},
                retry_after_ms=milliseconds(wait),
            )

    def _tokens_waiting(self, owner: str) -> int:
        queues = (model.queue for model in self.fleet.models.values())
        return sum(tokens_of(r.payload) for queue in queues for r in queue if r.owner == owner)

    def _new_request(
        self, event: ev.Generate, payload: Payload, model: Model, digest: bytes, now: float
    ) -> Request:
        total = self.config.deadline
        if payload.deadline_ms is not None:
            total = payload.deadline_ms / 1000
        waits = math.inf if payload.queue_ms is None else payload.queue_ms / 1000
        seed = _seed(payload, event.entropy)
        first = math.inf if payload.first_token_ms is None else payload.first_token_ms / 1000
        have = len(payload.resume_ids) // 4
        resume = payload.resume or {}
        self.arrivals += 1
        return Request(
            event.id,
            event.attempt,
            event.link,
            event.owner,
            digest,
            payload,
            model.name,
            seed,
            accepted_at=now,
            deadline=now + total,
            queue_deadline=now + waits,
            first_deadline=now + first,
            place=self.arrivals,
            ids=bytearray(payload.resume_ids),
            facts=resume.get("facts"),
            barren=int(resume.get("resumes", 0)),
            timed=have,
            sent=have,
            acked=have,
        )

    def _take_over(self, before: Request, request: Request) -> None:
        """The client sent again: its ids are what counts, the old run is fenced and stopped."""
        self._leave_worker(before)
        self.links[before.link].ids.discard(before.id)
        request.tries, request.place = before.tries, before.place
        request.accepted_at, request.assigned_at = before.accepted_at, before.assigned_at
        request.first_at, request.timed_at = before.first_at, before.timed_at
        request.prompt_tokens = before.prompt_tokens
        request.queue_deadline = before.queue_deadline
        request.first_deadline = before.first_deadline
        request.facts = before.facts or request.facts
        request.seed = before.seed
        request.charge, request.company = before.charge, before.company
        request.barren = max(before.barren, request.barren)

    def _accepted(self, request: Request, link: int) -> None:
        body = {
            "boot": self.boot,
            "link": request.link,
            "queue_position": self._position(request),
            "seed": request.seed,
        }
        self._reply(link, wire.ACCEPTED, request.id, request.attempt, body)

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
        blobs = payload.blobs
        if request.ids or request.facts is not None:
            resume: dict[str, Any] = {"count": request.taken, "resumes": request.barren}
            if request.facts is not None:
                resume["facts"] = request.facts
            body["resume"] = resume
            blobs = (*blobs, bytes(request.ids))
        self.fleet.tell(worker, wire.WORK, body, id=request.id, attempt=request.run, blobs=blobs)

    def on_ask(self, event: ev.Ask, now: float) -> None:
        self._heard(event.link, now)
        if event.kind == wire.PING:
            body: dict[str, Any] = {"boot": self.boot, "link": event.link, "version": wire.VERSION}
            self._answer(event, wire.PONG, body)
        elif event.kind == wire.MODELS:
            self._answer(event, wire.MODELS, {"models": stats.brief(self.model_list(now))})
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
            self._answer(event, wire.ERROR, error.body())
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
        ready = [w for w in model.workers if w.state is WorkerState.READY]
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
                self._reply(ask.link, wire.ERROR, ask.id, ask.attempt, error.body())
        worker.asked.clear()


def _seed(payload: Payload, entropy: int) -> int:
    """The request's own, else the one that its earlier sending was given, else a new one."""
    if payload.options.seed >= 0:
        return payload.options.seed
    return entropy if payload.resume is None else payload.resume.get("seed", entropy)


def _same_call(ask: Question, event: ev.Ask) -> bool:
    return (ask.kind, ask.body.get("model")) == (event.kind, event.body.get("model"))


def _moved(ask: Question, event: ev.Ask) -> Question:
    return replace(ask, link=event.link, attempt=event.attempt)


def _check_ids(before: Request, payload: Payload) -> None:
    """A client goes on from ids that it got here. Raises BadRequest."""
    ids = payload.resume_ids
    if bytes(before.ids[: len(ids)]) != ids:
        raise BadRequest(
            f"resume has {len(ids) // 4} ids that are not those of the stream, which has"
            f" {before.taken}; send the ids as they came"
        )
