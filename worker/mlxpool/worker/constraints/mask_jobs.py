"""The jobs that make masks of many constraints or of one, and the thread that runs batches.

The result of a job has a table of masks, and the index of each constraint's line in the table.
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

# Processor seconds that jointly made masks may take while each still counts as quick: about as long
# as one mask may take within the library's bounds. USUAL: allowed seconds for each of many masks.
TOGETHER = 0.005
USUAL = 0.0002
Found = Words | int | Exception  # a mask [1, words], the line of a row without a mask, or an error


class MadeMasks(Struct, frozen=True):
    """The result of mask jobs: a table, and each constraint's line (row index) in it.

    A negative line: the constraint needs no mask, see mask_table.only. `used`: the number of lines
    that have a mask. `failed`: the errors of masks that could not be made. `late`: constraints with
    a mask that was not ready in time, and with no quickly made mask since then. Some of their masks
    may be in `table`.
    """

    table: MaskTable
    used: int = 0
    lines: Mapping[Constraint, int] = field(default_factory=dict)
    failed: Mapping[Constraint, Exception] = field(default_factory=dict)
    late: Sequence[Constraint] = ()


class Batch:
    """A job for several constraints: gives each its next token, then makes all their masks.

    The first thread that calls `run`, `run_take` or `run_fill` does the work; other threads wait.
    The thread that created the batch reads the attributes afterwards: the `constraints` with masks,
    the `seconds` of the work, and the `error` that made all masks fail.
    """

    def __init__(
        self,
        table: MaskTable,
        constraints: Sequence[Constraint] = (),
        tokens: Sequence[tuple[Constraint, int]] = (),
        least: int = 0,
        made: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes either `constraints` or `tokens`.

        With `tokens`, each mask is for the position after a constraint's token. A constraint gets
        no mask if its answer is complete, or if at least `least` tokens are forced. `made` is
        called in the thread that has made the masks.
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
        self._taking = allocate_lock()  # locked until tokens are appended
        self._filling = allocate_lock()  # locked until masks are made
        self._taking.acquire()
        self._filling.acquire()

    def run(self, begins: Callable[[], None] = lambda: None) -> None:
        """Appends the tokens and makes the masks, unless another thread does this.

        `begins`: see mask_batch.fill_table.
        """
        if self._unclaimed.acquire(blocking=False):
            self._take()
            self._fill(begins)

    def run_take(self) -> bool:
        """Appends the tokens, or waits until another thread has appended them.

        Returns whether `run_fill` has to be called.
        """
        if self._unclaimed.acquire(blocking=False):
            self._take()
            return True
        with self._taking:
            return False

    def run_fill(self, begins: Callable[[], None] = lambda: None) -> None:
        """Makes the masks, after `run_take` has returned True."""
        self._fill(begins)

    def is_made(self) -> bool:
        """Returns whether all masks are made."""
        return not self._filling.locked()

    def wait(self, end: float) -> bool:
        """Waits until the masks are made, at most until `end`. Returns whether they are made."""
        if not self._filling.locked():
            return True
        if not self._filling.acquire(timeout=max(0.0, end - monotonic())):
            return False
        self._filling.release()
        return True

    def has_room(self, others: int) -> bool:
        """Returns whether the table has lines left for `others` masks that other jobs have made."""
        return self.error is None and self.filled.used + others <= len(self.table.words)

    def result(self) -> MadeMasks:
        """Returns all masks; call it only after they are made."""
        if self.error is not None:
            return MadeMasks(self.table, failed=dict.fromkeys(self.constraints, self.error))
        lines = dict(zip(self.constraints, self.filled.lines, strict=True))
        failed = {self.constraints[at]: error for at, error in self.filled.failed.items()}
        for constraint in failed:
            del lines[constraint]
        return MadeMasks(self.table, self.filled.used, lines, failed)

    def found(self, place: int) -> Found:
        """Returns the result for the constraint at index `place` of `constraints`.

        The result is a mask [1, words], the negative line of a row that needs no mask, or an error.
        A mask is valid only until the table is used again.
        """
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
                self.constraints = [
                    constraint for constraint in taken if constraint.draws_next(self._least)
                ]
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
        """Makes the masks, and sets `seconds`, by which Masks decides which constraints are quick.

        For a single mask, `seconds` is the processor time of the mask. For several masks it is 0,
        so that their constraints stay quick. If several masks took unusually long together, it is
        the processor time of all masks.
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
    """A job for the mask of one constraint: a thread makes the mask, or has already made it."""

    def __init__(self, made: Future[tuple[Found, float]]) -> None:
        self._future = made

    @classmethod
    def kept(cls, mask: Found) -> SingleMask:
        """Returns a finished job with a copy of `mask`."""
        future: Future[tuple[Found, float]] = Future()
        future.set_result((mask.copy() if isinstance(mask, np.ndarray) else mask, 0.0))
        return cls(future)

    def is_made(self) -> bool:
        """Returns whether the mask is made."""
        return self._future.done()

    def wait(self, end: float) -> bool:
        """Waits until the mask is made, at most until `end`. Returns whether the mask is made."""
        try:
            self._future.exception(max(0.0, end - monotonic()))
        except TimeoutError:
            return False
        return True

    def result(self) -> tuple[Found, float]:
        """Returns the mask, and the seconds of processor time for it."""
        return self._future.result()


def timed_mask(constraint: Constraint) -> tuple[Found, float]:
    """Returns the mask of one constraint, and the seconds of processor time for it."""
    began = thread_time()
    try:
        mask: Found = constraint.mask()
    except BaseException as error:
        mask = mask_batch.as_exception(error)
    return mask, thread_time() - began


def _filled_by(constraint: Constraint, table: MaskTable) -> tuple[FilledTable, float]:
    """Writes the mask of one constraint into a table.

    Returns the result, and the seconds of processor time.
    """
    mask, seconds = timed_mask(constraint)
    if isinstance(mask, Exception):
        return FilledTable([0], 0, {0: mask}), seconds
    assert isinstance(mask, np.ndarray)
    table.masks[0, : mask.size] = mask[0]
    return FilledTable([0], 1), seconds


class _Helper:
    """A thread that runs its jobs one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mask batches", daemon=True)
        self._thread.start()
        # The library must not acquire the GIL after the interpreter has ended.
        atexit.register(self._stop)

    def submit(self, job: Callable[[], None]) -> None:
        """Calls a function in the thread; the function must not raise."""
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()


@cache
def helper() -> _Helper:
    """Returns the thread that runs jobs of masks; all models of the process share it."""
    return _Helper()
