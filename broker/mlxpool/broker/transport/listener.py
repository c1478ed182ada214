"""The front's endpoints: unbound while file descriptors are short, bound again when they are not.

libzmq aborts the process when accepting on ipc finds no descriptor, so that must never happen. When
an endpoint is unbound, libzmq closes its connections: clients redial and send their requests again.
"""

from __future__ import annotations

import logging
import math

import zmq

from mlxpool.broker.transport.descriptors import count_open
from mlxpool.common.transport import sockets
from mlxpool.common.transport.keys import KeyPair

log = logging.getLogger("mlxpool.broker")

UNBIND_ABOVE = 0.8  # of all descriptors
BIND_BELOW = 0.6
RECOUNT_AFTER = 0.02  # of all descriptors: accepted connections that cause a new count
COUNT_INTERVAL = 1.0  # seconds between two counts while nobody connects


def backlog_of(limit: int) -> int:
    """Connections the kernel may queue: far fewer than the descriptors left when unbound."""
    return max(8, min(sockets.BACKLOG, limit // 16))


class Listener:
    """Owned by the broker's thread, like the socket whose endpoints it binds."""

    def __init__(
        self, socket: zmq.Socket[bytes], first: str, limit: int, key: KeyPair | None = None
    ) -> None:
        """`first` is bound already; `limit` is how many descriptors this process may have.

        With a `key` tcp speaks CURVE.
        """
        self.socket = socket
        self.key = key
        self.endpoints = [first]
        self.limit = limit
        self.unbound = False
        self.times_unbound = 0
        self.monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._accepted = 0  # connections since the last count
        self._count_at = 0.0

    def bind(self, endpoint: str) -> None:
        """Add an endpoint. Raises OSError naming it."""
        self.endpoints.append(sockets.bind(self.socket, endpoint, self.key))

    def on_accepted(self, now: float) -> None:
        """The monitor is readable: connections were accepted."""
        try:
            while True:
                self.monitor.recv_multipart(zmq.NOBLOCK)
                self._accepted += 1
        except zmq.Again:
            pass
        self.check(now)

    def check(self, now: float) -> None:
        """Unbind or bind if it is time to count descriptors."""
        if self._accepted <= RECOUNT_AFTER * self.limit and now < self._count_at:
            return
        self._accepted, self._count_at = 0, now + COUNT_INTERVAL
        used = count_open()
        if not self.unbound and used > UNBIND_ABOVE * self.limit:
            self._unbind()
            log.warning("front shut: descriptors are short", extra={"used": used, "of": self.limit})
        elif self.unbound and used < BIND_BELOW * self.limit:
            self._bind()
            log.info("front open again", extra={"used": used, "of": self.limit})

    def next_wake(self) -> float:
        """When `check` is due; infinity while the front is bound: then connections cause it."""
        return self._count_at if self.unbound else math.inf

    def unbind_now(self, now: float) -> None:
        """Accept nobody for COUNT_INTERVAL, whatever the number of descriptors."""
        self._count_at = now + COUNT_INTERVAL
        if not self.unbound:
            self._unbind()

    def _unbind(self) -> None:
        for endpoint in self.endpoints:
            self.socket.unbind(endpoint)
        self.unbound = True
        self.times_unbound += 1

    def _bind(self) -> None:
        for endpoint in self.endpoints:
            sockets.bind(self.socket, endpoint, self.key)
        self.unbound = False

    def close(self) -> None:
        """Close the monitor; the socket is closed by its owner."""
        self.socket.disable_monitor()
        self.monitor.close()
