"""Makes the masks of a step, so that a constraint which takes long delays no other row.

While the masks of a constraint are quick, it is given its tokens together with others, and their
masks are made together on several cores: by the calling thread, if there are few, otherwise while
that goes on. All others are made in threads of their own. A step waits for a bounded time.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import monotonic, thread_time

from mlxpool.worker.constraints import mask_batch
from mlxpool.worker.constraints.constraint import Constraint, Words
from mlxpool.worker.constraints.mask_batch import Table

QUICK = 0.001  # seconds of processor time; most masks take a hundredth of that
QUICK_MASKS = 4  # one after the other, after which a constraint is taken to be quick
MAX_WAIT = 0.005  # seconds that a step waits for masks; the library's bounds are of that size
IDLE_WAIT = 0.02  # seconds that are waited for a mask when there is nothing else to do
BEGIN_WAIT = 0.001  # seconds that are waited for another thread to begin
THREADS = 4
FEW = 2  # quick constraints whose masks are made in the calling thread, or as many as cores

Found = Words | Exception


@dataclass(eq=False, slots=True)
class Batch:
    """Masks that are made together in another thread.

    It holds no constraint, so that those of answers that have ended can go. `unread`: masks that
    were not handed out; with 0 the memory of the table may be used again. When it is made, `found`
    has the masks, and `quick` says whether none of them can have taken long.
    """

    made: Future[tuple[list[Found], float]]
    unread: int
    table: Table | None = None
    found: list[Found] | None = None
    quick: bool = False

    def is_made(self) -> bool:
        """Whether all masks are made."""
        if self.found is not None:
            return True
        if not self.made.done():
            return False
        try:
            self.found, seconds = self.made.result()
        except Exception as error:
            self.found, self.quick = [error] * self.unread, False
        else:
            self.quick = seconds <= QUICK
        return True


class Masks:
    """Used by one thread. Each constraint has at most one mask that is being made."""

    def __init__(self) -> None:
        self._running: list[Batch] = []  # some may be made by now
        self._newest: Batch | None = None  # with a table
        self._threads: ThreadPoolExecutor | None = None

    def is_quick(self, constraint: Constraint) -> bool:
        """Whether it takes tokens together with others, and its forced tokens are found then."""
        return constraint.record.quick >= QUICK_MASKS and constraint.small

    def is_late(self, constraint: Constraint) -> bool:
        """Whether a mask was late since the last quick one: steps had better not wait for more."""
        return constraint.record.late

    def is_made(self, constraint: Constraint) -> bool:
        """Whether no mask of the constraint is being made."""
        making = constraint.record.making
        return making is None or making[0].is_made()

    def begin(self, constraint: Constraint) -> None:
        """Begins to make a mask in another thread; until it is made, nobody uses the constraint."""
        if constraint.record.making is None:
            self._submit([constraint], lambda: _timed([constraint]))

    def take(self, tokens: Sequence[tuple[Constraint, int]]) -> list[Constraint]:
        """Gives quick constraints their tokens ahead of Constraint.take. Returns these."""
        quick = [
            (one, token)
            for one, token in tokens
            if self.is_quick(one) and one.record.making is None and one.takes_ahead
        ]
        return mask_batch.take_together(quick, find=True) if quick else []

    def begin_together(self, constraints: Sequence[Constraint]) -> None:
        """Begins the masks of quick constraints, if they are too many for the calling thread."""
        if len(constraints) > few():
            self._begin_batch([*constraints])

    def begin_early(self, constraints: Sequence[Constraint]) -> None:
        """Begins the masks of quick constraints, which are wanted after the next pass was begun.

        The other thread begins when this one waits for something.
        """
        wanted = [one for one in constraints if one.record.making is None and self.is_quick(one)]
        if wanted:
            self._begin_batch(wanted, waits=False)

    def _begin_batch(self, constraints: list[Constraint], *, waits: bool = True) -> None:
        """Has another thread make masks together.

        `waits`: it is given Python's lock until it has begun.
        """
        table, begun = self._table(constraints), allocate_lock()
        begun.acquire()

        def make() -> tuple[list[Found], float]:
            try:
                return _together(constraints, table, begun.release)
            finally:
                if begun.locked():
                    begun.release()

        batch = self._submit(constraints, make)
        batch.table = table
        self._newest = batch
        if waits:
            begun.acquire(timeout=BEGIN_WAIT)  # the threads may all make masks that take long

    def _table(self, constraints: Sequence[Constraint]) -> Table:
        """Returns memory for masks: that of the newest batch, if all of its masks were used."""
        newest, tokens = self._newest, constraints[0].tokens
        if newest is not None and not newest.unread and newest.table is not None:
            table = newest.table
            if len(table) >= len(constraints) and newest.is_made():
                return table
        return mask_batch.new_table(len(constraints), tokens)

    def _submit(
        self, constraints: Sequence[Constraint], make: Callable[[], tuple[list[Found], float]]
    ) -> Batch:
        """Has another thread make masks."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="masks")
        batch = Batch(self._threads.submit(make), len(constraints))
        for place, one in enumerate(constraints):
            one.record.making = batch, place
        self._running = [one for one in self._running if not one.made.done()]
        self._running.append(batch)
        return batch

    def make(self, constraints: Collection[Constraint]) -> dict[Constraint, Found]:
        """Returns the masks of these constraints, or what making one raised.

        Those that are not made in time are left out. A mask is good until the next call.
        """
        here: list[Constraint] = []
        others: list[Constraint] = []
        for one in constraints:
            if one.record.making is not None:
                others.append(one)
            elif self.is_quick(one):
                here.append(one)
            else:
                self.begin(one)
                others.append(one)
        if len(here) > few():
            self._begin_batch(here)
            others += here
            here = []
        end = monotonic() + MAX_WAIT
        found = self._make_here(here)
        if others:
            _wait_for(others, end)
        for one in others:
            record = one.record
            assert record.making is not None
            batch, place = record.making
            if batch.is_made():
                found[one] = batch.found[place]
                record.making = None
                batch.unread -= 1
                self._judge(one, quick=batch.quick)
            else:
                record.late = True
        return found

    def wait(self) -> None:
        """Waits until one more mask is made, for a bounded time; not if none is being made."""
        waited = {batch.made for batch in self._running if not batch.made.done()}
        wait(waited, timeout=IDLE_WAIT, return_when=FIRST_COMPLETED)

    def _make_here(self, constraints: list[Constraint]) -> dict[Constraint, Found]:
        """Makes the masks of a few quick constraints."""
        if not constraints:
            return {}
        if len(constraints) == 1:
            found, seconds = _timed(constraints)
        else:
            found, seconds = _together(constraints)
        for one in constraints:
            self._judge(one, quick=seconds <= QUICK)
        return dict(zip(constraints, found, strict=True))

    def _judge(self, constraint: Constraint, *, quick: bool) -> None:
        record = constraint.record
        record.quick = record.quick + 1 if quick else 0
        if quick:
            record.late = False


def _wait_for(constraints: Sequence[Constraint], end: float) -> None:
    """Waits until the masks of constraints are made, at most until a time."""
    batches = {one.record.making[0] for one in constraints if one.record.making is not None}
    waited = [batch.made for batch in batches if not batch.made.done()]
    if waited:
        wait(waited, timeout=max(0.0, end - monotonic()))


def few() -> int:
    """Returns for how many quick constraints the calling thread waits until their masks are made.

    No more than there are threads to make them, so that it waits for one mask of each.
    """
    return max(FEW, mask_batch.threads())


def _timed(constraints: Sequence[Constraint]) -> tuple[list[Found], float]:
    """Returns the mask of one constraint, and the seconds of processor time that it took."""
    (constraint,) = constraints
    began = thread_time()
    try:
        found: Found = constraint.mask()
    except Exception as error:
        found = error
    return [found], thread_time() - began


def _together(
    constraints: list[Constraint],
    table: Table | None = None,
    begins: Callable[[], None] = lambda: None,
) -> tuple[list[Found], float]:
    """Returns the masks of constraints that have been quick.

    The seconds are those that one may have taken: where all took too long, each of them has to
    show that it is quick by itself.
    """
    began = monotonic()
    found = mask_batch.masks_of(constraints, constraints[0].tokens, table, begins)
    seconds = monotonic() - began
    return found, 0.0 if seconds <= MAX_WAIT else seconds
