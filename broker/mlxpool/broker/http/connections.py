"""The open connections of the HTTP server: few, short-lived; idle ones make room for new ones.

Invariant: at most MAX_CONNECTIONS are counted. One that was shut down is not counted any more; its
thread sees the end of the socket at once and closes it.
"""

from __future__ import annotations

import socket
import threading
from enum import Enum

from msgspec import Struct

MAX_CONNECTIONS = 8  # each takes a descriptor that clients cannot have
MAX_SECONDS = 5.0  # from the first byte of a request to the last of its answer


class Stage(Enum):
    """What a connection waits for."""

    REQUEST = "the peer's request"
    ANSWER = "our answer"
    SENDING = "the peer to receive the answer"


# One that waits for its peer is shut down before one that waits for us: that one ends by itself.
IDLE_STAGES = (Stage.REQUEST, Stage.SENDING)


class Connection(Struct, eq=False):
    """`since` is when it was accepted, in seconds."""

    socket: socket.socket
    since: float
    stage: Stage = Stage.REQUEST


class Connections:
    """All that are open, the oldest first. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.max_seconds = MAX_SECONDS
        self._open: dict[socket.socket, Connection] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def count(self, stage: Stage) -> int:
        """How many are in this stage."""
        with self._lock:
            return sum(connection.stage is stage for connection in self._open.values())

    def add(self, accepted: socket.socket, now: float) -> bool:
        """Count it, in place of the oldest idle one if need be. False: there is no room."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                if (oldest := self._oldest_idle()) is None:
                    return False
                self._shut_down(oldest)
            self._open[accepted] = Connection(accepted, now)
            return True

    def set_stage(self, accepted: socket.socket, stage: Stage) -> None:
        """Nothing, if it was shut down meanwhile."""
        with self._lock:
            if (connection := self._open.get(accepted)) is not None:
                connection.stage = stage

    def remove(self, accepted: socket.socket) -> None:
        """It has ended."""
        with self._lock:
            self._open.pop(accepted, None)

    def shut_down_overdue(self, now: float) -> None:
        """End those that have been open for `max_seconds`."""
        with self._lock:
            overdue = [c for c in self._open.values() if now - c.since > self.max_seconds]
            for connection in overdue:
                self._shut_down(connection)

    def _oldest_idle(self) -> Connection | None:
        for stage in IDLE_STAGES:
            for connection in self._open.values():
                if connection.stage is stage:
                    return connection
        return None

    def _shut_down(self, connection: Connection) -> None:
        del self._open[connection.socket]
        try:
            connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer closed it meanwhile
            pass
