"""Chooses the number of CPU cores for the steps of the model: cores without other work.

OpenBLAS has a thread for each core, and these threads do not sleep between the products of a step.
A waiting thread yields its core to any runnable thread and gets it back a time slice later; each
product waits for all threads. On two cores beside one busy thread, even of the lowest priority, a
step takes five times as long as alone; with one OpenBLAS thread it takes less than twice as long.

Long work that this process starts is announced, see `CpuThreads.begin_long_work`. The processor
time of other processes, mainly of other workers, is sampled while steps run.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Set
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol

from msgspec import Struct

SAMPLE_INTERVAL = 0.1  # seconds between two samples of the processor time
SAMPLE_LIFE = 2.0  # seconds; an older sample, before a pause, is no longer valid
SAMPLES_TO_GROW = 5  # consecutive samples with more free cores before steps use these cores
MIN_SHARE = 4  # steps use at least a quarter of the cores, also on a busy machine
# The result of openblas_get_parallel if OpenBLAS has its own threads. The threads of OpenMP would
# belong to each caller.
_PTHREADS = 1
TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01  # seconds
_BUSY = (0, 1, 2, 5, 6)  # columns of a line of /proc/stat: user, nice, system, irq, softirq
STAT = Path("/proc/stat")
OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"  # an OpenBLAS reads this variable when it is loaded


def import_numpy() -> None:
    """Imports numpy with one thread of its OpenBLAS, unless the user has set another number.

    A thread for each core would use 40 ms of processor time on two cores, and numpy multiplies no
    large matrices here. MLX has another OpenBLAS, which keeps its threads.
    """
    is_set = OPENBLAS_THREADS in os.environ
    os.environ.setdefault(OPENBLAS_THREADS, "1")
    import_module("numpy")
    if not is_set:
        del os.environ[OPENBLAS_THREADS]


class BlasThreads(Protocol):
    """The threads of a BLAS library."""

    def count(self) -> int:
        """Returns the number of threads of the next product."""

    def set(self, count: int) -> None:
        """Sets the number of threads from the next product on."""


class OpenBlas:
    """The OpenBLAS of this process. Raises AttributeError without an OpenBLAS with threads."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if library.openblas_get_parallel() != _PTHREADS:
            raise AttributeError("an OpenBLAS without threads of its own")
        self._get = library.openblas_get_num_threads
        self._set = library.openblas_set_num_threads

    def count(self) -> int:
        """Returns the number of threads of the next product; see BlasThreads."""
        return int(self._get())

    def set(self, count: int) -> None:
        """Sets the number of threads from the next product on; see BlasThreads."""
        self._set(count)


class CpuUse(Struct, frozen=True):
    """Processor seconds used until `at` (monotonic): by this process, and by all processes."""

    at: float
    own: float
    all: float


def read_cpu_use(cores: Set[int]) -> CpuUse:
    """Returns the processor time that was used on these cores until now.

    Raises OSError if the system does not report it.
    """
    ticks = 0
    for line in STAT.read_bytes().splitlines():
        name, _, rest = line.partition(b" ")
        if name[:3] == b"cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            values = rest.split()
            ticks += sum(int(values[column]) for column in _BUSY)
    return CpuUse(time.monotonic(), time.process_time(), ticks * TICK)


def thread_count(maximum: int, cores: int, before: CpuUse, after: CpuUse) -> int:
    """Returns the number of threads for the cores that other processes leave free. Pure.

    `before` and `after`: the processor use at the start and at the end of a sample.
    """
    others = (after.all - before.all - after.own + before.own) / (after.at - before.at)
    free = cores - max(0.0, others)
    return min(maximum, max(1, cores // MIN_SHARE, math.floor(free + 0.5)))


class CpuThreads:
    """Sets the number of BLAS threads before each step, so that other processes keep their cores.

    One thread computes and calls `begin_step` and `end_steps`. Any thread may call
    `begin_long_work` and `end_long_work`, which announce long work of this process.
    """

    def __init__(
        self,
        threads: BlasThreads | None,
        cores: int,
        read_use: Callable[[], CpuUse] | None = None,
    ) -> None:
        """`threads`: the threads of the BLAS library; None: their number is never changed.

        `cores`: the number of cores for this process. `read_use` measures the processor use; None:
        the use of other processes is not considered.
        """
        self._threads = threads
        self._cores = cores
        self._usual = 0 if threads is None else threads.count()
        self._reduced = max(1, min(self._usual, cores - 1))  # threads while long work runs
        self._read_use = read_use if self._reduced < self._usual else None
        self._sample: CpuUse | None = None
        self._sample_due = 0.0 if self._read_use else math.inf
        self._fitting = self._usual  # threads that leave other processes their cores
        self._count = self._usual  # threads of this step
        self._growing_samples = 0  # consecutive samples with more free cores
        self._lock = threading.Lock()  # guards `_long_works`
        self._long_works = 0  # long works that run now
        self._reduced_now = False  # the next product uses at most `_reduced` threads
        self._stepping = False
        self._divided = False

    def divide_steps(self) -> None:
        """Makes steps run in `parts` threads with one BLAS thread each, from the next step on."""
        self._divided = True

    @property
    def parts(self) -> int:
        """The number of threads of a divided step."""
        return max(self._count, 1)

    def begin_step(self, now: float) -> None:
        """Begins a step; `now` in monotonic seconds."""
        if now >= self._sample_due:
            if not self._stepping and self._sample and now - self._sample.at > SAMPLE_LIFE:
                self._sample, self._fitting = None, self._usual
            self._take_sample(now)
        elif self._stepping and self._reduced_now == bool(self._long_works):
            return
        self._stepping = True
        self._apply()

    def end_steps(self) -> None:
        """Records that no step runs until the next `begin_step`."""
        self._stepping = False

    def begin_long_work(self) -> None:
        """Makes steps leave one core free, from the next step on until `end_long_work`."""
        with self._lock:
            self._long_works += 1

    def end_long_work(self) -> None:
        """Ends the long work that one call of `begin_long_work` has begun."""
        with self._lock:
            self._long_works -= 1

    def _take_sample(self, now: float) -> None:
        assert self._read_use is not None
        before = self._sample
        try:
            self._sample = after = self._read_use()
        except (OSError, ValueError, IndexError):  # a system that does not report the use
            self._sample_due, self._fitting = math.inf, self._usual
            return
        self._sample_due = now + SAMPLE_INTERVAL
        if before is not None and after.at > before.at:
            count = thread_count(self._usual, self._cores, before, after)
            self._growing_samples = self._growing_samples + 1 if count > self._fitting else 0
            if count < self._fitting or self._growing_samples >= SAMPLES_TO_GROW:
                self._fitting, self._growing_samples = count, 0

    def _apply(self) -> None:
        self._reduced_now = bool(self._long_works)
        fitting = self._fitting
        self._count = min(fitting, self._reduced) if self._reduced_now else fitting
        each = 1 if self._divided else self._count
        if self._threads is not None and each != self._threads.count():
            self._threads.set(each)


@cache
def process_cpu_threads() -> CpuThreads:
    """Returns the only CpuThreads of this process, because BLAS threads are global, too."""
    try:
        cores = os.sched_getaffinity(0)
        return CpuThreads(OpenBlas(), len(cores), lambda: read_cpu_use(cores))
    except (OSError, AttributeError):  # another operating system or BLAS library
        return CpuThreads(None, 1)
