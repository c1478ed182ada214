"""The store's thread.

It commits waiting operations in one transaction, then hands out the results.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct

from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import (
    OutOfSpace,
    Refused,
    Result,
    StoreError,
    StoreFenced,
    StoreUnusable,
)
from mlxpool.broker.store.sql.sql_store import Opener

GATHER = 0.1  # seconds for which operations wait for more, if none is urgent
ADMIT_SHARE = 2  # new work may take 1 / ADMIT_SHARE of the inbox
OPERATION_BYTES = 512  # bytes that an operation counts in addition to its data


class Bounds(Struct, frozen=True):
    """Bounds on the waiting operations, and on the group of operations in one transaction."""

    operations: int = 4096
    bytes: int = 64 * 1024 * 1024
    group_operations: int = 512
    group_bytes: int = 8 * 1024 * 1024


class Load(Struct, frozen=True):
    """The number and bytes of the operations in the inbox and in the present transaction."""

    operations: int
    bytes: int


class Inbox:
    """The queue of operations.

    The broker's loop adds operations without blocking; the store's thread takes them.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._changed = threading.Condition()
        self._waiting: deque[Operation] = deque()
        self._urgent = 0  # number of waiting urgent operations
        self._operations = self._bytes = 0  # of operations from `offer` until `done`
        self._since = 0.0  # arrival of the oldest waiting operation
        self._closed: Refused | None = None
        self._paused: Refused | None = None

    def offer(self, operation: Operation) -> Refused | None:
        """Adds an operation. Returns a refusal if the inbox is full, closed or paused."""
        size = operation.size + OPERATION_BYTES
        with self._changed:
            refused = self._closed or self._paused
            if refused is not None:
                return refused
            share = ADMIT_SHARE if operation.admits else 1
            count, room = self._bounds.operations // share, self._bounds.bytes // share
            too_many = self._operations + 1 > count
            too_large = self._bytes + size > room and self._operations > 0
            if too_many or too_large:
                return self._busy()
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(operation)
            self._operations += 1
            self._bytes += size
            if operation.urgent:
                self._urgent += 1
            if operation.urgent or len(self._waiting) == 1:
                self._changed.notify()
            return None

    def _busy(self) -> Refused:
        return Refused(
            "store_busy",
            f"{self._operations} operations of {self._bytes} bytes wait for the disk, at most"
            f" {self._bounds.operations} of {self._bounds.bytes} bytes, half of it for new work;"
            " send it again later",
        )

    def take(self, until: float | None = None) -> list[Operation]:
        """Waits for operations, and returns a group of them.

        Returns an empty group at the time `until`, or after `close`.

        Without urgent operations it waits until the oldest operation has waited for GATHER seconds,
        or a group is full.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                ready_at = self._since + (0.0 if self._urgent or self._closed else GATHER)
                if self._waiting and (now >= ready_at or self._enough()):
                    return self._group()
                if (self._closed and not self._waiting) or (until is not None and now >= until):
                    return []
                ends = [ready_at] if self._waiting else []
                ends += [] if until is None else [until]
                self._changed.wait(max(0.0, min(ends) - now) if ends else None)

    def _enough(self) -> bool:
        return len(self._waiting) >= self._bounds.group_operations

    def _group(self) -> list[Operation]:
        group: list[Operation] = []
        size = 0
        while self._waiting and len(group) < self._bounds.group_operations:
            more = self._waiting[0].size
            if group and size + more > self._bounds.group_bytes:
                break
            operation = self._waiting.popleft()
            self._urgent -= operation.urgent
            group.append(operation)
            size += more
        self._since = time.monotonic() if self._waiting else 0.0
        return group

    def done(self, operations: Sequence[Operation]) -> None:
        """Frees the inbox space of operations whose results are known."""
        with self._changed:
            self._operations -= len(operations)
            self._bytes -= sum(operation.size + OPERATION_BYTES for operation in operations)

    def load(self) -> Load:
        """Returns the load, the present transaction included."""
        with self._changed:
            return Load(self._operations, self._bytes)

    def close(self, why: Refused) -> None:
        """Refuses new operations. `take` still returns the waiting operations."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify()

    def empty(self, why: Refused) -> list[Operation]:
        """Removes and returns all waiting operations. New operations are refused until `open`."""
        with self._changed:
            self._paused = why
            waiting = list(self._waiting)
            self._waiting.clear()
            self._urgent = 0
            return waiting

    def open(self) -> None:
        """Accepts operations again."""
        with self._changed:
            self._paused = None

    def wait(self, seconds: float) -> None:
        """Waits for this many seconds, or until `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None, seconds)

    @property
    def closed(self) -> bool:
        """True after `close`: new operations are refused."""
        return self._closed is not None


def steady() -> float:
    """Returns the seconds of a monotonic clock; on Linux it includes suspended time."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class StoreClock:
    """The store's clock. It begins at the time of day, or at `seen` if that is later.

    `seen` is the newest time in the store. After its start the clock is monotonic, so a jump of the
    time of day neither passes deadlines nor deletes results before the broker's next start.
    """

    __slots__ = ("_offset", "_steady")

    def __init__(
        self,
        seen: float,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady,
    ) -> None:
        self._steady = steady
        self._offset = max(seen, wall()) - steady()

    def now(self) -> float:
        """The time in seconds since 1970."""
        return self._steady() + self._offset


log = logging.getLogger("mlxpool.broker")

RETRY = 1.0  # seconds between two tries after a full or failed disk


class HealthState(StrEnum):
    """The states of the store."""

    OK = "ok"
    FULL = "full"  # the disk is full: new jobs are refused, running jobs' output is kept
    FAILED = "failed"  # the disk failed: all operations are refused until the store is open again
    FENCED = "fenced"  # another broker owns the store: this broker must end
    CLOSED = "closed"


class Health(Struct, frozen=True):
    """The state of the store and its load.

    `busy` is the age of the present transaction in seconds; 0 without a transaction. `operations`
    and `bytes` are the number and the size of the operations in the inbox and in the present
    transaction.
    """

    state: HealthState
    reason: str
    operations: int
    bytes: int
    busy: float


class StoreWriter(threading.Thread):
    """The thread of the store.

    `offer` gives it operations; `take` returns results after each `wake`.

    The thread calls `wake` after results and after changes of health. Raises StoreUnusable if the
    store cannot be opened or written; then the caller must close the opener.
    """

    def __init__(
        self,
        opener: Opener,
        boot: int,
        wake: Callable[[], None],
        bounds: Bounds = Bounds(),  # noqa: B008  # frozen
        wall: Callable[[], float] = time.time,
        retry: float = RETRY,
    ) -> None:
        super().__init__(name="job-store", daemon=True)
        self._opener, self._boot, self._wake, self._retry = opener, boot, wake, retry
        self._inbox = Inbox(bounds)
        self._results: deque[tuple[Operation, Result]] = deque()
        self._store = opener.open()
        self._clock = StoreClock(self._store.wall_seen, wall)
        try:
            self._begin()
        except BaseException:
            self._store.close()
            raise
        # Operations without a result. Only a full disk leaves operations here after a `_turn`.
        self._open: list[Operation] = []
        self._state, self._reason = HealthState.OK, ""
        self._busy_since: float | None = None

    def _begin(self) -> None:
        for attempt in (1, 2):
            try:
                return self._store.begin(self._boot, self._clock.now())
            except OutOfSpace as error:
                if attempt == 2 or not self._store.free_reserve():
                    raise StoreUnusable(f"the disk of the store is full: {error}") from None
            except StoreError as error:
                raise StoreUnusable(f"the store cannot be used: {error}") from error

    # ---- on the broker's thread ----------------------------------------------------------------

    def offer(self, operation: Operation) -> Refused | None:
        """Queues an operation. Returns None, or the refusal if the queue does not accept it."""
        return self._inbox.offer(operation)

    def take(self) -> list[tuple[Operation, Result]]:
        """Returns the results since the last call, in the order of the commits."""
        taken = []
        while self._results:
            taken.append(self._results.popleft())
        return taken

    @property
    def health(self) -> Health:
        """The present health of the store."""
        load, since = self._inbox.load(), self._busy_since
        busy = 0.0 if since is None else time.monotonic() - since
        return Health(self._state, self._reason, load.operations, load.bytes, busy)

    def close(self, timeout: float | None = None) -> bool:
        """Commits the waiting operations and closes the store. Returns False after the timeout."""
        self._inbox.close(Refused("store_closed", "the broker ends; send it again to the next one"))
        if self.ident is None:  # the thread was never started
            self._end()
        else:
            self.join(timeout)
        return not self.is_alive()

    # ---- on its own thread ---------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # even after a bug each operation must get a result
            log.exception("the thread of the store ended")
            self._give_up(HealthState.FAILED, f"the thread of the store ended: {error!r}")
        finally:
            self._end()

    def _turn(self) -> bool:
        """Performs one group of operations. Returns whether the thread continues."""
        until = time.monotonic() + self._retry if self._open else None
        new = self._inbox.take(until)
        self._open += new
        if not self._open:
            return not self._inbox.closed
        self._busy_since = time.monotonic()
        try:
            self._perform()
            self._store.tend()
        except OutOfSpace as error:  # raised by `tend`
            self._store.free_reserve()
            log.warning("the disk of the store is full", extra={"why": str(error)})
        except StoreFenced as error:
            self._give_up(HealthState.FENCED, str(error))
            return False
        except StoreError as error:
            return self._recover(str(error))
        finally:
            self._busy_since = None
        if self._open and self._inbox.closed and not new:
            self._refuse(list(self._open), "store_closed", "the broker ends and the disk is full")
        return True

    def _perform(self) -> None:
        """In one transaction, performs all operations that have no result yet.

        If the disk is full, performs only the operations that are still possible.
        """
        group = list(self._open)
        try:
            results = self._store.transaction(group, self._clock.now())
        except OutOfSpace as full:
            self._perform_without_room(group, str(full))
            return
        self._answer(group, results)
        self._change(HealthState.OK, "")

    def _perform_without_room(self, group: list[Operation], why: str) -> None:
        """Handles a full disk: refuses new work, and performs deletions and reads.

        Then performs the other writes, until one finds no room. This write and all later writes are
        tried again later.
        """
        self._change(HealthState.FULL, why)
        self._store.free_reserve()
        self._refuse([operation for operation in group if operation.admits], "store_full", why)
        others = [operation for operation in group if not operation.admits]
        for operation in others:
            if (operation.frees or not operation.writes) and not self._perform_alone(operation):
                self._refuse([operation], "store_full", why)
        for operation in others:
            writes = operation.writes and not operation.frees
            if writes and not self._perform_alone(operation):
                return  # this write and all later writes are tried again later
        self._change(HealthState.OK, "")

    def _perform_alone(self, operation: Operation) -> bool:
        try:
            results = self._store.transaction([operation], self._clock.now())
        except OutOfSpace:
            return False
        self._answer([operation], results)
        return True

    # ---- failures ------------------------------------------------------------------------------

    def _recover(self, why: str) -> bool:
        """Refuses all operations until the store is open again. Returns whether it is open."""
        log.error("the disk of the store failed", extra={"why": why})
        self._abandon(HealthState.FAILED, why)
        self._store.close()
        while not self._inbox.closed:
            self._inbox.wait(self._retry)
            try:
                self._store = self._opener.reopen()
                self._store.resume(self._boot)
            except StoreFenced as error:
                self._give_up(HealthState.FENCED, str(error))
                return False
            except StoreError as error:
                self._change(HealthState.FAILED, str(error))
                continue
            log.warning("the store was opened again")
            self._inbox.open()
            self._change(HealthState.OK, "")
            return True
        return False

    def _give_up(self, state: HealthState, why: str) -> None:
        """Refuses all operations from now on."""
        self._inbox.close(Refused("store_closed", why))
        self._abandon(state, why)

    def _abandon(self, state: HealthState, why: str) -> None:
        self._change(state, why)
        self._open += self._inbox.empty(Refused("store_closed", why))
        self._refuse(list(self._open), "store_closed", why)

    def _end(self) -> None:
        self._store.close()
        self._opener.close()
        if self._state in (HealthState.OK, HealthState.FULL):
            self._change(HealthState.CLOSED, "")
        self._wake()

    # ---- answers -------------------------------------------------------------------------------

    def _answer(self, operations: Sequence[Operation], results: Sequence[Result]) -> None:
        """Hands out results, and frees the inbox space of their operations."""
        if len(operations) == len(self._open):
            self._open.clear()
        for operation in operations if self._open else ():
            index = next(i for i, open_one in enumerate(self._open) if open_one is operation)
            del self._open[index]
        self._inbox.done(operations)  # first: receivers of the results may use the space
        self._results.extend(zip(operations, results, strict=True))
        if operations:
            self._wake()

    def _refuse(self, operations: Sequence[Operation], code: str, why: str) -> None:
        self._answer(operations, [Refused(code, why)] * len(operations))

    def _change(self, state: HealthState, reason: str) -> None:
        if (state, reason) != (self._state, self._reason):
            self._state, self._reason = state, reason
            self._wake()
