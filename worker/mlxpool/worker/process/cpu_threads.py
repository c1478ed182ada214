"""How many cores the steps take on a CPU: those that nobody else computes on.

OpenBLAS has a thread for each core, and none sleeps between the products of a step: a thread that
waits offers its core to whoever wants to compute, gets it back a time slice later, and each product
waits for all of them. On two cores and beside one busy thread, even of the lowest standing, a step
takes five times as long as alone; on one of them not twice as long.

Long work of this process says so before it begins, see `Cores.spared`. What other processes take,
other workers first of all, is looked at while steps run.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

PATIENCE = 0.05  # seconds that long work waits for the step that is running
LOOK = 0.1  # seconds between two looks at what others take
STALE = 2.0  # seconds; after a rest, an older look says nothing of now
CALM = 5  # looks in a row that find more room, before it is taken
FLOOR = 4  # a quarter of the cores is ours: on a full machine others take whatever is left
_PTHREADS = 1  # OpenBLAS's name for threads of its own; those of OpenMP are each caller's
TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01  # seconds
_BUSY = (0, 1, 2, 5, 6)  # of a line of /proc/stat: user, nice, system, irq, softirq
STAT = Path("/proc/stat")


class Threads(Protocol):
    """Of a library of products."""

    def count(self) -> int:
        """How many compute from the next product on."""

    def set(self, count: int) -> None:
        """Has so many compute from then on."""


class OpenBlas:
    """The one this process has loaded. Raises AttributeError when it has none with threads."""

    def __init__(self) -> None:
        here = ctypes.CDLL(None)
        if here.openblas_get_parallel() != _PTHREADS:
            raise AttributeError("an OpenBLAS without threads of its own")
        self._get, self._set = here.openblas_get_num_threads, here.openblas_set_num_threads

    def count(self) -> int:
        """See Threads."""
        return int(self._get())

    def set(self, count: int) -> None:
        """See Threads."""
        self._set(count)


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of processors that were computed on until `at`: ours, and everybody's."""

    at: float
    own: float
    all: float


def taken(cores: Set[int]) -> Taken:
    """Now, by the processors with these numbers. Raises OSError where the system does not say."""
    ticks = 0
    for line in STAT.read_bytes().splitlines():
        name, _, rest = line.partition(b" ")
        if name[:3] == b"cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            values = rest.split()
            ticks += sum(int(values[place]) for place in _BUSY)
    return Taken(time.monotonic(), time.process_time(), ticks * TICK)


def fitting(most: int, cores: int, before: Taken, after: Taken) -> int:
    """How many threads leave the others what they took; half a core is one. Pure."""
    others = (after.all - before.all - after.own + before.own) / (after.at - before.at)
    free = cores - max(0.0, others)
    return min(most, max(1, cores // FLOOR, math.floor(free + 0.5)))


class Cores:
    """One thread computes and calls `turn` and `rest`; any other one may ask for a core."""

    def __init__(
        self, threads: Threads | None, cores: int, look: Callable[[], Taken] | None = None
    ) -> None:
        """`cores`: those this process may use; `threads` None: nothing can be spared."""
        self._threads = threads
        self._cores = cores
        self._usual = 0 if threads is None else threads.count()
        self._fewer = max(1, min(self._usual, cores - 1))
        self._look = look if self._fewer < self._usual else None
        self._seen: Taken | None = None
        self._look_at = 0.0 if self._look else math.inf
        self._fit = self._usual  # with others beside us
        self._calm = 0  # looks in a row that found more room
        self._lock = threading.Lock()
        self._asking = 0  # threads of ours with long work
        self._spared = False  # what the next product does
        self._at_work = False
        self._settled = threading.Event()  # what is asked for is so, or nobody computes
        self._settled.set()

    def turn(self, now: float) -> None:
        """Before a step, at `now` of the monotonic clock."""
        if now >= self._look_at:
            if not self._at_work and self._seen is not None and now - self._seen.at > STALE:
                self._seen, self._fit = None, self._usual
            self._look_around(now)
        elif self._at_work and self._spared == bool(self._asking):
            return
        with self._lock:
            self._at_work = True
            self._apply()

    def rest(self) -> None:
        """No step follows, until `turn`."""
        with self._lock:
            self._at_work = False
            self._settled.set()

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Steps leave a core alone meanwhile. Waits for the one that is running, not for long."""
        if self._fewer >= self._usual:
            yield
            return
        with self._lock:
            self._asking += 1
            if self._at_work and not self._spared:
                self._settled.clear()
        try:
            self._settled.wait(PATIENCE)
            yield
        finally:
            with self._lock:
                self._asking -= 1

    def _look_around(self, now: float) -> None:
        assert self._look is not None
        before = self._seen
        try:
            self._seen = after = self._look()
        except (OSError, ValueError, IndexError):  # a system that does not say it
            self._look_at, self._fit = math.inf, self._usual
            return
        self._look_at = now + LOOK
        if before is not None and after.at > before.at:
            found = fitting(self._usual, self._cores, before, after)
            self._calm = self._calm + 1 if found > self._fit else 0
            if found < self._fit or self._calm >= CALM:
                self._fit, self._calm = found, 0

    def _apply(self) -> None:
        self._spared = bool(self._asking)
        count = min(self._fit, self._fewer) if self._spared else self._fit
        if self._threads is not None and count != self._threads.count():
            self._threads.set(count)
        self._settled.set()


@cache
def of_process() -> Cores:
    """The one of this process, as the library's threads are."""
    try:
        here = os.sched_getaffinity(0)
        return Cores(OpenBlas(), len(here), lambda: taken(here))
    except (OSError, AttributeError):  # another system, or another library
        return Cores(None, 1)
