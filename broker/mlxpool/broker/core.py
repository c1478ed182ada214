"""The broker's decisions: `handle(event, now) -> actions`. Pure: no I/O, no clock, no randomness.

Invariants: one terminal for each accepted id and attempt and nothing after it; `pos` without gaps;
no work for a worker that is not READY; every live request has a timer;
accepted = done + failed + cancelled + live.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpool.broker import events as ev
from mlxpool.broker import streams
from mlxpool.broker.fleet import Fleet
from mlxpool.broker.policy import choose_worker, next_request
from mlxpool.broker.requests import Payload, Request, State, Tombstone
from mlxpool.broker.stats import Counters
from mlxpool.broker.timers import Timers
from mlxpool.broker.workers import Model, Worker
from mlxpool.common import wire
from mlxpool.common.config import PoolConfig
from mlxpool.common.errors import (
    BadRequest,
    DeadlineExceeded,
    Draining,
    DuplicateId,
    ModelLoadFailed,
    PoolError,
    QueueFull,
    SlowConsumer,
    WorkerLost,
)
from mlxpool.common.wire import Delta, Header

TOMBSTONES = 10_000
TOMBSTONE_LIFE = 600.0  # seconds
RETRY_QUEUE_MS = 1000


@dataclass(eq=False, slots=True)
class Link:
    """A client's connection, as long as it has live streams or was heard of lately."""

    heard_at: float
    ids: set[bytes] = field(default_factory=set)
    lost: bool = False


class Core:
    """Owns every request. `boot` is the random number of this broker process."""

    def __init__(self, config: PoolConfig, boot: int) -> None:
        self.config = config
        self.boot = boot
        self.timers = Timers()
        self.fleet = Fleet(config, boot, self.timers)
        self.requests: dict[bytes, Request] = {}
        self.tombstones: OrderedDict[bytes, Tombstone] = OrderedDict()
        self.links: dict[int, Link] = {}
        self.asked: dict[bytes, tuple[int, int, int]] = {}  # id -> link, attempt, worker epoch
        self.counters = Counters()
        self.stopping = False
        self.out: list[ev.Action] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Everything that follows from one event, in order."""
        self.out = self.fleet.out = []
        HANDLERS[type(event)](self, event, now)
        return self.out

    def next_wake(self) -> float:
        """When `Wake` is due at the latest; infinity when nothing waits for a time."""
        return self.timers.next()

    # ---- requests come -------------------------------------------------------------------------

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
            self.counters.rejected[error.code] += 1
            self._answer(event, wire.ERROR, error.body())

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
            self._accepted(known)
        return False

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
        self._accepted(request)
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
        seed = payload.options.seed if payload.options.seed >= 0 else event.entropy
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

    def _accepted(self, request: Request) -> None:
        body = {
            "boot": self.boot,
            "link": request.link,
            "queue_position": self._position(request),
            "seed": request.seed,
        }
        self._send(request, wire.ACCEPTED, body)

    def _position(self, request: Request) -> int:
        queue = self.fleet.models[request.payload.model].queue
        return queue.index(request) if request in queue else 0

    # ---- the queue -----------------------------------------------------------------------------

    def _enqueue(self, model: Model, request: Request) -> None:
        model.queue.append(request)
        model.queue_bytes += request.payload.size

    def _unqueue(self, request: Request) -> None:
        if request.state is State.QUEUED:
            model = self.fleet.models[request.payload.model]
            model.queue.remove(request)
            model.queue_bytes -= request.payload.size

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
        request.worker, request.assigned_at = worker.epoch, now
        request.tries += 1
        worker.works_sent += 1
        worker.places.add((request.id, request.tries))
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
        self.fleet.tell(worker, wire.WORK, body, id=request.id, attempt=request.tries, blobs=blobs)

    # ---- what workers say ----------------------------------------------------------------------

    def on_deltas(self, event: ev.WorkerDeltas, now: float) -> None:
        grouped: dict[int, list[Delta]] = {}
        for row in event.rows:
            worker = self.fleet.worker(event.epoch)
            if worker is None or (row.id, row.attempt) not in worker.places:
                self.counters.fenced += 1
                continue
            if row.end is not None:
                worker.places.discard((row.id, row.attempt))
                worker.served += 1
            request = self.requests.get(row.id)
            if request is not None and (request.worker, request.tries) == (
                event.epoch,
                row.attempt,
            ):
                self._take(request, worker, row, grouped, now)
        for link, deltas in grouped.items():
            body, blob = wire.pack_deltas(deltas)
            self._emit(link, Header(wire.DELTAS, None, self.boot), body, (blob,))

    def _take(
        self,
        request: Request,
        worker: Worker,
        row: Delta,
        grouped: dict[int, list[Delta]],
        now: float,
    ) -> None:
        if row.pos != request.taken:
            why = f"it sent position {row.pos} where {request.taken} was due"
            self.fleet.condemn(worker, why)
            self._lose_places(worker, why, now)
            return
        if row.facts is not None:
            request.prompt_tokens = int(row.facts.get("prompt_tokens", 0))
        if row.count or row.text:
            if request.state is State.ASSIGNED:
                request.first_at = now
            request.move("stream")
            request.taken += row.count
            self.counters.tokens += row.count
            request.unread_bytes += streams.append(request.unread, row)
        if row.end is None:
            self._flush(request, grouped, now)
        elif "code" in row.end:
            self._fail_body(request, row.end, now)
        else:
            self._finish(request, row.end, now)

    def on_beat(self, event: ev.WorkerBeat, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is None:
            self.counters.fenced += 1
            return
        worker.beat, worker.beat_at = event.body, now
        self.fleet.tell(worker, wire.HEARD, {})

    def on_credit(self, event: ev.WorkerCredit, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is None:
            self.counters.fenced += 1
            return
        self.fleet.credit(worker, event.body, now)
        model = self.fleet.models[worker.model]
        self._forward_asks(model)
        self._dispatch(model, now)

    def on_hello(self, event: ev.WorkerHello, now: float) -> None:
        self.fleet.hello(event.slot, event.body, now)

    def on_bye(self, event: ev.WorkerBye, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is not None:
            worker.error = event.error

    def on_spawned(self, event: ev.Spawned, now: float) -> None:
        worker = self.fleet.slots[event.slot].worker
        if worker is not None:
            worker.pid = event.pid

    def on_spawn_failed(self, event: ev.SpawnFailed, now: float) -> None:
        worker = self.fleet.slots[event.slot].worker
        if worker is not None:
            worker.error = ModelLoadFailed(event.message).body()
            self._exited(event.slot, event.message, now)

    def on_exited(self, event: ev.WorkerExited, now: float) -> None:
        self._exited(event.slot, event.cause, now)

    def _exited(self, slot_name: str, cause: str, now: float) -> None:
        slot = self.fleet.slots[slot_name]
        worker = self.fleet.exited(slot, cause, now)
        if worker is None:
            return
        self._lose_places(worker, cause, now)
        model = self.fleet.models[slot.model]
        error = self.fleet.verdict(model, now)
        if error is not None:
            self._give_up(model, error, now)
        elif model.queue and not self.stopping:
            self.fleet.want(model, now)
        self._dispatch(model, now)

    def _give_up(self, model: Model, error: PoolError, now: float) -> None:
        """The model cannot be had for now: everything that waits for it learns why."""
        model.wanted = False
        for request in list(model.queue):
            self._fail(request, error, now)
        for request_id, link, attempt, *_ in model.asks:
            self._reply(link, wire.ERROR, request_id, attempt, error.body())
        model.asks.clear()

    def _lose_places(self, worker: Worker, cause: str, now: float) -> None:
        places, worker.places = worker.places, set()
        error = WorkerLost(
            f"the worker {worker.slot} ended: {cause}; send the request again",
            details={"worker": worker.slot, "cause": cause},
        )
        for request_id, attempt in sorted(places):
            request = self.requests.get(request_id)
            if request is not None and (request.worker, request.tries) == (worker.epoch, attempt):
                self._fail(request, error, now)
        for request_id, (link, attempt, epoch) in list(self.asked.items()):
            if epoch == worker.epoch:
                del self.asked[request_id]
                self._reply(link, wire.ERROR, request_id, attempt, error.body())

    # ---- what clients say ----------------------------------------------------------------------

    def on_cancel(self, event: ev.Cancel, now: float) -> None:
        fate = self.fate(event.id, event.owner)
        if event.link is not None:
            self._heard(event.link, now)
            header = Header(wire.FATE, event.id, self.boot, 0, fate["pos"])
            self._emit(event.link, header, fate)
        request = self.requests.get(event.id)
        if request is not None and event.owner in (None, request.owner):
            self._cancel(request, now)

    def fate(self, request_id: bytes, owner: str | None = None) -> dict[str, Any]:
        """Where an id stands, as far as this owner may know; `owner` None may know everything."""
        live, tomb = self.requests.get(request_id), self.tombstones.get(request_id)
        if live is not None and owner in (None, live.owner):
            return {"state": live.state.value, "pos": live.sent}
        if tomb is not None and owner in (None, tomb.owner):
            return {"state": tomb.state.value, "pos": tomb.pos}
        return {"state": "unknown", "pos": 0}

    def on_ack(self, event: ev.Ack, now: float) -> None:
        self._heard(event.link, now)
        try:
            pairs = _pairs(event.have)
            for request_id, count in pairs:
                self._acknowledge(event.link, request_id, count, now)
        except BadRequest as error:
            header = Header(wire.ERROR, None, self.boot)
            self.out.append(ev.ToClient(event.link, header, {**error.body(), "about": None}))

    def _acknowledge(self, link: int, request_id: bytes, count: int, now: float) -> None:
        request = self.requests.get(request_id)
        if request is None or request.link != link:
            return  # it ended, or went on elsewhere, while the ack was under way
        if not request.acked <= count <= request.sent:
            raise BadRequest(
                f"ack of {count} ids of {request_id.hex()}: {request.acked} were acknowledged and"
                f" {request.sent} sent"
            )
        if count > request.acked:
            request.acked, request.shut_since = count, 0.0
            self._flush(request, None, now)

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
            self._check_asks(model)
        except PoolError as error:
            self._answer(event, wire.ERROR, error.body())
            return
        model.asks.append(
            (event.id, event.link, event.attempt, event.kind, event.body, event.blobs)
        )
        self.fleet.want(model, now)
        self._forward_asks(model)
        self.fleet.settle(model, now)

    def _check_asks(self, model: Model) -> None:
        limit = self.config.queue_limit
        if len(model.asks) >= limit:
            raise QueueFull(f"{limit} calls wait for model {model.name!r} already")

    def _forward_asks(self, model: Model) -> None:
        ready = [w for w in model.workers if w.state.value == "ready"]
        if not ready:
            return
        for request_id, link, attempt, kind, body, blobs in model.asks:
            self.asked[request_id] = (link, attempt, ready[0].epoch)
            self.fleet.tell(ready[0], kind, body, id=request_id, blobs=blobs)
        model.asks.clear()

    def on_tokens(self, event: ev.WorkerTokens, now: float) -> None:
        asked = self.asked.pop(event.id, None)
        if asked is not None:
            kind = wire.ERROR if "code" in event.body else wire.TOKENS
            self._reply(asked[0], kind, event.id, asked[1], event.body, event.blobs)

    # ---- delivery ------------------------------------------------------------------------------

    def _flush(self, request: Request, grouped: dict[int, list[Delta]] | None, now: float) -> None:
        """Send what waits, as far as the client's window allows."""
        while request.unread and request.sent - request.acked < request.payload.window:
            self._send_chunk(request, request.unread.popleft(), grouped)
        if not request.unread:
            request.shut_since = 0.0
        elif request.shut_since == 0.0:
            request.shut_since = now
        if request.unread_bytes > self.config.unread_bytes:
            self._too_slow(request, f"{request.unread_bytes} bytes were not read", now)
            return
        self._set_timer(request)

    def _send_chunk(
        self, request: Request, chunk: streams.Chunk, grouped: dict[int, list[Delta]] | None
    ) -> None:
        request.sent += chunk.count
        request.unread_bytes -= chunk.size
        if request.payload.batch and grouped is not None:
            row = Delta(
                request.id,
                request.attempt,
                chunk.pos,
                chunk.text,
                chunk.ids,
                chunk.logprobs or None,
                chunk.facts,
            )
            grouped.setdefault(request.link, []).append(row)
            return
        header = Header(wire.DELTA, request.id, self.boot, request.attempt, chunk.pos)
        self._emit(request.link, header, streams.body_of(chunk), (chunk.ids,))

    def _too_slow(self, request: Request, why: str, now: float) -> None:
        request.unread.clear()
        error = SlowConsumer(
            f"{why} (limits: {self.config.unread_bytes} bytes, {self.config.ack_grace:g} s without"
            f" an ack behind a window of {request.payload.window} ids); read and ack sooner"
        )
        self._fail(request, error, now)

    # ---- ends ----------------------------------------------------------------------------------

    def _finish(self, request: Request, end: Mapping[str, Any], now: float) -> None:
        event = "cancel" if end.get("reason") == "cancelled" else "finish"
        timings = {
            "queue": _ms(request.assigned_at - request.accepted_at),
            **_map(end.get("timings_ms")),
            "total": _ms(now - request.accepted_at),
        }
        if request.first_at:
            timings["first_token"] = _ms(request.first_at - request.accepted_at)
        body = {
            "text": end.get("text", ""),
            "reason": end.get("reason", "stop"),
            "usage": _map(end.get("usage")),
            "timings_ms": timings,
            "attempts": request.tries,
        }
        self._end(request, event, wire.DONE, body, now)

    def _cancel(self, request: Request, now: float) -> None:
        body = {
            "text": "",
            "reason": "cancelled",
            "usage": {
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": 0,
                "completion_tokens": request.taken,
            },
            "timings_ms": {"total": _ms(now - request.accepted_at)},
            "attempts": request.tries,
        }
        self._end(request, "cancel", wire.DONE, body, now)

    def _fail(self, request: Request, error: PoolError, now: float) -> None:
        self._fail_body(request, error.body(), now)

    def _fail_body(self, request: Request, body: Mapping[str, Any], now: float) -> None:
        self.counters.failures[str(body.get("code"))] += 1
        self._end(request, "fail", wire.ERROR, body, now)

    def _end(
        self, request: Request, event: str, kind: str, body: Mapping[str, Any], now: float
    ) -> None:
        """The one place where a stream ends: its tail and its terminal pass every bound."""
        self._unqueue(request)
        worker = self._leave_worker(request)
        request.move(event)
        while request.unread:
            self._send_chunk(request, request.unread.popleft(), None)
        self._send(request, kind, body, pos=request.sent)
        del self.requests[request.id]
        self.timers.clear(request.id)
        self.links[request.link].ids.discard(request.id)
        self._bury(request, now)
        self.counters.end(request, now)
        self.out.append(ev.Note("info", "request", _record(request, kind, body, worker, now)))
        self.fleet.settle(self.fleet.models[request.payload.model], now)

    def _leave_worker(self, request: Request) -> str:
        """Stop the run, if a worker still has one; its place stays taken until confirmed."""
        worker = self.fleet.worker(request.worker)
        if worker is None:
            return ""
        if (request.id, request.tries) in worker.places:
            self.fleet.tell(worker, wire.CANCEL, {}, id=request.id, attempt=request.tries)
        return worker.slot

    def _bury(self, request: Request, now: float) -> None:
        self.tombstones[request.id] = Tombstone(
            request.owner,
            request.digest,
            request.attempt,
            request.state,
            request.sent,
            now + TOMBSTONE_LIFE,
        )
        self.timers.set("tombstones", next(iter(self.tombstones.values())).until)
        if len(self.tombstones) > TOMBSTONES:
            self.tombstones.popitem(last=False)

    # ---- time and links ------------------------------------------------------------------------

    def on_wake(self, event: ev.Wake, now: float) -> None:
        for key in self.timers.due(now):
            if isinstance(key, bytes):
                self._request_timer(self.requests[key], now)
            elif key == "tombstones":
                self._forget(now)
            elif isinstance(key, tuple) and key[0] == "model":
                self._model_timer(self.fleet.models[key[1]], now)
            elif isinstance(key, tuple):
                self._link_timer(key[1], now)

    def _set_timer(self, request: Request) -> None:
        at = request.deadline
        if request.state is State.QUEUED:
            at = min(at, request.queue_deadline)
        if request.shut_since:
            at = min(at, request.shut_since + self.config.ack_grace)
        self.timers.set(request.id, at)

    def _request_timer(self, request: Request, now: float) -> None:
        waited = now - request.accepted_at
        if now >= request.deadline:
            limit = request.deadline - request.accepted_at
            self._fail(
                request,
                DeadlineExceeded(
                    f"not finished after {limit:.3f} s (deadline_ms), {request.taken} tokens done"
                ),
                now,
            )
        elif request.state is State.QUEUED and now >= request.queue_deadline:
            self._fail(
                request,
                DeadlineExceeded(f"no worker was free after {waited:.3f} s (queue_ms)"),
                now,
            )
        elif request.shut_since and now >= request.shut_since + self.config.ack_grace:
            self._too_slow(request, f"no ack for {now - request.shut_since:.0f} s", now)
        else:
            self._set_timer(request)

    def _model_timer(self, model: Model, now: float) -> None:
        if not self.stopping:
            self.fleet.timer(model, now)

    def _forget(self, now: float) -> None:
        while self.tombstones and next(iter(self.tombstones.values())).until <= now:
            self.tombstones.popitem(last=False)
        if self.tombstones:
            self.timers.set("tombstones", next(iter(self.tombstones.values())).until)

    def on_heard(self, event: ev.Heard, now: float) -> None:
        self._heard(event.link, now)

    def _heard(self, link: int, now: float) -> None:
        known = self.links.get(link)
        if known is None:
            self.links[link] = Link(now)
            self._watch_link(link, now)
        else:
            known.heard_at = now

    def _watch_link(self, link: int, now: float) -> None:
        self.timers.set(("link", link), now + self.config.client_grace)

    def _link_timer(self, number: int, now: float) -> None:
        link = self.links.get(number)
        if link is None:
            return
        silent_until = link.heard_at + self.config.client_grace
        if now < silent_until:
            self.timers.set(("link", number), silent_until)
            return
        for request_id in sorted(link.ids):
            self._cancel(self.requests[request_id], now)
        del self.links[number]

    def on_link_lost(self, event: ev.LinkLost, now: float) -> None:
        link = self.links.get(event.link)
        if link is not None and not link.lost:
            link.lost = True
            self.counters.links_lost += 1

    # ---- operations ----------------------------------------------------------------------------

    def on_load(self, event: ev.Load, now: float) -> None:
        model = self.fleet.models[event.model]
        model.retry_at, model.failures = 0.0, 0
        self.fleet.want(model, now)

    def on_unload(self, event: ev.Unload, now: float) -> None:
        model = self.fleet.models[event.model]
        for worker in model.workers:
            self._lose_places(worker, "unloaded by the operator", now)
        self.fleet.unload(model, "unloaded by the operator")

    def on_shutdown(self, event: ev.Shutdown, now: float) -> None:
        self.stopping = True
        error = Draining("the broker is going down; send the request again")
        for request in list(self.requests.values()):
            self._fail(request, error, now)
        for model in self.fleet.models.values():
            self._give_up(model, error, now)
            self.fleet.unload(model, "the broker is going down")

    # ---- sending -------------------------------------------------------------------------------

    def _emit(
        self, link: int, header: Header, body: Mapping[str, Any], blobs: tuple[bytes, ...] = ()
    ) -> None:
        known = self.links.get(link)
        if known is None or not known.lost:
            self.out.append(ev.ToClient(link, header, body, blobs))

    def _send(self, request: Request, kind: str, body: Mapping[str, Any], pos: int = 0) -> None:
        self._emit(request.link, Header(kind, request.id, self.boot, request.attempt, pos), body)

    def _reply(
        self,
        link: int,
        kind: str,
        id: bytes,
        attempt: int,
        body: Mapping[str, Any],
        blobs: tuple[bytes, ...] = (),
    ) -> None:
        self._emit(link, Header(kind, id, self.boot, attempt), body, blobs)

    def _answer(self, event: ev.Generate | ev.Ask, kind: str, body: Mapping[str, Any]) -> None:
        self._reply(event.link, kind, event.id, event.attempt, body)


def _pairs(have: Any) -> list[tuple[bytes, int]]:
    if not isinstance(have, list):
        raise BadRequest("ack: have must be a list of [id, ids read]")
    for pair in have:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], bytes)
            and isinstance(pair[1], int)
        ):
            raise BadRequest("ack: have must be a list of [id, ids read]")
    return [(pair[0], pair[1]) for pair in have]


def _map(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)


def _record(
    request: Request, kind: str, body: Mapping[str, Any], worker: str, now: float
) -> dict[str, Any]:
    """The log line of a finished request: figures only, never its text."""
    return {
        "id": request.id.hex(),
        "model": request.payload.model,
        "owner": request.owner,
        "worker": worker,
        "outcome": body.get("reason") if kind == wire.DONE else body.get("code"),
        "prompt_tokens": request.prompt_tokens,
        "tokens": request.taken,
        "attempts": request.tries,
        "queue_ms": _ms((request.assigned_at or now) - request.accepted_at),
        "first_token_ms": _ms(request.first_at - request.accepted_at) if request.first_at else None,
        "total_ms": _ms(now - request.accepted_at),
    }


HANDLERS: dict[type, Callable[[Core, Any, float], None]] = {
    ev.Generate: Core.on_generate,
    ev.Cancel: Core.on_cancel,
    ev.Ack: Core.on_ack,
    ev.Ask: Core.on_ask,
    ev.Heard: Core.on_heard,
    ev.LinkLost: Core.on_link_lost,
    ev.Spawned: Core.on_spawned,
    ev.SpawnFailed: Core.on_spawn_failed,
    ev.WorkerHello: Core.on_hello,
    ev.WorkerDeltas: Core.on_deltas,
    ev.WorkerBeat: Core.on_beat,
    ev.WorkerCredit: Core.on_credit,
    ev.WorkerTokens: Core.on_tokens,
    ev.WorkerBye: Core.on_bye,
    ev.WorkerExited: Core.on_exited,
    ev.Load: Core.on_load,
    ev.Unload: Core.on_unload,
    ev.Shutdown: Core.on_shutdown,
    ev.Wake: Core.on_wake,
}
