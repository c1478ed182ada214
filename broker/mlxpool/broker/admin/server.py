"""The admin socket: one answer for each command, and updates for subscribers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from mlxpool.broker.admin.commands import Commands
from mlxpool.broker.core.events import AnswerLater
from mlxpool.broker.metrics import Counters
from mlxpool.broker.transport.peers import Peers
from mlxpool.common.errors import Internal, PoolError
from mlxpool.common.protocol import admin, frames, from_client
from mlxpool.common.protocol.frames import Content, Header, Message, encoded
from mlxpool.common.protocol.kept import job_operations
from mlxpool.common.protocol.to_client import Failed

INTERVAL = 1.0  # seconds between two updates
LEAST_INTERVAL = INTERVAL / 2  # from the first update of a connection to one that all get
LEASE = 5.0  # seconds for which one request is answered
MAX_SUBSCRIBERS = 64


class Subscription(Struct, eq=False):
    """One connection; `id` is that of its newest request, `since` the time of its first."""

    id: bytes | None
    until: float
    since: float


class Subscriptions:
    """Connections that get the pool's figures once a second, until they stop asking.

    A subscriber asks again before its lease ends, so one that froze or went away costs a few
    frames. Without subscribers no snapshot is taken. Owned by the broker's thread.
    """

    def __init__(self, connections: Peers, figures: Callable[[float], Mapping[str, Any]]) -> None:
        """`figures` makes the body of an update."""
        self._connections = connections
        self._figures = figures
        self._by_number: dict[int, Subscription] = {}  # by number of the connection
        self._due = math.inf
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def accepts(self, number: int) -> bool:
        """Whether this connection may subscribe: it has done so already, or there is room."""
        return number in self._by_number or len(self._by_number) < MAX_SUBSCRIBERS

    def renew(self, number: int, request_id: bytes | None, now: float) -> None:
        """Begin or prolong a subscription; a new one gets its first update at once."""
        self._due = min(self._due, now + INTERVAL)
        known = self._by_number.get(number)
        if known is not None:
            known.id, known.until = request_id, now + LEASE
            return
        self._by_number[number] = Subscription(request_id, now + LEASE, now)
        self._send(number, self._figures(now))

    def next_wake(self) -> float:
        """When an update or the end of a lease is due; infinity without subscribers."""
        return self._due

    def send_due(self, now: float) -> None:
        """Send the update that is due to all but those who have just had their first."""
        if now < self._due:
            return
        for number in [n for n, one in self._by_number.items() if one.until <= now]:
            del self._by_number[number]
            self._connections.forget(number)
        if not self._by_number:
            self._due = math.inf
            return
        self._due = now + INTERVAL
        figures = self._figures(now)
        for number, one in list(self._by_number.items()):
            if now - one.since >= LEAST_INTERVAL:
                self._send(number, figures)

    def _send(self, number: int, figures: Mapping[str, Any]) -> None:
        """A connection with a backlog is skipped: old updates are not worth queueing."""
        if number in self._connections.full:
            return
        self._count += 1
        header = Header(admin.WATCH, self._by_number[number].id)
        body = {"seq": self._count, **figures}
        if not self._connections.send(
            number, frames.encode(header, body, max_body=frames.MAX_BLOB)
        ):
            self._by_number.pop(number, None)


log = logging.getLogger("mlxpool.broker")

AskJobs = Callable[[str, Mapping[str, Any], Callable[[Content], None], float], None]
MAX_PER_TURN = 64  # messages answered before the other sockets are read


class AdminServer:
    """A message is answered by one of the same kind or `error`; `watch` by many."""

    def __init__(
        self,
        peers: Peers,
        commands: Commands,
        figures: Callable[[float], Mapping[str, Any]],
        after_scan: AnswerLater,
        after_reload: AnswerLater,
        ask_jobs: AskJobs,
        counters: Counters,
    ) -> None:
        """`after_scan` calls its argument when the models on the disk are known.

        `after_reload` reads the settings anew, and calls its argument when they are in force.
        `ask_jobs` asks about jobs; it raises JobsOff where none are kept.
        """
        self.peers = peers
        self.subscriptions = Subscriptions(peers, figures)
        self._commands = commands
        self._after_scan = after_scan
        self._after_reload = after_reload
        self._ask_jobs = ask_jobs
        self._counters = counters

    def serve(self, now: float) -> None:
        """Answer what waits on the socket."""
        for _ in range(MAX_PER_TURN):
            received = self.peers.receive(now)
            if received is None:
                return
            peer, parts = received
            if peer.admitted:
                self._on_message(peer.number, parts, now)
            else:
                self._counters.auth_failures += 1
                self.peers.disconnect(peer)

    def _on_message(self, number: int, parts: list[bytes], now: float) -> None:
        try:
            message = frames.decode(parts)
        except frames.Garbage as garbage:
            self._send(number, encoded(Failed.of(garbage.error)))
            return
        if message.kind == admin.WATCH and self.subscriptions.accepts(number):
            self._guarded(partial(self.subscriptions.renew, number, message.header.id), now)
        elif message.kind == from_client.ListModels.kind:
            self._after_scan(partial(self._answer, number, message), now)
        elif message.kind == admin.RELOAD:
            self._after_reload(partial(self._answer, number, message), now)
        elif message.kind in job_operations.KINDS:
            self._about_jobs(number, message, now)
        else:
            self._answer(number, message, now)

    def _about_jobs(self, number: int, message: Message, now: float) -> None:
        """Have a question about jobs answered, when the store has."""
        kind, id = message.kind, message.header.id

        def answer(content: Content) -> None:
            shown = kind if not isinstance(content, Failed) else content.kind
            try:
                header = Header(shown, id)
                self._send(number, frames.encode(header, content.body(), max_body=frames.MAX_FRAME))
            except PoolError as error:
                self._send(number, encoded(Failed.of(error), id))

        try:
            if kind in job_operations.CHANGING:
                log.info("operator", extra={"command": kind, **_named(message.body)})
            self._ask_jobs(kind, message.body, answer, now)
        except PoolError as refused:
            self._send(number, encoded(Failed.of(refused), id))

    def _answer(self, number: int, message: Message, now: float) -> None:
        id = message.header.id
        try:
            body = self._commands.handle(message, now)
            parts = frames.encode(Header(message.kind, id), body, max_body=frames.MAX_BLOB)
        except PoolError as refused:
            parts = encoded(Failed.of(refused), id)
        except Exception as bug:  # a bug in a command must not end the pool
            self._counters.internal_errors += 1
            parts = encoded(Failed.of(Internal(f"the admin command failed: {bug!r:.200}")), id)
        self._send(number, parts)

    def _send(self, number: int, parts: list[bytes]) -> None:
        self.peers.send(number, parts)
        if number not in self.subscriptions:
            self.peers.forget(number)

    def send_updates(self, now: float) -> None:
        """Send subscribers the update that is due."""
        self._guarded(self.subscriptions.send_due, now)

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        try:
            step(now)
        except Exception:  # a bug in the figures must not end the pool
            self._counters.internal_errors += 1
            log.exception("a picture failed")


def _named(body: Mapping[str, Any]) -> dict[str, str]:
    """Which job a command names, for the log."""
    id = body.get("job")
    return {"job": id.hex() if isinstance(id, bytes) else repr(body.get("key"))[:80]}
