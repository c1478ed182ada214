"""The front's endpoints: shut while descriptors are short, open again when they are not.

libzmq aborts the process when accepting on ipc finds no descriptor, so we must never get there.
libzmq closes an endpoint's connections with it: clients redial, and send their streams again.
"""

from __future__ import annotations

import logging
import os

import zmq

from mlxpool.common.transport import sockets
from mlxpool.common.transport.keys import KeyPair

log = logging.getLogger("mlxpool.broker")

SHUT_ABOVE = 0.8  # of all descriptors
OPEN_BELOW = 0.6
COUNT_EVERY = 0.02  # of all descriptors: so many connections may come between two counts
PERIOD = 1.0  # seconds between two counts while nothing comes


def backlog_of(limit: int) -> int:
    """Connections that may wait: far fewer than there are descriptors when the door is shut."""
    return max(8, min(sockets.BACKLOG, limit // 16))


class Door:
    """Owned by the broker's one thread, like the socket it guards."""

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
        self.shut = False
        self.times_shut = 0
        self.monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._unseen = 0  # connections that came since the last count
        self._count_at = 0.0

    def bind(self, endpoint: str) -> None:
        """One more endpoint. Raises OSError naming it."""
        self.endpoints.append(sockets.bind(self.socket, endpoint, self.key))

    def somebody_came(self) -> None:
        """The monitor is readable: connections were accepted."""
        try:
            while True:
                self.monitor.recv_multipart(zmq.NOBLOCK)
                self._unseen += 1
        except zmq.Again:
            pass

    def watch(self, now: float) -> None:
        """Shut or open the door if it is time to count."""
        if self._unseen <= COUNT_EVERY * self.limit and now < self._count_at:
            return
        self._unseen, self._count_at = 0, now + PERIOD
        used = len(os.listdir("/dev/fd"))
        if not self.shut and used > SHUT_ABOVE * self.limit:
            self._shut(used)
        elif self.shut and used < OPEN_BELOW * self.limit:
            self._open(used)

    def shut_now(self, now: float) -> None:
        """Take nobody in for PERIOD, whatever the number of descriptors."""
        self._count_at = now + PERIOD
        if not self.shut:
            self._unbind()

    def _shut(self, used: int) -> None:
        self._unbind()
        log.warning("front shut: descriptors are short", extra={"used": used, "of": self.limit})

    def _unbind(self) -> None:
        for endpoint in self.endpoints:
            self.socket.unbind(endpoint)
        self.shut = True
        self.times_shut += 1

    def _open(self, used: int) -> None:
        for endpoint in self.endpoints:
            sockets.bind(self.socket, endpoint, self.key)
        self.shut = False
        log.info("front open again", extra={"used": used, "of": self.limit})

    def close(self) -> None:
        """Stop watching; the socket is closed by its owner."""
        self.socket.disable_monitor()
        self.monitor.close()
