"""Times at which the core is to be woken, one for each key."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable

SLACK = 64  # entries that no longer count, before the heap is compacted


class Timers:
    """A heap in which only the newest time set for a key counts."""

    def __init__(self) -> None:
        self._at: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def set(self, key: Hashable, at: float) -> None:
        """Wake for `key` at this time and at no other; infinity clears it."""
        if math.isinf(at):
            self._at.pop(key, None)
        elif self._at.get(key) != at:
            self._at[key] = at
            self._count += 1
            heapq.heappush(self._heap, (at, self._count, key))
            if len(self._heap) > SLACK + 4 * len(self._at):
                self._compact()

    def _compact(self) -> None:
        """Drop entries that no longer count: cleared times far ahead take no memory."""
        self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)

    def clear(self, key: Hashable) -> None:
        self._at.pop(key, None)

    def next(self) -> float:
        """The earliest time set; infinity if there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> list[Hashable]:
        """The keys whose time has come, earliest first; they are cleared."""
        keys = []
        while self.next() <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            keys.append(key)
        return keys
