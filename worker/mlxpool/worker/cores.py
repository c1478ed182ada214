"""How many cores the steps take on a CPU: one fewer while other threads have long work.

OpenBLAS has a thread for each core, and none sleeps between the products of a step: a thread that
waits offers its core to whoever wants to compute, gets it back a time slice later, and each product
waits for all of them. Beside one busy thread, even of the lowest standing, a step takes five times
as long; on one core fewer not half as long again.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

PATIENCE = 0.05  # seconds that long work waits for the step that is running


class Threads(Protocol):
    """Of a library of products."""

    def count(self) -> int:
        """How many compute from the next product on."""

    def set(self, count: int) -> None:
        """Has so many compute from then on."""


class OpenBlas:
    """The one this process has loaded. Raises AttributeError when it has none."""

    def __init__(self) -> None:
        here = ctypes.CDLL(None)
        self._get, self._set = here.openblas_get_num_threads, here.openblas_set_num_threads

    def count(self) -> int:
        """See Threads."""
        return int(self._get())

    def set(self, count: int) -> None:
        """See Threads."""
        self._set(count)


class Cores:
    """One thread computes and calls `turn` and `rest`; any other one may ask for a core."""

    def __init__(self, threads: Threads | None, cores: int) -> None:
        """`cores`: those this process may use; `threads` None: nothing can be spared."""
        self._threads = threads
        self._usual = 0 if threads is None else threads.count()
        self._fewer = max(1, min(self._usual, cores - 1))
        self._lock = threading.Lock()
        self._asking = 0  # threads with long work
        self._spared = False  # what the next product does
        self._at_work = False
        self._settled = threading.Event()  # what is asked for is so, or nobody computes
        self._settled.set()

    def turn(self) -> None:
        """Before a step."""
        if self._at_work and self._spared == bool(self._asking):
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

    def _apply(self) -> None:
        self._spared = bool(self._asking)
        if self._threads is not None and self._fewer < self._usual:
            self._threads.set(self._fewer if self._spared else self._usual)
        self._settled.set()


@cache
def of_process() -> Cores:
    """The one of this process, as the library's threads are."""
    try:
        return Cores(OpenBlas(), len(os.sched_getaffinity(0)))
    except (OSError, AttributeError):  # another system, or another library
        return Cores(None, 1)
