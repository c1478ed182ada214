"""Makes full collections of Python's garbage collector rare; runs them while no stream is live.

A full collection looks at each container of the process: with thousands of live streams the loop
stands still for tens of milliseconds. Reference counts free an ended stream. Only cycles need a
collection, and collections of young objects, which stay as usual, find nearly all cycles.

Python counts containers and not their bytes, so a few cycles with large buffers would take memory
without bound. So a process that has grown much since its last full collection runs another, even
with live streams.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

from mlxpool.broker.host import trim_heap

INTERVAL = 60.0  # least seconds between two full collections
# Collections of the middle generation before an automatic full one; Python's default is 10. With
# the thresholds 700 and 10 of the younger generations, a full one runs after 350,000 new
# containers: the bound of the number of cycles in a broker that always has live streams.
MIDDLE_COLLECTIONS = 50
# The bound of their bytes. A process that needs ever more memory has few such collections: each
# comes at 1.5 times the memory of the one before.
MAX_GROWTH = 0.5  # most growth, as a share of the memory after the last full collection
MIN_GROWTH = 64 * 1024 * 1024  # bytes of growth that are always allowed
LOOK_INTERVAL = 1.0  # seconds between two looks at the memory
GROWTH_INTERVAL = 10.0  # least seconds between two full collections for growth


class FullCollections:
    """Runs full collections. Used by the broker's thread."""

    def __init__(self, busy: Callable[[], bool], resident: Callable[[], int]) -> None:
        """`busy` returns whether a stream or a call is live.

        `resident` returns the bytes of memory of this process; 0: unknown.
        """
        self._busy = busy
        self._resident = resident
        self._next_at = 0.0
        self._look_at = math.inf
        self._max_bytes = math.inf  # with more, one is due even with live streams

    def start(self, now: float) -> None:
        """Set the thresholds, once the broker is set up.

        Objects of the set-up live as long as the process: no collection looks at them again.
        """
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, MIDDLE_COLLECTIONS)
        self._collect(now)
        gc.freeze()

    def on_turn(self, now: float) -> None:
        """Run a full collection if it is due and no stream is live, or if the process has grown.

        The loop calls this at the end of each turn; an idle broker is not woken for it.
        """
        if (now >= self._next_at and not self._busy()) or self._has_grown(now):
            self._collect(now)

    def _has_grown(self, now: float) -> bool:
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_INTERVAL
        return self._resident() > self._max_bytes

    def _collect(self, now: float) -> None:
        gc.collect()
        trim_heap()  # else free memory counts as needed, and each bound exceeds the last
        self._next_at, self._look_at = now + INTERVAL, now + GROWTH_INTERVAL
        left = self._resident()
        self._max_bytes = left + max(MIN_GROWTH, MAX_GROWTH * left)
