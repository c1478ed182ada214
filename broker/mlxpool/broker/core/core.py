"""The broker's decisions: `handle(event, now) -> actions`. Pure: no I/O, no clock, no randomness.

Invariants: one terminal for each accepted id and attempt and nothing after it; `pos` without gaps;
no work for a worker that is not READY; every live request has a timer;
accepted = done + failed + cancelled + live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlxpool.broker.core.token_ingest import Taking
from mlxpool.broker.interface import events as ev
from mlxpool.broker.workers.liveness import judge
from mlxpool.broker.workers.worker import FENCED, TRANSITIONS, WorkerState
from mlxpool.common.errors import (
    DeadlineExceeded,
    Draining,
    ModelLoadFailed,
    Unauthorized,
    WorkerLost,
    from_body,
    sendable,
)
from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.frames import Header

RETRY_DRAINED_MS = 1000  # a client may look for the next broker after this


class Core(Taking):
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

    # ---- workers -------------------------------------------------------------------------------

    def on_beat(self, event: ev.WorkerBeat, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is None:
            self.counters.fenced += 1
            return
        worker.beat, worker.beat_at = event.body, now
        self.fleet.measured(worker)
        self.fleet.tell(worker, kinds.HEARD, {})

    def on_credit(self, event: ev.WorkerCredit, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is None:
            self.counters.fenced += 1
            return
        self.fleet.credit(worker, event.body, now)
        model = self.fleet.models[worker.model]
        self._forward_asks(model)
        self._dispatch(model, now)
        self._settled(model, now)

    def on_tokens(self, event: ev.WorkerTokens, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is None or event.id not in worker.asked:
            self.counters.fenced += 1
            return
        worker.asked.discard(event.id)
        ask, _ = self.asked.pop(event.id)
        kind = kinds.ERROR if "code" in event.body else kinds.TOKENS
        self._reply(ask.link, kind, event.id, ask.attempt, event.body, event.blobs)
        self._after_drain(worker, now)
        self._settled(self.fleet.models[worker.model], now)

    def on_hello(self, event: ev.WorkerHello, now: float) -> None:
        worker = self.fleet.slots[event.slot].worker
        if worker is not None and worker.state is WorkerState.DRAINING and worker.epoch:
            self._condemn(worker, "drained", now)
        if worker is None or "hello" not in TRANSITIONS[worker.state]:
            self.counters.fenced += 1
            return
        if worker.epoch:  # its connection was lost, not its work: nobody is to blame
            self._lose(worker, "it came on a new connection", now, counts=False)
        self.fleet.hello(worker, event.body, event.token, now)
        self._go_on(worker, now)

    def on_dialled(self, event: ev.WorkerDialled, now: float) -> None:
        if self.stopping:
            return  # the next broker will hear of it
        pid = event.body.get("pid")
        self.fleet.dialled(event.slot, event.model, pid if isinstance(pid, int) else 0, now)
        self.on_hello(ev.WorkerHello(event.slot, event.body, event.token), now)

    def on_bye(self, event: ev.WorkerBye, now: float) -> None:
        worker = self.fleet.worker(event.epoch)
        if worker is not None:
            error = None if event.error is None else from_body(event.error)
            worker.error = None if error is None else error.body()
            worker.said_bye = error is None
            if error is not None and worker.ready_at:
                worker.cause = sendable(error.message) or "it cannot serve any longer"

    def on_spawned(self, event: ev.Spawned, now: float) -> None:
        worker = self.fleet.slots[event.slot].worker
        if worker is not None:
            worker.pid = event.pid

    def on_spawn_failed(self, event: ev.SpawnFailed, now: float) -> None:
        worker = self.fleet.slots[event.slot].worker
        if worker is not None:
            worker.error = ModelLoadFailed(event.message).body()
            self.on_exited(ev.WorkerExited(event.slot, event.message, own=True), now)

    def on_looked(self, event: ev.Looked, now: float) -> None:
        """The judgement: two strikes, and what has been seen of a fenced worker does not count."""
        worker = self.fleet.slots[event.slot].worker
        if worker is None or worker.state in FENCED:
            return
        worker.watch.observe(event.sample, worker.beat_at, now, event.tick)
        limit = self.fleet.models[worker.model].config.memory_limit
        welcomed = worker.epoch != 0
        verdict = judge(worker.watch, self.config, welcomed=welcomed, memory_limit=limit)
        if verdict.hung:
            self._condemn(worker, verdict.cause, now, own=verdict.own)
            return
        self.fleet.judged(worker, verdict, now)
        if worker.state is WorkerState.READY:
            self._dispatch(self.fleet.models[worker.model], now)

    def on_exited(self, event: ev.WorkerExited, now: float) -> None:
        slot = self.fleet.slots[event.slot]
        own = event.own and not (slot.worker is not None and slot.worker.said_bye)
        if own and slot.worker is not None:
            self._compare(slot.worker, event.prefill)
        worker = self.fleet.exited(slot, event.cause, now, own=own)
        if worker is None:
            return
        self._lose(worker, slot.last_exit, now, own=own, prefill=event.prefill)
        model = self.fleet.models[slot.model]
        error = self.fleet.verdict(model, now)
        if error is not None:
            self._give_up(model, lambda name: self.fleet.verdict(model, now, name) or error, now)
        elif (model.queue or model.asks or worker.replace or model.kept) and not self.drained:
            self.fleet.want(model, now)
        for other in self.fleet.starved():
            self.fleet.want(other, now)
        self._go_on(worker, now)

    # ---- clients -------------------------------------------------------------------------------

    def on_cancel(self, event: ev.Cancel, now: float) -> None:
        fate = self.fate(event.id, event.owner)
        if event.link is not None:
            self._heard(event.link, now)
            header = Header(kinds.FATE, event.id, self.boot, 0, fate["pos"])
            self._emit(event.link, header, fate)
        if event.owner is not None and self.config.quota_cancels:
            self.cancels.spend(event.owner, 1, self.config.quota_cancels, now)
        request = self.requests.get(event.id)
        if request is not None and event.owner in (None, request.owner):
            self._cancel(request, now)
            self.tombstones[event.id] = replace(self.tombstones[event.id], final=True)

    def on_revoked(self, event: ev.Revoked, now: float) -> None:
        error = Unauthorized(f"{event.owner} was revoked: nothing of it is served any more")
        for request in list(self.requests.values()):
            if request.owner == event.owner:
                self._fail(request, error, now)

    # ---- time ----------------------------------------------------------------------------------

    def on_wake(self, event: ev.Wake, now: float) -> None:
        for key in self.timers.due(now):
            if isinstance(key, bytes):
                self._request_timer(key, now)
            elif isinstance(key, tuple):
                TIMERS[key[0]](self, now, *key[1:])
            elif key == "tombstones":
                self._forget(now)
            elif key == "poisoned":
                self._forgive(now)

    def on_late(self, event: ev.Late, now: float) -> None:
        """What nobody could be heard in does not count as silence."""
        for link in self.links.values():
            link.heard_at = min(now, link.heard_at + event.seconds)
        for request in self.requests.values():
            if request.shut_since:
                request.shut_since = min(now, request.shut_since + event.seconds)

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
        elif now >= request.queue_deadline:
            why = f"no worker was free after {waited:.3f} s (queue_ms)"
            self._fail(request, DeadlineExceeded(why), now)
        elif now >= request.first_deadline:
            why = f"no token came after {waited:.3f} s (first_token_ms)"
            self._fail(request, DeadlineExceeded(why), now)
        elif request.shut_since and now >= request.shut_since + self.config.ack_grace:
            self._too_slow(request, f"no ack for {now - request.shut_since:.0f} s", now)
        else:
            self._set_timer(request)

    def _model_timer(self, now: float, name: str) -> None:
        model = self.fleet.models.get(name)  # None: it has found its twin
        if model is not None and not self.drained:
            self.fleet.timer(model, now)

    def on_heard(self, event: ev.Heard, now: float) -> None:
        self._heard(event.link, now)

    def _link_timer(self, now: float, number: int) -> None:
        link = self.links.get(number)
        if link is None:
            return
        silent_until = link.heard_at + self.config.client_grace
        if now < silent_until:
            self.timers.set(("link", number), silent_until)
            return
        if link.ids:
            # It gets no terminal and a new number: when it wakes up it sees that and sends again.
            link.lost = True
            self.out.append(ev.ForgetLink(number))
        for request_id in sorted(link.ids):
            self._cancel(self.requests[request_id], now)
        del self.links[number]

    def on_link_lost(self, event: ev.LinkLost, now: float) -> None:
        link = self.links.get(event.link)
        if link is not None and not link.lost:
            link.lost = True
            self.counters.links_lost += 1

    # ---- models --------------------------------------------------------------------------------

    def on_model_found(self, event: ev.ModelFound, now: float) -> None:
        self.fleet.add(event.name, event.config, event.place, event.need)

    def on_model_described(self, event: ev.ModelDescribed, now: float) -> None:
        self.fleet.described(event.name, event.about)

    def on_model_gone(self, event: ev.ModelGone, now: float) -> None:
        """What was accepted goes on for `grace`, as in a drain; new requests know no such model."""
        model = self.fleet.gone(event.name)
        if model is not None:
            self._drain_model(model, event.grace, now)

    def on_model_changed(self, event: ev.ModelChanged, now: float) -> None:
        """New settings hold for new workers; the old ones finish, or hand over after `grace`."""
        for worker in self.fleet.changed(event.name, event.config, event.place, event.need):
            model = self.fleet.models[worker.model]
            worker.replace = self.fleet.slots[worker.slot] in self.fleet.own_slots(model)
            self._drain_worker(worker.slot, event.grace, now)

    def on_reload(self, event: ev.Reload, now: float) -> None:
        self.config = self.fleet.config = event.config
        self.fleet.memory = event.memory

    # ---- operations ----------------------------------------------------------------------------

    def on_load(self, event: ev.Load, now: float) -> None:
        if self.stopping:
            return
        model = self.fleet.models[event.model]
        model.retry_at, model.failures, model.closed = 0.0, 0, False
        model.need = model.floor
        self.fleet.want(model, now)

    def on_unload(self, event: ev.Unload, now: float) -> None:
        model = self.fleet.models[event.model]
        for worker in model.workers:
            why = "unloaded by the operator"
            error = WorkerLost(
                f"the worker {worker.slot} ended: {why}; send the request again",
                details={"worker": worker.slot, "cause": why},
            )
            for request in self._running(worker):
                self._fail(request, error, now)
        self.fleet.unload(model, "unloaded by the operator")
        if (model.queue or model.asks) and not model.workers:  # nobody's exit will start it again
            self.fleet.want(model, now)

    def on_restart(self, event: ev.Restart, now: float) -> None:
        worker = self.fleet.slots[event.slot].worker
        if worker is None:
            self.fleet.want(self.fleet.models[self.fleet.slots[event.slot].model], now)
        else:
            worker.replace = True
            self._drain_worker(event.slot, 0.0, now)

    def on_shutdown(self, event: ev.Shutdown, now: float) -> None:
        self.stopping = self.drained = self.fleet.closing = True
        error = Draining(
            "the broker is going down; send the request again",
            retry_after_ms=None if event.final else RETRY_DRAINED_MS,
        )
        for request in list(self.requests.values()):
            self._fail(request, error, now)
        for model in self.fleet.models.values():
            for worker in model.workers:
                self._ask_again(worker, "the broker is going down")
            self._give_up(model, lambda name: error, now)
            self.fleet.unload(model, "the broker is going down")


TIMERS: dict[str, Callable[..., None]] = {
    "model": Core._model_timer,
    "restart": Core._model_timer,
    "link": Core._link_timer,
    "drain": lambda core, now, slot, epoch: core._drain_timer(slot, epoch, now),
    "drained": lambda core, now, name: core._drained_timer(name, now),
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
    ev.WorkerDialled: Core.on_dialled,
    ev.Revoked: Core.on_revoked,
    ev.WorkerDeltas: Core.on_deltas,
    ev.WorkerBeat: Core.on_beat,
    ev.WorkerCredit: Core.on_credit,
    ev.WorkerTokens: Core.on_tokens,
    ev.WorkerYield: Core.on_yield,
    ev.WorkerBye: Core.on_bye,
    ev.WorkerExited: Core.on_exited,
    ev.Looked: Core.on_looked,
    ev.Late: Core.on_late,
    ev.ModelFound: Core.on_model_found,
    ev.ModelDescribed: Core.on_model_described,
    ev.ModelGone: Core.on_model_gone,
    ev.ModelChanged: Core.on_model_changed,
    ev.Reload: Core.on_reload,
    ev.Load: Core.on_load,
    ev.Unload: Core.on_unload,
    ev.Drain: Core.on_drain,
    ev.Restart: Core.on_restart,
    ev.Shutdown: Core.on_shutdown,
    ev.Wake: Core.on_wake,
}
