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

STARTED = 19  # index of starttime in the fields of /proc/self/stat after the name, see proc(5)

log = logging.getLogger("mlxpool.worker")


class LoadClock:
    """The phases of a load, one after the other; a phase that is entered again continues.

    The loading thread calls `enter` and `finish`, any thread `times`. Nothing is measured before
    `begin` and after `finish`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: Mapping[str, float] = {}  # replaced, never changed: other threads read it
        self.counts: Counter[str] = Counter()  # counts of the load's actions, for the log line
        self._now, self._since = "", 0.0

    def begin(self, age: float) -> None:
        """Begins to measure, in the phase of imports; the process started `age` seconds ago."""
        self._ended = {"start": max(0.0, age)}
        self.counts.clear()
        self._now, self._since = "imports", self._clock()

    def enter(self, phase: str) -> None:
        """Ends the current phase and begins `phase`, one of LOAD_PHASES."""
        assert phase in LOAD_PHASES, phase
        if self._now:
            self._end_phase(phase)

    def count(self, what: str, number: int) -> None:
        """Adds `number` to the counter `what` of this load."""
        if self._now:
            self.counts[what] += number

    def finish(self) -> LoadTimes | None:
        """Ends the load and returns its times; None: not measured, or already ended."""
        if not self._now:
            return None
        self._end_phase("")
        return self.times

    @property
    def times(self) -> LoadTimes:
        """Returns the times of the phases so far."""
        ended, now, since = self._ended, self._now, self._since
        if now:
            ended = {**ended, now: ended.get(now, 0.0) + max(0.0, self._clock() - since)}
        return LoadTimes(ended, now)

    def _end_phase(self, following: str) -> None:
        self._ended = self.times.seconds
        self._now, self._since = following, self._clock()


def process_age() -> float:
    """Returns the seconds since the start of this process.

    On Linux both times are read from the kernel's clock, which counts from the boot. The start time
    from psutil would be less exact, because it includes the time of the boot in whole seconds.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


LOAD = LoadClock()


def log_end(**fields: object) -> None:
    """Ends the load of this process and logs the seconds of its phases, and its counts.

    Does nothing if no load is measured, or if the load has ended.
    """
    if (times := LOAD.finish()) is not None:
        total = round(times.total, 3)
        log.info("loaded", extra={**fields, "total": total, **times.shown, **LOAD.counts})
