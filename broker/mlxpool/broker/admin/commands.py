"""The admin socket: what operations ask, `watch`, and what changes the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxpool.broker.admin.subscriptions import MOST, Watchers
from mlxpool.broker.edge.memory_guard import cut
from mlxpool.broker.edge.peers import Peers
from mlxpool.broker.interface import events as ev
from mlxpool.broker.models import listing
from mlxpool.broker.models.model import Model
from mlxpool.broker.telemetry import broker_info, stats, top
from mlxpool.broker.workers.slot import Slot
from mlxpool.common.errors import BadRequest, Draining, Internal, PoolError, QueueFull
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header, Message

if TYPE_CHECKING:
    from mlxpool.broker.edge.loop import Broker

log = logging.getLogger("mlxpool.broker")

CHANGING = frozenset({"load", "unload", "drain", "restart", "cancel", "reload", "stop"})
MAX_GRACE_MS = 24 * 3600 * 1000
AT_ONCE = 64  # messages answered before the other sockets get their turn


class Admin:
    """Answers one message with one message, of the same kind or `error`; `watch` with many."""

    def __init__(self, broker: Broker, peers: Peers) -> None:
        self.broker = broker
        self.peers = peers
        self.socket = peers.socket
        self.watchers = Watchers(self.peers, self._picture)

    def serve(self, now: float) -> None:
        """Answer everything that waits."""
        for _ in range(AT_ONCE):
            received = self.peers.receive(now)
            if received is None:
                return
            peer, parts = received
            if not peer.admitted:
                self.broker.core.state.counters.auth_failures += 1
                self.peers.forget(peer.number)
                cut(peer.descriptor, peer.inode)
                continue
            kind, ident = _asked(parts)
            answer = partial(self._send, peer.number, parts)
            if kind == kinds.WATCH and self.watchers.takes(peer.number):
                self._guarded(partial(self.watchers.admit, peer.number, ident), now)
            elif kind == kinds.MODELS:
                self.broker.library.after_look(answer, now)
            else:
                answer(now)

    def _send(self, number: int, parts: list[bytes], now: float) -> None:
        self.peers.send(number, self._reply(parts, now))
        if number not in self.watchers:
            self.peers.forget(number)

    def tell(self, now: float) -> None:
        """Send those who watch the picture that is due."""
        self._guarded(self.watchers.serve, now)

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        try:
            step(now)
        except Exception:  # operations must not be able to end the pool
            self.broker.core.state.counters.internal_errors += 1
            log.exception("a picture failed")

    def _picture(self, now: float) -> Mapping[str, Any]:
        return top.take(self.broker.core.state, broker_info.broker(self.broker, now), now)

    def _reply(self, parts: list[bytes], now: float) -> list[bytes]:
        request_id = None
        try:
            message = frames.decode(parts)
            request_id = message.header.id
            body = self._answer(message, now)
            return frames.encode(Header(message.kind, request_id), body, max_body=frames.MAX_BLOB)
        except frames.Garbage as garbage:
            error = garbage.error
        except PoolError as refused:
            error = refused
        except Exception as bug:  # operations must not be able to end the pool
            self.broker.core.state.counters.internal_errors += 1
            error = Internal(f"the admin command failed: {bug!r:.200}")
        return frames.encode(Header(kinds.ERROR, request_id), error.body())

    def _answer(self, message: Message, now: float) -> Mapping[str, Any]:
        command = COMMANDS.get(message.kind)
        if command is None:
            raise BadRequest(
                f"unknown admin command {message.kind!r:.40}; known: {', '.join(COMMANDS)}"
            )
        if message.kind in CHANGING:
            what = {k: v for k, v in message.body.items() if k in ("model", "slot", "timeout_ms")}
            log.info("operator", extra={"command": message.kind, **what})
        return command(self, message, now)

    def ps(self, message: Message, now: float) -> Mapping[str, Any]:
        answer = stats.ps(self.broker.core.state, now)
        for row in answer["workers"]:
            dump = self.broker.supervisor.last_dump(row["slot"])
            row["last_dump"] = None if dump is None else str(dump)
        return {"broker": broker_info.broker(self.broker, now), **answer}

    def stats(self, message: Message, now: float) -> Mapping[str, Any]:
        return {
            "broker": broker_info.broker(self.broker, now),
            **stats.stats(self.broker.core.state, now),
        }

    def watch(self, message: Message, now: float) -> Mapping[str, Any]:
        """Only who is one too many comes here."""
        raise QueueFull(f"{MOST} others watch the pool already", retry_after_ms=5000)

    def models(self, message: Message, now: float) -> Mapping[str, Any]:
        return {"models": listing.rows(self.broker.core.state.registry, now)}

    def requests(self, message: Message, now: float) -> Mapping[str, Any]:
        return {"requests": stats.requests(self.broker.core.state, now)}

    def _model(self, message: Message) -> Model:
        name = message.body.get("model")
        if not isinstance(name, str):
            raise BadRequest(f"{message.kind}: model must be a name")
        return self.broker.core.state.registry.model(name)

    def load(self, message: Message, now: float) -> Mapping[str, Any]:
        self._refuse_if_ending()
        model = self._model(message)
        self.broker.perform(ev.Load(model.name), now)
        return {"model": message.body["model"]}

    def unload(self, message: Message, now: float) -> Mapping[str, Any]:
        model = self._model(message)
        self.broker.perform(ev.Unload(model.name), now)
        return {"model": message.body["model"]}

    def drain(self, message: Message, now: float) -> Mapping[str, Any]:
        """A worker (slot), a model, or the pool; `timeout_ms` is how long streams may go on."""
        slot, name = message.body.get("slot"), message.body.get("model")
        grace = self._grace(message)
        if slot is not None and name is not None:
            raise BadRequest("drain: give slot or model, not both")
        if slot is not None:
            self._drainable(self._slot(message))
        elif name is not None and not self._model(message).admits:
            raise BadRequest(f"model {name!r} is drained already; load it to open it again")
        elif name is None and not self.broker.core.state.admits:
            raise BadRequest("the pool is being drained already")
        model = None if name is None else self._model(message).name
        self.broker.perform(ev.Drain(slot, model, grace), now)
        return {"draining": slot or name or "pool", "timeout_ms": round(grace * 1000)}

    def restart(self, message: Message, now: float) -> Mapping[str, Any]:
        """Replace a slot's worker; its streams go on in the next one."""
        self._refuse_if_ending()
        slot = self._slot(message)
        if slot.worker is not None:
            self._drainable(slot)
        self.broker.perform(ev.Restart(slot.name), now)
        return {"slot": slot.name}

    def _refuse_if_ending(self) -> None:
        if not self.broker.core.state.admits:
            raise Draining("the broker is being drained or going down: nothing is started any more")

    def _drainable(self, slot: Slot) -> None:
        if slot.worker is None:
            raise BadRequest(f"{slot.name} has no worker to drain")
        if not slot.worker.allows("drain"):
            raise BadRequest(f"the worker {slot.name} is {slot.worker.state.shown} already")

    def _slot(self, message: Message) -> Slot:
        name, slots = message.body.get("slot"), self.broker.core.state.registry.slots
        if not isinstance(name, str) or name not in slots:
            known = ", ".join(list(slots)[:20])
            raise BadRequest(f"{message.kind}: there is no slot {name!r:.60}; known: {known}")
        return slots[name]

    def _grace(self, message: Message) -> float:
        value = message.body.get("timeout_ms")
        if value is None:
            return self.broker.config.drain_grace
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_GRACE_MS:
            raise BadRequest(
                f"drain: timeout_ms must be from 0 to {MAX_GRACE_MS}, got {value!r:.60}"
            )
        return value / 1000

    def reload(self, message: Message, now: float) -> Mapping[str, Any]:
        """Read models, limits and keys anew; what came of it stands in the log."""
        if not self.broker.reloader.begin():
            raise BadRequest("this broker was not started from settings that can be read again")
        return {"state": "reloading"}

    def cancel(self, message: Message, now: float) -> Mapping[str, Any]:
        if message.header.id is None:
            raise BadRequest("cancel needs the request's id")
        fate = self.broker.core.fate(message.header.id)
        self.broker.perform(ev.Cancel(None, None, message.header.id), now)
        return fate.body()

    def stop(self, message: Message, now: float) -> Mapping[str, Any]:
        self.broker.stop(now, final=True)
        return {"state": "stopping"}


def _asked(parts: list[bytes]) -> tuple[str, bytes | None]:
    """Kind and id; an empty kind for what cannot be read, which is refused where it is answered."""
    try:
        message = frames.decode(parts)
    except (frames.Garbage, PoolError):
        return "", None
    return message.kind, message.header.id


COMMANDS: dict[str, Callable[[Admin, Message, float], Mapping[str, Any]]] = {
    "ps": Admin.ps,
    "stats": Admin.stats,
    "watch": Admin.watch,
    "models": Admin.models,
    "requests": Admin.requests,
    "load": Admin.load,
    "unload": Admin.unload,
    "drain": Admin.drain,
    "restart": Admin.restart,
    "cancel": Admin.cancel,
    "reload": Admin.reload,
    "stop": Admin.stop,
}
