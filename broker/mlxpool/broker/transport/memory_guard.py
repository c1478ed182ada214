"""The guard against clients that fill the broker's memory with unfinished messages.

libzmq bounds neither the parts nor the bytes of an unfinished message (MAXMSGSIZE bounds a single
part), and does not report unfinished messages. But a client with live streams pings every second,
which it cannot in the middle of a message. So if memory exceeds the bytes of requests and backlogs,
the guard closes the connections that have not sent a whole message recently. If that does not help,
it closes all connections, and the front stays unbound until the remaining memory is known. Honest
clients reconnect and retry.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket

from mlxpool.broker import host
from mlxpool.broker.core.state import State
from mlxpool.broker.transport.listener import Listener, accepted
from mlxpool.broker.transport.peers import Peers

log = logging.getLogger("mlxpool.broker")

MAX_UNEXPLAINED = 512 * 1024 * 1024  # bytes in use beyond those of requests and backlogs
CHECK_INTERVAL = 0.25  # seconds
SETTLE_TIME = 0.5  # seconds until closed connections' memory is free; less than COUNT_INTERVAL
TRIM_TIME = 60.0  # seconds after a closing, in which freed memory goes back to the system
RECENT = 2.0  # seconds; a client with live streams sends whole messages more often
UNREAD_ID_BYTES = 64  # bytes in a socket for a sent, unacknowledged token id
OVERHEAD = 2  # memory of a message in Python, as a multiple of its bytes


class MemoryGuard:
    """Closes connections while memory is scarce. Owned by the broker's thread."""

    def __init__(self, listener: Listener, front: Peers, state: State) -> None:
        self.listener = listener
        self.front = front
        self._state = state
        self.disconnected = 0  # connections closed so far
        self._check_at = 0.0
        self._floor = 0  # bytes in use that remained after all connections were closed
        self._strikes = 0
        self._trim_until = 0.0

    def next_wake(self) -> float:
        """Returns the time of the next `check`."""
        return self._check_at

    def check(self, now: float) -> None:
        """Closes connections, if a check is due and memory is scarce."""
        if now < self._check_at:
            return
        self._check_at = now + CHECK_INTERVAL
        if now < self._trim_until:
            # Returns freed memory to the system, so that it does not count as used. A busy machine
            # may free the memory of closed connections only after SETTLE_TIME.
            host.trim_heap()
        used = host.resident_bytes(os.getpid()) - self._floor
        if self._strikes < 2 and (
            used < MAX_UNEXPLAINED or used - self._explained() < MAX_UNEXPLAINED
        ):
            self._strikes = 0
            return
        self._check_at = now + SETTLE_TIME
        self._trim_until = now + TRIM_TIME
        self._strikes += 1
        if self._strikes == 1:
            # Spares the clients with live streams that sent a message within RECENT seconds. They
            # send pings, except in the middle of a message.
            self._disconnect_except(busy_descriptors(self.front, self._state, now - RECENT), used)
        elif self._strikes == 2:
            self.listener.unbind_now(now)
            self._disconnect_except(set(), used)
        else:
            self._set_floor(used - self._explained())

    def _set_floor(self, left: int) -> None:
        """Makes later checks ignore about `left` bytes that remained after connections were closed.

        The C library keeps most of these bytes for itself. At most MAX_UNEXPLAINED bytes are
        ignored, because some may be unread messages of closed connections.
        """
        self._floor = min(MAX_UNEXPLAINED, max(0, self._floor + left - MAX_UNEXPLAINED // 2))
        self._strikes = 0

    def _explained(self) -> int:
        """Returns the greatest number of bytes that requests and backlogs can account for."""
        return OVERHEAD * (_bytes_held(self._state) + self.front.full.bytes)

    def _disconnect_except(self, spared: set[int], used: int) -> None:
        count = 0
        for descriptor, connection in accepted(set(self.listener.endpoints)):
            if descriptor not in spared:
                with contextlib.suppress(OSError):  # the client closed it meanwhile
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        self.disconnected += count
        log.warning("turned peers out: memory is short", extra={"peers": count, "bytes": used})


def _bytes_held(state: State) -> int:
    """Returns the bytes of open calls and live requests, unacknowledged tokens included."""
    return sum(call.size for call in state.calls.values()) + sum(
        request.message.size
        + len(request.run.ids)
        + request.reader.unread_bytes
        + UNREAD_ID_BYTES * (request.reader.sent - request.reader.acked)
        for request in state.requests.values()
    )


def busy_descriptors(front: Peers, state: State, since: float = -math.inf) -> set[int]:
    """Returns the descriptors of clients that have a live stream or an open call.

    Only clients that sent a message after `since` are included.
    """
    return {
        peer.descriptor
        for number, link in state.links.items()
        if (link.ids or link.calls) and link.heard_at > since
        if (peer := front.by_number.get(number)) is not None
    }
