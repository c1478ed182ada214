"""Which peers have a backlog, when each is tried again, and how much waits for all. Pure.

A peer that takes nothing is tried less and less often, so that many of them cost one that reads
nothing. A frame of a peer makes its next try due at once: it lives, and may be reading again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from mlxpool.broker.core.state import Timers

FIRST_RETRY = 0.01  # seconds until a peer that has become full, or took something, is tried again
MAX_RETRY = 0.64  # seconds at most: doubled with each try in vain
MAX_SENDS = 128  # sends, in vain or not, in one turn of the loop
MAX_BACKLOGS = 256 * 1024 * 1024  # bytes that wait for all clients
PART_BYTES = 64  # of memory that a part takes beside its bytes


def size_of(parts: Sequence[bytes]) -> int:
    """The bytes for which a queued message counts."""
    return sum(map(len, parts)) + PART_BYTES * len(parts)


class Backlogs:
    """The numbers of peers with a backlog, in the order of their last progress.

    Bytes are counted here for all; the messages are the peers' own.
    """

    def __init__(self, max_bytes: float = math.inf) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._waits: dict[int, float] = {}  # number -> seconds to wait after a try in vain
        self._new: list[int] = []  # of these, those whose first try is not scheduled yet
        self._retries: Timers[int] = Timers()

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, number: int) -> bool:
        return number in self._waits

    def __iter__(self) -> Iterator[int]:
        return iter(self._waits)

    @property
    def exceeded(self) -> bool:
        return self.bytes > self.max_bytes

    def stuck_longest(self, bytes_of: Callable[[int], int]) -> int:
        """Of the peers with half the mean backlog or more, the one that has taken nothing for the
        longest time. `bytes_of` gives the bytes that wait for a peer.

        A peer with a small backlog is spared: its end would free nothing. Those with less than half
        the mean have together less than half of all bytes, so there is always another one.
        """
        enough = self.bytes / len(self._waits) / 2
        return next(number for number in self._waits if bytes_of(number) >= enough)

    def add(self, number: int, size: int) -> None:
        """A message of so many bytes waits for this peer."""
        self.bytes += size
        if number not in self._waits:
            self._waits[number] = FIRST_RETRY
            self._new.append(number)

    def sent(self, size: int) -> None:
        """A waiting message of so many bytes was sent."""
        self.bytes -= size

    def drop(self, number: int, size: int) -> None:
        """The peer has no backlog any more; so many bytes of it were not sent."""
        self.bytes -= size
        if self._waits.pop(number, None) is not None:
            self._retries.clear(number)

    def heard(self, number: int, now: float) -> None:
        """A frame of a peer with a backlog came.

        A try that is overdue keeps its turn: a peer that sends often would else wait behind all
        others again and again.
        """
        self._waits[number] = FIRST_RETRY
        if self._retries.at(number) > now:
            self._retries.set(number, now)

    # ---- tries -------------------------------------------------------------------------------

    def next_wake(self) -> float:
        """When a peer is to be tried, or to be scheduled; infinity if none has a backlog."""
        return 0.0 if self._new else self._retries.next()

    def due(self, now: float) -> int | None:
        """The number of the peer that is to be tried next; `put_back` or `drop` follows."""
        for number in self._new:
            if number in self._waits and number not in self._retries:
                self._retries.set(number, now + FIRST_RETRY)
        self._new.clear()
        found = self._retries.due(now, 1)
        return found[0] if found else None

    def put_back(self, number: int, now: float, *, progress: bool, more: bool) -> None:
        """The peer still has a backlog after a try.

        `progress`: it took some messages. `more`: it may take another one now, but others are tried
        first.
        """
        if progress:
            del self._waits[number]
            self._waits[number] = FIRST_RETRY
            wait = 0.0 if more else FIRST_RETRY
        else:
            wait = self._waits[number]
            self._waits[number] = min(MAX_RETRY, 2 * wait)
        self._retries.set(number, now + wait)
