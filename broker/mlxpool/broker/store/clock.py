"""The store's clock: seconds since 1970 that never go back, over restarts of the broker too."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady() -> float:
    """Seconds of a clock that nobody sets; where it can be had, it counts a suspended machine."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class StoreClock:
    """Starts at the time of day, or at `seen`, the newest time in the store, if that is later.

    From there on it goes by the steady clock: a time of day that jumps while the broker runs
    neither ends deadlines nor deletes results. The next start of the broker reads it again.
    """

    __slots__ = ("_offset", "_steady")

    def __init__(
        self,
        seen: float,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady,
    ) -> None:
        self._steady = steady
        self._offset = max(seen, wall()) - steady()

    def now(self) -> float:
        """Seconds since 1970."""
        return self._steady() + self._offset
