"""The open connections of the HTTP server: few, none for long, and the idle give way to new ones.

Invariant: at most AT_ONCE are counted. One that is shut is counted no more; its thread meets the
end of the socket at once and closes it.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from enum import Enum

AT_ONCE = 8  # connections; each is a descriptor that clients cannot have
LONGEST = 5.0  # seconds from the first byte of a request to the last of its answer


class Stage(Enum):
    """What a connection waits for."""

    ASKING = "the peer's request"
    MAKING = "our answer"
    TAKING = "the peer to take it"


# Who waits for a slow peer gives way before who waits for us: that one ends by itself.
GIVES_WAY = (Stage.ASKING, Stage.TAKING)


@dataclass(eq=False, slots=True)
class Visit:
    """One connection; `since` is when it came, in seconds."""

    socket: socket.socket
    since: float
    stage: Stage = Stage.ASKING


class Visits:
    """All that are open, the oldest first. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._open: dict[socket.socket, Visit] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: socket.socket, now: float) -> bool:
        """Let it in, in the place of the oldest that waits for its peer. False: no place."""
        with self._lock:
            if len(self._open) >= AT_ONCE:
                if (oldest := self._idle()) is None:
                    return False
                self._shut(oldest)
            self._open[connection] = Visit(connection, now)
            return True

    def turn(self, connection: socket.socket, stage: Stage) -> None:
        """It has come so far; nothing, when it was shut meanwhile."""
        with self._lock:
            if (visit := self._open.get(connection)) is not None:
                visit.stage = stage

    def leave(self, connection: socket.socket) -> None:
        """It has ended."""
        with self._lock:
            self._open.pop(connection, None)

    def hurry(self, now: float) -> None:
        """Shut those that have been here for LONGEST."""
        with self._lock:
            for visit in [v for v in self._open.values() if now - v.since > LONGEST]:
                self._shut(visit)

    def _idle(self) -> Visit | None:
        for stage in GIVES_WAY:
            for visit in self._open.values():
                if visit.stage is stage:
                    return visit
        return None

    def _shut(self, visit: Visit) -> None:
        del self._open[visit.socket]
        try:
            visit.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was quicker
            pass
