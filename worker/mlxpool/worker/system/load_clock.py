"""Measures the phases of this process's load. A process loads one model, so it has one clock."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from mlxpool.common.load_times import LOAD_PHASES, LoadTimes

STARTED = 19  # of the fields of /proc/self/stat behind the name, see proc(5)

log = logging.getLogger("mlxpool.worker")


class LoadClock:
    """The phases of a load, one after the other; one that comes back goes on.

    `enter` and `finish` are called by the thread that is loading, `times` by any thread. Before
    `begin` and after `finish` nothing is measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: Mapping[str, float] = {}  # replaced, never changed: other threads read it
        self.counts: Counter[str] = Counter()  # of what the load did, for its log line
        self._now, self._since = "", 0.0

    def begin(self, age: float) -> None:
        """Begins to measure in a process that was started `age` seconds ago, in the imports."""
        self._ended = {"start": max(0.0, age)}
        self.counts.clear()
        self._now, self._since = "imports", self._clock()

    def enter(self, phase: str) -> None:
        """Ends the phase that lasts and begins another one of LOAD_PHASES."""
        assert phase in LOAD_PHASES, phase
        if self._now:
            self._end_phase(phase)

    def count(self, what: str, number: int) -> None:
        """Adds to what the load did so far."""
        if self._now:
            self.counts[what] += number

    def finish(self) -> LoadTimes | None:
        """The load has ended; returns what it took. None: it was not measured, or has ended."""
        if not self._now:
            return None
        self._end_phase("")
        return self.times

    @property
    def times(self) -> LoadTimes:
        """What the phases took so far."""
        ended, now, since = self._ended, self._now, self._since
        if now:
            ended = {**ended, now: ended.get(now, 0.0) + max(0.0, self._clock() - since)}
        return LoadTimes(ended, now)

    def _end_phase(self, following: str) -> None:
        self._ended = self.times.seconds
        self._now, self._since = following, self._clock()


def process_age() -> float:
    """Seconds since the start of this process.

    On Linux by the kernel's clock since the boot: the time of the boot itself, which psutil adds,
    is known to a second.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


LOAD = LoadClock()


def log_end(**fields: object) -> None:
    """Ends the load of this process and logs what its phases took, in seconds, and what it did.

    Does nothing where none is measured, or it has ended.
    """
    if (times := LOAD.finish()) is not None:
        total = round(times.total, 3)
        log.info("loaded", extra={**fields, "total": total, **times.shown, **LOAD.counts})
