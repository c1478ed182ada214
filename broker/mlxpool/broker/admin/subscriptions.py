"""Connections that get the pool's figures once a second, until their lease ends.

A subscriber renews its lease before the lease ends. A subscriber that froze or left therefore gets
only a few more frames. Without subscribers no snapshot is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from mlxpool.broker.transport.peers import Peers
from mlxpool.common.protocol import admin, frames
from mlxpool.common.protocol.frames import Header

INTERVAL = 1.0  # seconds between two updates
LEAST_INTERVAL = INTERVAL / 2  # least seconds from a connection's first update to the next
LEASE = 5.0  # seconds of a lease: one request brings updates for this time
MAX_SUBSCRIBERS = 64


class Subscription(Struct, eq=False):
    """A connection's subscription to updates.

    `id`: the id of the connection's newest request for updates. `until`: the end of the
    subscription's lease. `since`: the time of the first request.
    """

    id: bytes | None
    until: float
    since: float


class Subscriptions:
    """The subscriptions of all connections. Owned by the broker's thread."""

    def __init__(self, connections: Peers, figures: Callable[[float], Mapping[str, Any]]) -> None:
        """`figures` returns the body of an update."""
        self._connections = connections
        self._figures = figures
        self._by_number: dict[int, Subscription] = {}  # by the number of the connection
        self._due = math.inf
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def accepts(self, number: int) -> bool:
        """Returns whether a connection is subscribed already, or may subscribe now."""
        return number in self._by_number or len(self._by_number) < MAX_SUBSCRIBERS

    def renew(self, number: int, request_id: bytes | None, now: float) -> None:
        """Begins or renews a subscription. A new subscription gets its first update immediately."""
        self._due = min(self._due, now + INTERVAL)
        known = self._by_number.get(number)
        if known is not None:
            known.id, known.until = request_id, now + LEASE
            return
        self._by_number[number] = Subscription(request_id, now + LEASE, now)
        self._send(number, self._figures(now))

    def next_wake(self) -> float:
        """Returns the time of the next update or end of a lease; infinity if nobody subscribes."""
        return self._due

    def send_due(self, now: float) -> None:
        """Sends an update, if it is due, to all subscribers.

        Subscribers that have just received their first update are skipped.
        """
        if now < self._due:
            return
        for number in [
            n for n, subscription in self._by_number.items() if subscription.until <= now
        ]:
            del self._by_number[number]
            self._connections.forget(number)
        if not self._by_number:
            self._due = math.inf
            return
        self._due = now + INTERVAL
        figures = self._figures(now)
        for number, subscription in list(self._by_number.items()):
            if now - subscription.since >= LEAST_INTERVAL:
                self._send(number, figures)

    def _send(self, number: int, figures: Mapping[str, Any]) -> None:
        """Sends an update to a connection.

        A connection with a backlog gets no update, because old updates are useless.
        """
        if number in self._connections.full:
            return
        self._count += 1
        header = Header(admin.WATCH, self._by_number[number].id)
        body = {"seq": self._count, **figures}
        if not self._connections.send(
            number, frames.encode(header, body, max_body=frames.MAX_BLOB)
        ):
            self._by_number.pop(number, None)
