"""Makes the token masks of a step, so that a slow constraint delays no other sequence.

A constraint is quick if its last masks took little time. All quick constraints get their tokens
together, and their masks are made together on several cores. The calling thread makes these masks
itself if they are few; otherwise another thread makes them meanwhile. Each slow constraint's mask
is made in a separate thread. A step waits for masks only for a bounded time.

Before new masks are begun, any pass that samples with a table of masks must have ended, because the
memory of earlier tables is used again.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from msgspec.structs import replace

from mlxpool.worker.constraints import mask_batch
from mlxpool.worker.constraints.constraint import Constraint, MaskRecord
from mlxpool.worker.constraints.mask_jobs import (
    Batch,
    Found,
    MadeMasks,
    SingleMask,
    helper,
    timed_mask,
)
from mlxpool.worker.constraints.mask_table import MaskTable, new_table, words_of_mask

QUICK = 0.001  # seconds of processor time; most masks take a hundredth of it
QUICK_MASKS = 4  # consecutive quick masks, after which a constraint counts as quick
MAX_WAIT = 0.005  # seconds that a step waits for masks; the library's bounds are about as long
IDLE_WAIT = 0.02  # seconds of a wait for a mask if there is nothing else to do
BEGIN_WAIT = 0.001  # seconds of a wait for another thread to begin
THREADS = 4
FEW = 2  # least value of `few`, the quick masks that the calling thread makes itself
LEAST_LINES = 8  # the fewest lines of a table


class Masks:
    """Makes the masks of all constrained sequences of an engine; the compute thread uses it.

    A constraint has at most one job at a time.
    """

    def __init__(self, memory: Callable[[int], MaskTable | None] = lambda lines: None) -> None:
        """`memory` is a function that returns a table for `lines` masks.

        The table is in memory that the device reads directly. None: there is no such memory.
        """
        self._memory = memory
        self._free: list[MaskTable] = []
        self._unread: list[Batch] = []  # batches with unread masks
        self._ahead: Batch | None = None  # the batch with tokens that are not committed yet
        self._threads: ThreadPoolExecutor | None = None
        self._news = threading.Event()  # a mask was made since the last check in `wait`

    def is_quick(self, constraint: Constraint) -> bool:
        """Returns whether a constraint's tokens and masks are processed in batches with others."""
        return constraint.record.quick >= QUICK_MASKS and constraint.small

    def is_made(self, constraint: Constraint) -> bool:
        """Returns whether the constraint's mask is made; True if no mask was begun."""
        making = constraint.record.making
        return making is None or making.is_made()

    def begin(self, constraint: Constraint) -> None:
        """Begins to make a mask in another thread; meanwhile nothing may use the constraint."""
        if constraint.record.making is not None:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="masks")
        future = self._threads.submit(timed_mask, constraint)
        constraint.record.making = SingleMask(future)
        future.add_done_callback(lambda future: self._news.set())

    # ---- tokens ----------------------------------------------------------------------------------

    def take_ahead(self, tokens: Sequence[tuple[Constraint, int]], least: int) -> None:
        """Begins to give quick constraints their next tokens in another thread, for a later `take`.

        The thread also makes the masks after these tokens, except for answers that are complete or
        have `least` or more forced tokens. Until `take` is called, nothing else may use the
        constraints.
        """
        quick = self._taking(tokens)
        if quick:
            self._ahead = batch = Batch(
                self._table(quick[0][0], len(quick)),
                tokens=quick,
                least=least,
                made=self._news.set,
            )
            for constraint, _ in quick:
                constraint.record.making = batch
            helper().submit(batch.run)

    def take(self, tokens: Sequence[tuple[Constraint, int]], least: int) -> None:
        """Gives quick constraints their tokens together, unless `take_ahead` already did.

        The caller then commits each token by Constraint.take. If there are too many masks for the
        calling thread, this method also begins to make the masks in another thread, as `take_ahead`
        does.
        """
        batch, self._ahead = self._ahead, None
        if batch is not None:
            fill = batch.run_take()
            for constraint, _ in batch.tokens:
                constraint.record.making = None
            self._begin(batch, fill=fill)
            return
        quick = self._taking(tokens)
        taken = mask_batch.take_together(quick, find=True) if quick else []
        drawing = [constraint for constraint in taken if constraint.draws_next(least)]
        if len(drawing) > few():
            self._begin_batch(drawing)

    def give_back(self) -> None:
        """Removes tokens of `take_ahead` from constraints, because they will not be committed."""
        batch, self._ahead = self._ahead, None
        if batch is None:
            return
        if batch.run_take():
            batch.constraints = ()
            batch.run_fill()
        while not batch.wait(monotonic() + MAX_WAIT):
            pass  # the library's limits bound the time
        self._free.append(batch.table)
        for constraint, _ in batch.tokens:
            constraint.record.making = None
            constraint.give_back()

    def _taking(self, tokens: Sequence[tuple[Constraint, int]]) -> list[tuple[Constraint, int]]:
        """Returns the constraints that can take their tokens in a batch, each with its token."""
        return [
            pair
            for pair in tokens
            if pair[0].record.quick >= QUICK_MASKS
            and pair[0].record.making is None
            and pair[0].takes_ahead
            and pair[0].small
        ]

    # ---- masks -----------------------------------------------------------------------------------

    def begin_early(self, constraints: Sequence[Constraint]) -> None:
        """Begins to make masks of quick constraints, before the pass whose draw needs them.

        Another thread makes the masks as soon as the calling thread releases the GIL.
        """
        early = [
            constraint
            for constraint in constraints
            if constraint.record.making is None and self.is_quick(constraint)
        ]
        if early:
            self._begin_batch(early, waits=False)

    def make(self, constraints: Sequence[Constraint]) -> MadeMasks:
        """Returns the masks of these constraints that are made in time.

        These masks are valid until masks are begun again.
        """
        here: list[Constraint] = []
        for constraint in constraints:
            if constraint.record.making is None:
                if self.is_quick(constraint):
                    here.append(constraint)
                else:
                    self.begin(constraint)
        if here:
            self._begin_batch(here, here=len(here) <= few())
        end = monotonic() + MAX_WAIT
        makers = dict.fromkeys([constraint.record.making for constraint in constraints])
        made = {maker: maker.wait(end) for maker in makers}
        masks = self._collected(constraints, made)
        late = [constraint for constraint in constraints if constraint.record.late]
        return replace(masks, late=late) if late else masks

    def wait(self) -> None:
        """Waits, for a bounded time, until a mask is made.

        Returns at once if a mask was made since the last call.
        """
        self._news.wait(IDLE_WAIT)
        self._news.clear()

    def _begin_batch(
        self, constraints: list[Constraint], *, here: bool = False, waits: bool = True
    ) -> None:
        """Makes masks together, in this thread (`here`) or another.

        `waits`: the calling thread gives up the GIL and waits until the other thread has begun.
        """
        table = self._table(constraints[0], len(constraints))
        batch = Batch(table, constraints=constraints, made=self._news.set)
        self._unread.append(batch)
        for constraint in constraints:
            constraint.record.making = batch
        if here:
            batch.run()
        elif waits:
            self._run_elsewhere(batch.run)
        else:
            helper().submit(batch.run)

    def _begin(self, batch: Batch, *, fill: bool) -> None:
        """Registers a batch whose tokens were appended; with `fill`, begins to make its masks."""
        for constraint in batch.constraints:
            constraint.record.making = batch
        if not batch.constraints:
            self._free.append(batch.table)
            return
        self._unread.append(batch)
        if fill:
            self._run_elsewhere(batch.run_fill)

    def _run_elsewhere(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Makes masks in the other thread; waits, without the GIL, until that thread has begun."""
        begun = allocate_lock()
        begun.acquire()

        def make() -> None:
            try:
                run(begun.release)
            finally:
                if begun.locked():
                    begun.release()

        helper().submit(make)
        begun.acquire(timeout=BEGIN_WAIT)  # the library may be busy with masks that take long

    def _table(self, constraint: Constraint, lines: int) -> MaskTable:
        """Returns a table for `lines` masks of a constraint's vocabulary."""
        self._drop_unwanted()
        words = words_of_mask(constraint.tokens)
        for place, table in enumerate(self._free):
            if len(table.words) >= lines and table.words.shape[1] == words:
                return self._free.pop(place)
        device_table = self._memory(lines)
        if device_table is not None and device_table.words.shape[1] == words:
            return device_table
        return new_table(max(LEAST_LINES, 1 << (lines - 1).bit_length()), words)

    def _drop_unwanted(self) -> None:
        """Drops each batch whose answers have all ended, because nothing will read its masks.

        Otherwise the batch would keep its table, and the grammars of the answers.
        """
        for batch in [*self._unread]:
            if batch.is_made() and all(constraint.ended for constraint in batch.constraints):
                self._read(batch)

    def _collected(
        self, constraints: Sequence[Constraint], made: Mapping[Batch | SingleMask, bool]
    ) -> MadeMasks:
        """Returns the finished masks of batches and single jobs in one table."""
        maker = next(iter(made))
        if len(made) > 1 or not made[maker] or not isinstance(maker, Batch):
            return self._merged(constraints, made)
        if len(maker.constraints) > len(constraints):
            return self._merged(constraints, made)
        self._read(maker)
        return maker.result()

    def _merged(
        self, constraints: Sequence[Constraint], made: Mapping[Batch | SingleMask, bool]
    ) -> MadeMasks:
        """Returns the masks of several jobs in one table.

        The table is that of the largest batch if it has room, else another table. Masks of
        constraints that are not in `constraints` are copied, and kept as finished jobs.
        """
        batches = [job for job, is_made in made.items() if is_made and isinstance(job, Batch)]
        base = max(batches, key=lambda batch: len(batch.constraints), default=None)
        others = [constraint for constraint in constraints if constraint.record.making is not base]
        if base is not None and not base.has_room(len(others)):
            base, others = None, [*constraints]
        if base is None:
            first = MadeMasks(self._table(constraints[0], len(constraints)))
        else:
            first = base.result()
        table, used, asked = first.table, first.used, set(constraints)
        lines = {
            constraint: line for constraint, line in first.lines.items() if constraint in asked
        }
        failed = {
            constraint: error for constraint, error in first.failed.items() if constraint in asked
        }
        kept = _kept(batches, asked)
        for constraint, mask in self._made_by(made, others):
            if isinstance(mask, Exception):
                failed[constraint] = mask
            elif isinstance(mask, int):
                lines[constraint] = mask
            else:
                table.masks[used, : mask.size] = mask[0]
                lines[constraint] = used
                used += 1
        for batch in batches:
            self._read(batch)
        for constraint, single in kept:
            constraint.record.making = single
        if base is None:
            self._free.append(table)
        return MadeMasks(table, used, lines, failed)

    def _made_by(
        self, made: Mapping[Batch | SingleMask, bool], constraints: Sequence[Constraint]
    ) -> Iterator[tuple[Constraint, Found]]:
        """Yields each of these constraints whose mask is made, with its mask."""
        places = {
            constraint: at
            for maker in made
            if isinstance(maker, Batch)
            for at, constraint in enumerate(maker.constraints)
        }
        for constraint in constraints:
            record = constraint.record
            maker = record.making
            if not made[maker]:
                record.late = True
            elif isinstance(maker, Batch):
                yield constraint, maker.found(places[constraint])
            else:
                mask, seconds = maker.result()
                yield constraint, mask
                record.making = None
                self._judge(record, quick=seconds <= QUICK)

    def _read(self, batch: Batch) -> None:
        """Records that a batch was read: its table is free, its constraints may get new jobs."""
        self._unread.remove(batch)
        quick = batch.seconds <= QUICK and batch.error is None
        for constraint in batch.constraints:
            record = constraint.record
            record.making = None
            if record.late or not quick:
                self._judge(record, quick=quick)
        self._free.append(batch.table)

    def _judge(self, record: MaskRecord, *, quick: bool) -> None:
        record.quick = record.quick + 1 if quick else 0
        record.late = record.late and not quick


def _kept(
    batches: Sequence[Batch], asked: Collection[Constraint]
) -> list[tuple[Constraint, SingleMask]]:
    """Returns copies of masks that later steps may still need, as finished jobs.

    These are the masks of the constraints that are not in `asked` and whose answers have not ended.
    """
    return [
        (constraint, SingleMask.kept(batch.found(place)))
        for batch in batches
        for place, constraint in enumerate(batch.constraints)
        if constraint not in asked and not constraint.ended
    ]


def few() -> int:
    """Returns how many quick masks the calling thread makes itself, at most.

    This is at least the number of threads, because one mask on each thread takes only as long as
    one mask alone.
    """
    return max(FEW, mask_batch.threads())
