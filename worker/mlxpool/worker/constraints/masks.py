"""Makes the masks of a step, so that a constraint which takes long delays no other row.

While the masks of a constraint are quick, they are made in the calling thread, or together with
others on several cores; otherwise in threads of their own. A step waits for a bounded time.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from time import monotonic, thread_time
from weakref import WeakKeyDictionary, WeakSet

from mlxpool.worker.constraints import mask_batch
from mlxpool.worker.constraints.constraint import Constraint, Words

QUICK = 0.001  # seconds of processor time; most masks take a hundredth of that
QUICK_MASKS = 4  # one after the other, after which a constraint is taken to be quick
MAX_WAIT = 0.005  # seconds that a step waits for masks; the library's bounds are of that size
IDLE_WAIT = 0.02  # seconds that are waited for a mask when there is nothing else to do
THREADS = 4
FEW = 2  # quick constraints whose masks are made in the calling thread

Found = Words | Exception
# Masks that are made together, and the seconds that the slowest one may have taken. It holds no
# constraint, so that those of answers that have ended can go.
Batch = Future[tuple[list[Found], float]]
Making = tuple[Batch, int]  # and the place of the constraint's mask in it


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
        return making is None or making[0].done()

    def begin(self, constraint: Constraint) -> None:
        """Begins to make a mask in another thread; until it is made, nobody uses the constraint."""
        if constraint not in self._making:
            self._submit([constraint])

    def _submit(self, constraints: list[Constraint]) -> None:
        """Has another thread make masks together."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="masks")
        batch = self._threads.submit(_timed if len(constraints) == 1 else _together, constraints)
        for place, one in enumerate(constraints):
            self._making[one] = batch, place

    def make(self, constraints: Collection[Constraint]) -> dict[Constraint, Found]:
        """Returns the masks of these constraints, or what making one raised.

        Those that are not made in time are left out.
        """
        quick = [one for one in constraints if self.is_quick(one) and one not in self._making]
        for one in constraints:
            if not self.is_quick(one):
                self.begin(one)
        if len(quick) > FEW:
            self._submit(quick)
        began = monotonic()
        here = [one for one in constraints if one not in self._making]
        found: dict[Constraint, Found] = {one: self._make_here(one) for one in here}
        others = [one for one in constraints if one not in found]
        if others:
            left = max(0.0, began + MAX_WAIT - monotonic())
            wait({self._making[one][0] for one in others}, timeout=left)
        for one in others:
            if self.is_made(one):
                found[one] = self._made(one)
            else:
                self._late.add(one)
        return found

    def wait(self) -> None:
        """Waits until one more mask is made, for a bounded time; not if none is being made."""
        making = {batch for batch, _ in self._making.values() if not batch.done()}
        wait(making, timeout=IDLE_WAIT, return_when=FIRST_COMPLETED)

    def _make_here(self, constraint: Constraint) -> Found:
        (found,), seconds = _timed([constraint])
        self._judge(constraint, seconds)
        return found

    def _made(self, constraint: Constraint) -> Found:
        """Returns a mask that another thread has made, or what it raised."""
        batch, place = self._making.pop(constraint)
        try:
            found, seconds = batch.result()
        except Exception as error:
            return error
        self._judge(constraint, seconds)
        return found[place]

    def _judge(self, constraint: Constraint, seconds: float) -> None:
        quick = seconds <= QUICK
        self._quick[constraint] = self._quick.get(constraint, 0) + 1 if quick else 0
        if quick:
            self._late.discard(constraint)


def _timed(constraints: list[Constraint]) -> tuple[list[Found], float]:
    """Returns the mask of one constraint, and the seconds of processor time that it took."""
    (constraint,) = constraints
    began = thread_time()
    try:
        found: Found = constraint.mask()
    except Exception as error:
        found = error
    return [found], thread_time() - began


def _together(constraints: list[Constraint]) -> tuple[list[Found], float]:
    """Returns the masks of constraints that have been quick.

    The seconds are those that one may have taken: where all took too long, each of them has to
    show that it is quick by itself.
    """
    began = monotonic()
    found = mask_batch.masks_of(constraints, constraints[0].tokens)
    seconds = monotonic() - began
    return found, 0.0 if seconds <= MAX_WAIT else seconds
