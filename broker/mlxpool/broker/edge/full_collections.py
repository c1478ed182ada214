"""Makes full collections of Python's garbage collector rare, and runs them while no stream is live.

A full collection visits each container of the process. With thousands of live streams this stops
the loop for tens of milliseconds. Reference counts free ended streams. Only cycles need a
collection, and the usual collections of young objects find nearly all cycles.

Python counts containers and not their bytes, so a few cycles with large buffers could use unbounded
memory. So a process that has grown much since its last full collection runs another full
collection, even with live streams.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

from mlxpool.broker.host import trim_heap

INTERVAL = 60.0  # least seconds between two full collections
# Collections of the middle generation before an automatic full collection; default 10. With
# the thresholds 700 and 10 of the younger generations, a full one runs after 350,000 new
# containers. This bounds the number of cycles in a broker that always has live streams.
MIDDLE_COLLECTIONS = 50
# These constants bound the bytes of cycles. Even a growing process has few such collections,
# because each needs 1.5 times the memory after the last.
MAX_GROWTH = 0.5  # most growth, as a share of the memory after the last full collection
MIN_GROWTH = 64 * 1024 * 1024  # bytes of growth that never trigger a collection
LOOK_INTERVAL = 1.0  # seconds between two checks of the memory
GROWTH_INTERVAL = 10.0  # least seconds between two full collections because of growth


class FullCollections:
    """Runs full collections of Python's garbage collector; used by the broker's thread."""

    def __init__(self, busy: Callable[[], bool], resident: Callable[[], int]) -> None:
        """`busy` returns whether a stream or a call is live.

        `resident` returns the resident bytes of this process; 0 if unknown.
        """
        self._busy = busy
        self._resident = resident
        self._next_at = 0.0
        self._look_at = math.inf
        self._max_bytes = math.inf  # growth in bytes above which a collection is due

    def start(self, now: float) -> None:
        """Sets the thresholds of the collector, once the broker is built.

        No later collection visits the objects that exist now: they live as long as the process.
        """
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, MIDDLE_COLLECTIONS)
        self._collect(now)
        gc.freeze()

    def on_turn(self, now: float) -> None:
        """Runs a full collection if it is due and no stream is live, or after much growth.

        The loop calls this after each turn; an idle broker does not wake for it.
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
        trim_heap()  # or free memory counts as used, and the bound rises each time
        self._next_at, self._look_at = now + INTERVAL, now + GROWTH_INTERVAL
        left = self._resident()
        self._max_bytes = left + max(MIN_GROWTH, MAX_GROWTH * left)
