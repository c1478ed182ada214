"""Who is told the pool's figures once a second, until they stop asking.

A watcher asks again before its lease ends, so one that froze or went away costs a few frames.
Nothing is reckoned while nobody watches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.broker.edge.peers import Peers
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header

PERIOD = 1.0  # seconds between two pictures
LEASE = 5.0  # seconds for which one question is answered
MOST = 64  # watchers; operations are few

Picture = Callable[[float], Mapping[str, Any]]


@dataclass(eq=False, slots=True)
class Watcher:
    """One connection; `id` is that of its newest question."""

    id: bytes | None
    until: float


class Watchers:
    """Owned by the broker's loop, like the socket behind `peers`."""

    def __init__(self, peers: Peers, picture: Picture) -> None:
        self._peers = peers
        self._picture = picture
        self._of: dict[int, Watcher] = {}  # by number of the connection
        self._due = math.inf
        self._count = 0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, number: int) -> bool:
        return number in self._of

    def takes(self, number: int) -> bool:
        """Whether this connection may watch: it does already, or there is room."""
        return number in self._of or len(self._of) < MOST

    def admit(self, number: int, ident: bytes | None, now: float) -> None:
        """Tell this connection at once, then each second until its lease ends."""
        known = number in self._of
        self._of[number] = Watcher(ident, now + LEASE)
        self._due = min(self._due, now + PERIOD)
        if not known:
            self._tell(number, self._picture(now))

    def next_wake(self) -> float:
        """When there is something to do; infinite while nobody watches."""
        return self._due

    def serve(self, now: float) -> None:
        """Send the picture that is due."""
        if now < self._due:
            return
        for number in [n for n, watcher in self._of.items() if watcher.until <= now]:
            self._end(number)
        if not self._of:
            self._due = math.inf
            return
        self._due = now + PERIOD
        picture = self._picture(now)
        for number in list(self._of):
            self._tell(number, picture)

    def _tell(self, number: int, picture: Mapping[str, Any]) -> None:
        """Who has not read the last picture gets none: they are not worth keeping."""
        if number in self._peers.full:
            return
        self._count += 1
        header = Header(kinds.WATCH, self._of[number].id)
        body = {"seq": self._count, **picture}
        if not self._peers.send(number, frames.encode(header, body, max_body=frames.MAX_BLOB)):
            self._of.pop(number, None)

    def _end(self, number: int) -> None:
        del self._of[number]
        self._peers.forget(number)
