"""What clients send: read, paid for, made an event of, or answered with what is wrong with it."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from mlxpool.broker.admin.commands import COMMANDS
from mlxpool.broker.edge.peers import Peer
from mlxpool.broker.interface import client_events
from mlxpool.broker.interface import events as ev
from mlxpool.broker.requests.quotas import Rates, milliseconds
from mlxpool.common.errors import BadRequest, OverQuota, PoolError
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header, Message

if TYPE_CHECKING:
    from mlxpool.broker.edge.loop import Broker

SMALL = 1024  # bytes of a message that only keeps streams going: ping, ack, cancel


class FromClients:
    """Part of the edge: owned by the broker's one thread."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.bytes = Rates()  # that clients send

    def take(self, peer: Peer, parts: list[bytes], now: float) -> None:
        if not peer.admitted:
            self.broker.turn_away(self.broker.front, peer)
            return
        if self.broker.config.quota_bytes and not self._affords(peer, parts, now):
            return
        try:
            message = frames.decode(parts)
            event = self._event(peer, message)
        except frames.Garbage as garbage:
            self.broker.core.state.counters.bad_frames += 1
            self._complain(peer, garbage.error, garbage.about, None, now)
        except PoolError as error:
            self.broker.core.state.counters.bad_frames += 1
            self._complain(peer, error, message.header.id, message, now)
        else:
            if isinstance(event, ev.ListModels):
                self.broker.library.after_look(partial(self.broker.perform, event), now)
            else:
                self.broker.perform(event, now)

    def _affords(self, peer: Peer, parts: list[bytes], now: float) -> bool:
        """Whether it may send so many bytes; if not, that was answered. Nothing but the header of
        a message that is too much is decoded. What only keeps streams going passes for long.
        """
        limit, size = self.broker.config.quota_bytes, sum(map(len, parts))
        wait, broke = (ask(peer.owner, limit, now) for ask in (self.bytes.wait, self.bytes.broke))
        self.bytes.spend(peer.owner, size, limit, now)
        if not wait or (size <= SMALL and not broke):
            return True
        if not broke:
            error = OverQuota(
                f"{peer.owner} sends more than {limit} bytes a second (quota_bytes), {size} more"
                " are too many now; send less, or wait",
                details={"owner": peer.owner, "value": size, "bound": limit},
                retry_after_ms=milliseconds(wait),
            )
            header = frames.header_of(parts)
            message = None if header is None else Message(header, {}, ())
            self.broker.core.state.counters.rejected[error.code] += 1
            self._complain(peer, error, None if header is None else header.id, message, now)
        return False

    def _event(self, peer: Peer, message: Message) -> ev.Event:
        header, body, kind, link = message.header, message.body, message.kind, peer.number
        if kind == kinds.ACK:
            return client_events.ack(link, body)
        if kind == kinds.PING:
            return ev.Ping(link, header.id or bytes(frames.ID_BYTES), header.attempt)
        if header.id is None:
            raise BadRequest(f"{kind!r:.40} needs an id of {frames.ID_BYTES} bytes")
        if kind == kinds.GENERATE:
            entropy = secrets.randbits(63)
            return client_events.generate(link, peer.owner, header, body, message.blobs, entropy)
        if kind == kinds.CANCEL:
            return ev.Cancel(link, peer.owner, header.id)
        if kind == kinds.MODELS:
            return ev.ListModels(link, header.id, header.attempt)
        if kind in (kinds.TOKENIZE, kinds.DETOKENIZE):
            return client_events.tokenizer_call(link, header, body, message.blobs)
        if kind in COMMANDS:
            raise BadRequest(
                f"{kind!r} is an operator's command, and this endpoint is for clients: use the"
                " broker's run directory (--run-dir), or an endpoint of `admin` with an admin's key"
                " (`mlxpool serve --admin ENDPOINT` opens one)"
            )
        raise BadRequest(f"a client cannot send the kind {kind!r:.40}")

    def _complain(
        self,
        peer: Peer,
        error: PoolError,
        about: bytes | None,
        message: Message | None,
        now: float,
    ) -> None:
        """Say what is wrong; it ends no stream that is live."""
        self.broker.perform(ev.Heard(peer.number), now)
        live = about is None or about in self.broker.core.state.requests
        attempt = message.header.attempt if message is not None else 0
        header = Header(kinds.ERROR, None if live else about, self.broker.boot, attempt)
        body = {**error.body(), "about": about}
        self.broker.front.send(peer.number, frames.encode(header, body))
