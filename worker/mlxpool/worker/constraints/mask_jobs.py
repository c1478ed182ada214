"""What makes masks: of many constraints together, of one by itself; and the thread for the former.

Each has the masks in a table, and says where, when it is made.
"""

from __future__ import annotations

import atexit
import queue
import threading
from _thread import allocate_lock
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from time import monotonic, process_time, thread_time

import numpy as np
from msgspec import Struct, field

from mlxpool.worker.constraints import mask_batch
from mlxpool.worker.constraints.constraint import Constraint, Words
from mlxpool.worker.constraints.mask_batch import FilledTable
from mlxpool.worker.constraints.mask_table import MaskTable

# Processor seconds of masks that are made together, of which none is called slow: the library's
# bounds of one are of that size. USUAL: of each of them, where they are many.
TOGETHER = 0.005
USUAL = 0.0002
Found = Words | int | Exception  # a mask [1, words], the line of a row without one, or an error


class MadeMasks(Struct, frozen=True):
    """The masks that were made: the line of each constraint in `table`, or see mask_table.only.

    `used`: the lines of the table that have a mask. `failed`: what making one raised. `late`: the
    constraints that are late, of which some have a mask now.
    """

    table: MaskTable
    used: int = 0
    lines: Mapping[Constraint, int] = field(default_factory=dict)
    failed: Mapping[Constraint, Exception] = field(default_factory=dict)
    late: Sequence[Constraint] = ()


class Batch:
    """Constraints that take a token each, and whose masks are made together then.

    One thread does so: the first that calls `run`, `run_take` or `run_fill`; the others wait for
    it. The one that made the batch reads the attributes afterwards: `constraints`, those whose
    masks are made, the `seconds` that this took, and the `error` that made all of them fail.
    """

    def __init__(
        self,
        table: MaskTable,
        constraints: Sequence[Constraint] = (),
        tokens: Sequence[tuple[Constraint, int]] = (),
        least: int = 0,
        made: Callable[[], None] = lambda: None,
    ) -> None:
        """Either `constraints` or `tokens` are given.

        With these, the masks behind them are made, except where the answer is complete or `least`
        or more tokens are forced. `made` is called in the thread that has made them.
        """
        self.table = table
        self.constraints = constraints
        self.tokens = tokens
        self.filled = FilledTable([], 0)
        self.error: Exception | None = None
        self.seconds = 0.0
        self._least = least
        self._made = made
        self._unclaimed = allocate_lock()
        self._taking = allocate_lock()  # locked until tokens are taken
        self._filling = allocate_lock()  # locked until masks are made
        self._taking.acquire()
        self._filling.acquire()

    def run(self, begins: Callable[[], None] = lambda: None) -> None:
        """Takes the tokens and makes the masks, unless another thread does.

        `begins`: see mask_batch.fill_table.
        """
        if self._unclaimed.acquire(blocking=False):
            self._take()
            self._fill(begins)

    def run_take(self) -> bool:
        """Takes the tokens, or waits until another thread has.

        Returns whether `run_fill` has to be called.
        """
        if self._unclaimed.acquire(blocking=False):
            self._take()
            return True
        with self._taking:
            return False

    def run_fill(self, begins: Callable[[], None] = lambda: None) -> None:
        """Makes the masks, when `run_take` has returned True."""
        self._fill(begins)

    def is_made(self) -> bool:
        """Whether all masks are made."""
        return not self._filling.locked()

    def wait(self, end: float) -> bool:
        """Waits until the masks are made, at most until a time. Returns whether they are."""
        if not self._filling.locked():
            return True
        if not self._filling.acquire(timeout=max(0.0, end - monotonic())):
            return False
        self._filling.release()
        return True

    def has_room(self, others: int) -> bool:
        """Whether the table has room for so many masks behind its own."""
        return self.error is None and self.filled.used + others <= len(self.table.words)

    def result(self) -> MadeMasks:
        """Returns all masks, when they are made."""
        if self.error is not None:
            return MadeMasks(self.table, failed=dict.fromkeys(self.constraints, self.error))
        lines = dict(zip(self.constraints, self.filled.lines, strict=True))
        failed = {self.constraints[at]: error for at, error in self.filled.failed.items()}
        for one in failed:
            del lines[one]
        return MadeMasks(self.table, self.filled.used, lines, failed)

    def found(self, place: int) -> Found:
        """Returns the mask of the constraint at a place; it is good while the table is."""
        if self.error is not None:
            return self.error
        failed = self.filled.failed.get(place)
        if failed is not None:
            return failed
        line = self.filled.lines[place]
        return line if line < 0 else self.table.masks[line : line + 1]

    def _take(self) -> None:
        try:
            if self.tokens:
                taken = mask_batch.take_together(self.tokens, find=True)
                self.constraints = [one for one in taken if one.draws_next(self._least)]
        finally:
            self._taking.release()

    def _fill(self, begins: Callable[[], None]) -> None:
        try:
            if self.constraints:
                self._fill_table(begins)
        except BaseException as error:
            self.error = mask_batch.as_exception(error)
        finally:
            self._filling.release()
            self._made()

    def _fill_table(self, begins: Callable[[], None]) -> None:
        """Makes the masks.

        The seconds are those that one may have taken: where the process has worked far too long for
        all of them, each has to show that it is quick by itself.
        """
        if len(self.constraints) == 1:
            begins()
            self.filled, self.seconds = _filled_by(self.constraints[0], self.table)
            return
        began = process_time()
        self.filled = mask_batch.fill_table(self.constraints, self.table, begins)
        seconds = process_time() - began
        usual = USUAL * self.filled.used
        self.seconds = 0.0 if seconds <= max(TOGETHER, usual) else seconds


class SingleMask:
    """The mask of one constraint, which a thread makes by itself, or which was made before."""

    def __init__(self, made: Future[tuple[Found, float]]) -> None:
        self._future = made

    @classmethod
    def kept(cls, found: Found) -> SingleMask:
        """Returns a mask that is made."""
        future: Future[tuple[Found, float]] = Future()
        future.set_result((found.copy() if isinstance(found, np.ndarray) else found, 0.0))
        return cls(future)

    def is_made(self) -> bool:
        """Whether it is made."""
        return self._future.done()

    def wait(self, end: float) -> bool:
        """Waits until the mask is made, at most until a time. Returns whether it is."""
        try:
            self._future.exception(max(0.0, end - monotonic()))
        except TimeoutError:
            return False
        return True

    def result(self) -> tuple[Found, float]:
        """Returns the mask, and the seconds of processor time that it took."""
        return self._future.result()


def timed_mask(constraint: Constraint) -> tuple[Found, float]:
    """Returns the mask of one constraint, and the seconds of processor time that it took."""
    began = thread_time()
    try:
        found: Found = constraint.mask()
    except BaseException as error:
        found = mask_batch.as_exception(error)
    return found, thread_time() - began


def _filled_by(constraint: Constraint, table: MaskTable) -> tuple[FilledTable, float]:
    """Writes the mask of one constraint into a table. Returns also the seconds that it took."""
    found, seconds = timed_mask(constraint)
    if isinstance(found, Exception):
        return FilledTable([0], 0, {0: found}), seconds
    assert isinstance(found, np.ndarray)
    table.masks[0, : found.size] = found[0]
    return FilledTable([0], 1), seconds


class _Helper:
    """A thread that does what it is given, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mask batches", daemon=True)
        self._thread.start()
        # The library must not ask for Python's lock when the interpreter is gone.
        atexit.register(self._stop)

    def submit(self, job: Callable[[], None]) -> None:
        """Has the thread call a function, which must not raise."""
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()


@cache
def helper() -> _Helper:
    """Returns the thread that makes masks together; it is one for all models of the process."""
    return _Helper()
