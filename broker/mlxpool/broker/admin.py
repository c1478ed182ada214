"""The admin socket: what operations ask, and `load`, `unload`, `cancel`, `stop`. Local only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import zmq

from mlxpool.broker import events as ev
from mlxpool.broker import stats
from mlxpool.broker.peers import Peers
from mlxpool.broker.workers import Model
from mlxpool.common import wire
from mlxpool.common.errors import BadRequest, Draining, Internal, PoolError
from mlxpool.common.wire import Header, Message

if TYPE_CHECKING:
    from mlxpool.broker.edge import Broker


AT_ONCE = 64  # messages answered before the other sockets get their turn


class Admin:
    """Answers one message with one message, of the same kind or `error`."""

    def __init__(self, broker: Broker, socket: zmq.Socket[bytes]) -> None:
        self.broker = broker
        self.socket = socket
        self.peers = Peers(socket)

    def serve(self, now: float) -> None:
        """Answer everything that waits."""
        for _ in range(AT_ONCE):
            received = self.peers.receive(now)
            if received is None:
                return
            peer, parts = received
            self.peers.send(peer.number, self._reply(parts, now))
            self.peers.forget(peer.number)

    def _reply(self, parts: list[bytes], now: float) -> list[bytes]:
        request_id = None
        try:
            message = wire.decode(parts)
            request_id = message.header.id
            body = self._answer(message, now)
            return wire.encode(Header(message.kind, request_id), body, max_body=wire.MAX_BLOB)
        except wire.Garbage as garbage:
            error = garbage.error
        except PoolError as refused:
            error = refused
        except Exception as bug:  # operations must not be able to end the pool
            self.broker.core.counters.internal_errors += 1
            error = Internal(f"the admin command failed: {bug!r:.200}")
        return wire.encode(Header(wire.ERROR, request_id), error.body())

    def _answer(self, message: Message, now: float) -> Mapping[str, Any]:
        command = COMMANDS.get(message.kind)
        if command is None:
            raise BadRequest(
                f"unknown admin command {message.kind!r:.40}; known: {', '.join(COMMANDS)}"
            )
        return command(self, message, now)

    def ps(self, message: Message, now: float) -> Mapping[str, Any]:
        return {"broker": self.broker.about(now), **stats.ps(self.broker.core, now)}

    def stats(self, message: Message, now: float) -> Mapping[str, Any]:
        return {"broker": self.broker.about(now), **stats.stats(self.broker.core, now)}

    def models(self, message: Message, now: float) -> Mapping[str, Any]:
        return {"models": self.broker.core.model_list()}

    def requests(self, message: Message, now: float) -> Mapping[str, Any]:
        return {"requests": stats.requests(self.broker.core, now)}

    def _model(self, message: Message) -> Model:
        name = message.body.get("model")
        if not isinstance(name, str):
            raise BadRequest(f"{message.kind}: model must be a name")
        return self.broker.core.fleet.model(name)

    def load(self, message: Message, now: float) -> Mapping[str, Any]:
        if self.broker.stopping:
            raise Draining("the broker is going down")
        model = self._model(message)
        self.broker.perform(ev.Load(model.name), now)
        return {"model": model.name}

    def unload(self, message: Message, now: float) -> Mapping[str, Any]:
        model = self._model(message)
        self.broker.perform(ev.Unload(model.name), now)
        return {"model": model.name}

    def cancel(self, message: Message, now: float) -> Mapping[str, Any]:
        if message.header.id is None:
            raise BadRequest("cancel needs the request's id")
        fate = self.broker.core.fate(message.header.id)
        self.broker.perform(ev.Cancel(None, None, message.header.id), now)
        return fate

    def stop(self, message: Message, now: float) -> Mapping[str, Any]:
        self.broker.stop(now)
        return {"state": "stopping"}


COMMANDS: dict[str, Callable[[Admin, Message, float], Mapping[str, Any]]] = {
    "ps": Admin.ps,
    "stats": Admin.stats,
    "models": Admin.models,
    "requests": Admin.requests,
    "load": Admin.load,
    "unload": Admin.unload,
    "cancel": Admin.cancel,
    "stop": Admin.stop,
}
