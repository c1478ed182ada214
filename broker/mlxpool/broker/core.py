"""The broker's decisions: `handle(event, now) -> actions`. Pure: no I/O, no clock, no randomness.

Invariants: one terminal for each accepted id and attempt and nothing after it; `pos` without gaps;
no work for a worker that is not READY; every live request has a timer;
accepted = done + failed + cancelled + live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxpool.broker import events as ev
from mlxpool.broker import streams
from mlxpool.broker.intake import Intake
from mlxpool.broker.requests import Request, State
from mlxpool.broker.workers import Model, Worker
from mlxpool.common import wire
from mlxpool.common.errors import (
    DeadlineExceeded,
    Draining,
    ModelLoadFailed,
    PoolError,
    WorkerLost,
)
from mlxpool.common.wire import Delta, Header


class Core(Intake):
    """What workers say, what time brings, what operations ask."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Everything that follows from one event, in order."""
        self.out = self.fleet.out = []
        HANDLERS[type(event)](self, event, now)
        for link in list(self.grouped):
            self._send_group(link)
        return self.out

    def next_wake(self) -> float:
        """When `Wake` is due at the latest; infinity when nothing waits for a time."""
        return self.timers.next()

    def on_deltas(self, event: ev.WorkerDeltas, now: float) -> None:
        for row in event.rows:
            worker = self.fleet.worker(event.epoch)
            if worker is None or (row.id, row.attempt) not in worker.places:
                self.counters.fenced += 1
                continue
            if row.end is not None:
                worker.places.discard((row.id, row.attempt))
                worker.served += 1
            request = self.requests.get(row.id)
            if request is not None and (request.worker, request.run) == (
                event.epoch,
                row.attempt,
            ):
                self._take(request, worker, row, now)

    def _take(self, request: Request, worker: Worker, row: Delta, now: float) -> None:
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
            self._flush(request, now)
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
        elif (model.queue or model.asks) and not self.stopping:
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
        """Its streams end now; its places stay taken as long as it lives."""
        error = WorkerLost(
            f"the worker {worker.slot} ended: {cause}; send the request again",
            details={"worker": worker.slot, "cause": cause},
        )
        for request_id, attempt in sorted(worker.places):
            request = self.requests.get(request_id)
            if request is not None and (request.worker, request.run) == (worker.epoch, attempt):
                self._fail(request, error, now)
        for request_id, (link, attempt, epoch) in list(self.asked.items()):
            if epoch == worker.epoch:
                del self.asked[request_id]
                self._reply(link, wire.ERROR, request_id, attempt, error.body())

    def on_cancel(self, event: ev.Cancel, now: float) -> None:
        fate = self.fate(event.id, event.owner)
        if event.link is not None:
            self._heard(event.link, now)
            header = Header(wire.FATE, event.id, self.boot, 0, fate["pos"])
            self._emit(event.link, header, fate)
        request = self.requests.get(event.id)
        if request is not None and event.owner in (None, request.owner):
            self._cancel(request, now)

    def on_wake(self, event: ev.Wake, now: float) -> None:
        for key in self.timers.due(now):
            if isinstance(key, bytes):
                self._request_timer(key, now)
            elif key == "tombstones":
                self._forget(now)
            elif isinstance(key, tuple) and key[0] in ("model", "restart"):
                self._model_timer(self.fleet.models[key[1]], now)
            elif isinstance(key, tuple):
                self._link_timer(key[1], now)

    def _request_timer(self, request_id: bytes, now: float) -> None:
        request = self.requests.get(request_id)
        if request is None:  # an earlier timer of the same wake ended it
            return
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

    def on_heard(self, event: ev.Heard, now: float) -> None:
        self._heard(event.link, now)

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

    def on_load(self, event: ev.Load, now: float) -> None:
        if self.stopping:
            return
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
