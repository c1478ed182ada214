"""Peers without a socket, for tests: they record the messages that are sent to them."""

from __future__ import annotations

from collections import deque

from mlxpool.broker.transport.peers import Backlogs, Peer, Peers
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.frames import Message


class FakePeers(Peers):
    """Peers without a socket, which record the messages that are sent to them.

    Peers in `dead` have left, and peers in `full` read nothing. `incoming` has the unread messages.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.dead: set[int] = set()
        self.full = Backlogs()
        self.forgotten: list[int] = []
        self.by_number = {}
        self.incoming: deque[tuple[Peer, list[bytes]]] = deque()

    def receive(self, now: float) -> tuple[Peer, list[bytes]] | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, number: int, parts: list[bytes]) -> bool:
        if number in self.dead:
            return False
        self.sent.append((number, frames.decode(parts, max_body=frames.MAX_BLOB)))
        return True

    def forget(self, number: int) -> None:
        self.forgotten.append(number)
