"""Makes the masks of a step, so that a constraint which takes long delays no other row.

The masks of a constraint are made in the calling thread while they are quick, and in threads of
their own otherwise. For these a step waits for a bounded time.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from time import monotonic, thread_time
from weakref import WeakKeyDictionary, WeakSet

from mlxpool.worker.constraints.constraint import Constraint, Words

QUICK = 0.001  # seconds of processor time; most masks take a hundredth of that
QUICK_MASKS = 4  # one after the other, after which a constraint is taken to be quick
MAX_WAIT = 0.005  # seconds that a step waits for masks; the library's bounds are of that size
IDLE_WAIT = 0.02  # seconds that are waited for a mask when there is nothing else to do
THREADS = 4

Found = Words | Exception
Making = Future[tuple[Words, float]]  # the mask and the seconds of processor time that it took


class Masks:
    """Used by one thread. Each constraint has at most one mask that is being made."""

    def __init__(self) -> None:
        # Those of answers that have ended go with them.
        self._quick: WeakKeyDictionary[Constraint, int] = WeakKeyDictionary()  # quick masks so far
        self._making: WeakKeyDictionary[Constraint, Making] = WeakKeyDictionary()
        self._late: WeakSet[Constraint] = WeakSet()
        self._threads: ThreadPoolExecutor | None = None

    def is_quick(self, constraint: Constraint) -> bool:
        """Whether its masks are made in the calling thread, and its forced tokens found there."""
        return self._quick.get(constraint, 0) >= QUICK_MASKS and constraint.small

    def is_late(self, constraint: Constraint) -> bool:
        """Whether a mask was late since the last quick one: steps had better not wait for more."""
        return constraint in self._late

    def is_made(self, constraint: Constraint) -> bool:
        """Whether no mask of the constraint is being made."""
        making = self._making.get(constraint)
        return making is None or making.done()

    def begin(self, constraint: Constraint) -> None:
        """Begins to make a mask in another thread; until it is made, nobody uses the constraint."""
        if constraint in self._making:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="masks")
        self._making[constraint] = self._threads.submit(_timed, constraint)

    def make(self, constraints: Collection[Constraint]) -> dict[Constraint, Found]:
        """Returns the masks of these constraints, or what making one raised.

        Those that are not made in time are left out.
        """
        others = [one for one in constraints if not self.is_quick(one)]
        for one in others:
            self.begin(one)
        began = monotonic()
        found: dict[Constraint, Found] = {}
        for one in constraints:
            if one not in self._making:
                found[one] = self._make_here(one)
        if others:
            left = max(0.0, began + MAX_WAIT - monotonic())
            wait([self._making[one] for one in others], timeout=left)
        for one in others:
            if self._making[one].done():
                found[one] = self._made(one)
            else:
                self._late.add(one)
        return found

    def wait(self) -> None:
        """Waits until one more mask is made, for a bounded time; not if none is being made."""
        making = [one for one in self._making.values() if not one.done()]
        wait(making, timeout=IDLE_WAIT, return_when=FIRST_COMPLETED)

    def _make_here(self, constraint: Constraint) -> Found:
        try:
            words, seconds = _timed(constraint)
        except Exception as error:
            return error
        self._judge(constraint, seconds)
        return words

    def _made(self, constraint: Constraint) -> Found:
        """Returns a mask that another thread has made, or what it raised."""
        try:
            words, seconds = self._making.pop(constraint).result()
        except Exception as error:
            return error
        self._judge(constraint, seconds)
        return words

    def _judge(self, constraint: Constraint, seconds: float) -> None:
        quick = seconds <= QUICK
        self._quick[constraint] = self._quick.get(constraint, 0) + 1 if quick else 0
        if quick:
            self._late.discard(constraint)


def _timed(constraint: Constraint) -> tuple[Words, float]:
    """Returns a mask, and the seconds of processor time that it took."""
    began = thread_time()
    words = constraint.mask()
    return words, thread_time() - began
