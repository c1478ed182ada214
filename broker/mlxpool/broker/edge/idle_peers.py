"""Forgets connections that are of no use any more, so that they take no memory."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.transport.peers import Peers
from mlxpool.broker.transport.worker_sessions import WorkerSessions

IDLE_TIME = 20.0  # seconds after which a silent client without streams is forgotten
INTERVAL = IDLE_TIME / 4


class IdlePeers:
    """Owned by the broker's thread. `has_link`: whether the core knows a client's connection."""

    def __init__(
        self, front: Peers, sessions: WorkerSessions, has_link: Callable[[int], bool]
    ) -> None:
        self._front = front
        self._sessions = sessions
        self._has_link = has_link
        self._sweep_at = 0.0

    def next_wake(self) -> float:
        return self._sweep_at

    def sweep(self, now: float) -> None:
        """Forget what is idle, if it is time."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + INTERVAL
        for peer in list(self._front.by_number.values()):
            if now - peer.heard_at > IDLE_TIME and not self._has_link(peer.number):
                self._front.forget(peer.number)
        self._sessions.sweep()
