"""Makes full collections of Python's garbage collector rare; runs them while no stream is live.

A full collection looks at each container of the process: with thousands of live streams the loop
stands still for tens of milliseconds. Reference counts free a stream that ends. Only cycles wait
for a collection, and those of young objects, which stay as they are, find nearly all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

INTERVAL = 60.0  # seconds between two full collections at least
# Collections of the middle generation before a full one that comes by itself; Python's own is 10.
# With the thresholds 700 and 10 of the younger generations, Python looks at all containers when
# 350,000 are new: the bound of what cycles hold in a broker that always has live streams.
MIDDLE_COLLECTIONS = 50


class FullCollections:
    """Used by the broker's thread. `busy` says whether a stream or a call is live."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._next_at = 0.0

    def start(self, now: float) -> None:
        """Set the thresholds, once the broker is set up.

        What exists by now lives as long as the process: no collection looks at it again.
        """
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, MIDDLE_COLLECTIONS)
        gc.collect()
        gc.freeze()
        self._next_at = now + INTERVAL

    def on_turn(self, now: float) -> None:
        """Run a full collection if it is due and no stream is live.

        The loop calls this in turns that it has anyway: an idle broker is not woken for it.
        """
        if now >= self._next_at and not self._busy():
            gc.collect()
            self._next_at = now + INTERVAL
