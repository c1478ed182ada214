"""The admin socket: `ps`, `stats`, `models`, `requests`, `load`, `unload`, `cancel`, `stop`. Local only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import zmq

from mlxpool.broker import events as ev
from mlxpool.broker import stats
from mlxpool.broker.peers import Peers
from mlxpool.common import wire
from mlxpool.common.errors import BadRequest, Draining, PoolError
from mlxpool.common.wire import Header, Message

if TYPE_CHECKING:
    from mlxpool.broker.edge import Broker


class Admin:
    """Answers one message with one message, of the same kind or `error`."""

    def __init__(self, broker: Broker, socket: zmq.Socket[bytes]) -> None:
        self.broker = broker
        self.socket = socket
        self.peers = Peers(socket)

    def serve(self, now: float) -> None:
        """Answer everything that waits."""
        while (received := self.peers.receive(now)) is not None:
            peer, parts = received
            request_id = None
            try:
                message = wire.decode(parts)
                request_id = message.header.id
                kind, body = message.kind, self._answer(message, now)
            except wire.Garbage as garbage:
                kind, body = wire.ERROR, garbage.error.body()
            except PoolError as error:
                kind, body = wire.ERROR, error.body()
            self.peers.send(peer.number, wire.encode(Header(kind, request_id), body))
            self.peers.forget(peer.number)

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

    def load(self, message: Message, now: float) -> Mapping[str, Any]:
        if self.broker.stopping:
            raise Draining("the broker is going down")
        model = self.broker.core.fleet.model(str(message.body.get("model")))
        self.broker.perform(ev.Load(model.name), now)
        return {"model": model.name}

    def unload(self, message: Message, now: float) -> Mapping[str, Any]:
        model = self.broker.core.fleet.model(str(message.body.get("model")))
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
