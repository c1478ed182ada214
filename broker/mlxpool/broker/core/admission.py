"""Requests come: they are checked, and queued."""

from __future__ import annotations

import math

from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.dispatcher import RETRY_QUEUE_MS
from mlxpool.broker.interface import events as ev
from mlxpool.broker.requests.fair_queue import tokens_of
from mlxpool.broker.requests.payload import Payload
from mlxpool.broker.requests.request import Request, State, Tombstone
from mlxpool.broker.security.quotas import milliseconds
from mlxpool.broker.workers.worker import Model
from mlxpool.common.errors import (
    BadRequest,
    DuplicateId,
    OverQuota,
    Poisoned,
    PoolError,
    QueueFull,
)
from mlxpool.common.protocol import kinds, to_broker
from mlxpool.common.protocol.frames import Header

RESUMED = 4  # times the bounds of a queue, for streams that another broker had accepted


class Intake(Calls):
    """What is wrong, too much or known already is answered here; the rest waits in its queue."""

    def on_generate(self, event: ev.Generate, now: float) -> None:
        self._heard(event.link, now)
        digest = to_broker.request_digest(event.body, event.blobs)
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
            self._answer(event, kinds.ERROR, error.body())
            return
        self.links[before.link].ids.discard(before.id)
        before.link, before.attempt = event.link, event.attempt
        self.links[event.link].ids.add(before.id)
        before.unread.clear()
        self._fail(before, error, now)

    def _duplicate(self, event: ev.Generate, why: str) -> None:
        self.counters.rejected[DuplicateId.code] += 1
        error = DuplicateId(f"the id {event.id.hex()} {why}; make a new id for each request")
        header = Header(kinds.ERROR, None, self.boot, event.attempt)
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
        self._reply(link, kinds.ACCEPTED, request.id, request.attempt, body)


def _seed(payload: Payload, entropy: int) -> int:
    """The request's own, else the one that its earlier sending was given, else a new one."""
    if payload.options.seed >= 0:
        return payload.options.seed
    return entropy if payload.resume is None else payload.resume.get("seed", entropy)


def _check_ids(before: Request, payload: Payload) -> None:
    """A client goes on from ids that it got here. Raises BadRequest."""
    ids = payload.resume_ids
    if bytes(before.ids[: len(ids)]) != ids:
        raise BadRequest(
            f"resume has {len(ids) // 4} ids that are not those of the stream, which has"
            f" {before.taken}; send the ids as they came"
        )
