"""A store in an SQL database.

One transaction performs many operations, which fail independently.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from mlxpool.broker.store import batch_operations as of_batches
from mlxpool.broker.store import operations as of_jobs
from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import (
    Damaged,
    JobState,
    Refused,
    Result,
    StoreFenced,
    StoreFigures,
)
from mlxpool.broker.store.sql import (
    batch_reading,
    batches,
    changing,
    files,
    notices,
    reading,
    running,
)
from mlxpool.broker.store.sql.database import Database
from mlxpool.broker.store.sql.rows import ROW_BYTES
from mlxpool.broker.store.sql.submitting import submit
from mlxpool.common.closing import Closing

log = logging.getLogger("mlxpool.broker")

KEY_LIFE = 24 * 3600.0  # seconds for which a key is kept after its result is deleted
ADMIT_SHARE = 0.8  # share of the store's bound above which only running jobs may write
# An owner with less than this share of the bound may add jobs until the store is at ADMIT_SHARE +
# SMALL_SHARE of the bound. So no owner can fill the store for all others.
SMALL_SHARE = 0.1
SEEN_EVERY = 1.0  # seconds between two writes of the present time

Handler = Callable[..., Result]


class SqlStore(Closing):
    """The store of one broker, used by one thread at a time. `begin` takes ownership.

    Every method can raise StoreFailed; then the store must be closed. `begin` and `transaction` can
    raise StoreFenced. `transaction` can raise OutOfSpace; then the store is unchanged.
    """

    def __init__(self, database: Database, max_bytes: int, key_life: float = KEY_LIFE) -> None:
        self.database = database
        self._max_bytes, self._key_life = max_bytes, key_life
        self._boot = 0
        row = database.one("SELECT boot, wall_seen FROM meta")
        assert row is not None
        self.boot_before: int = row[0]
        self.wall_seen: float = row[1]
        self._handlers = self._table()

    def begin(self, boot: int, now: float) -> None:
        """Takes ownership of the store.

        Retention times are extended by the time in which no broker ran.
        """
        away = max(0.0, now - self.wall_seen)
        with self.database.transaction():
            for table in ("job", "batch", "file"):
                self.database.change(
                    f"UPDATE {table} SET forget = forget + ? WHERE forget IS NOT NULL", away
                )
            self.database.change("UPDATE outbox SET since = since + ? WHERE given_up IS NULL", away)
            self.database.change(
                "UPDATE file SET waits_since = waits_since + ? WHERE waits_since IS NOT NULL", away
            )
            self.database.change("UPDATE meta SET boot = ?, wall_seen = ?", boot, now)
        self._boot, self.wall_seen = boot, now

    def resume(self, boot: int) -> None:
        """Continues after a failure. Raises StoreFenced if another broker has taken the store."""
        if self.boot_before != boot:
            raise StoreFenced(_FENCED)
        self._boot = boot

    def transaction(self, operations: Sequence[Operation], now: float) -> list[Result]:
        """Performs operations in order. Once this returns, their changes are durable.

        The result of a failed operation is `Refused`; it has changed nothing. The other operations
        are performed.
        """
        writes = any(operation.writes for operation in operations)
        stamps = writes and now - self.wall_seen >= SEEN_EVERY
        with self.database.transaction():
            if self.database.lock_boot() != self._boot:
                raise StoreFenced(_FENCED)
            results = [self._perform(operation, now) for operation in operations]
            if stamps:
                self.database.change("UPDATE meta SET wall_seen = ?", now)
        if stamps:
            self.wall_seen = now
        return results

    def _perform(self, operation: Operation, now: float) -> Result:
        handler = self._handlers[type(operation)]
        known: tuple[type[Exception], ...] = (ValueError, *self.database.operation_errors)
        self.database.savepoint()
        try:
            result = handler(self.database, operation, now)
        except batches.Full as full:
            self.database.undo()
            return full.refused
        except Damaged as error:
            self.database.undo()
            log.error("the disk has changed what is stored", extra={"why": str(error)})
            return Refused("damaged", str(error))
        except known as error:
            self.database.undo()
            name = type(operation).__name__
            log.warning(
                "an operation of the store failed", extra={"operation": name, "why": str(error)}
            )
            return Refused("store_error", f"{name} could not be performed: {error}")
        self.database.release()
        return result

    # ---- bounds and figures, which depend on the store -----------------------------------------

    def admit_bound(self) -> int:
        """Returns the bytes in use above which new jobs are refused."""
        return int(ADMIT_SHARE * self._max_bytes)

    def room(self, share: float = ADMIT_SHARE) -> int:
        """Returns how many bytes may be added until the fraction `share` of the bound is in use.

        The result is negative if more is in use.
        """
        return int(share * self._max_bytes) - self.database.used_bytes()

    def room_of(self, operation: Operation) -> int:
        """Returns the most bytes that an operation may add to the store.

        An owner who uses few bytes may add some even if the store has no room for other owners.
        """
        room = self.room()
        owner, size = _claim(operation)
        if size <= room:
            return room
        used = self.database.number("SELECT bytes FROM usage WHERE owner = ?", owner)
        own = int(SMALL_SHARE * self._max_bytes) - used
        return max(room, min(own, self.room(ADMIT_SHARE + SMALL_SHARE)))

    def figures(self) -> StoreFigures:
        database = self.database
        states = database.execute("SELECT state, COUNT(*) FROM job GROUP BY state ORDER BY state")
        return StoreFigures(
            tuple((JobState(state), count) for state, count in states),
            database.number("SELECT COUNT(*) FROM batch WHERE state <> 'gone'"),
            database.number("SELECT COUNT(*) FROM outbox WHERE given_up IS NULL"),
            database.used_bytes(),
            self.admit_bound(),
            self._max_bytes,
            database.number("SELECT COUNT(*) FROM outbox WHERE given_up IS NOT NULL"),
            max(0, self.room()),
        )

    def tend(self) -> None:
        """Does housekeeping after the results of a transaction were handed out."""

    def free_reserve(self) -> bool:
        """Deletes the reserve file, because the disk is full. Returns whether the file existed."""
        return False

    def close(self) -> None:
        self.database.close()

    def _table(self) -> dict[type[Operation], Handler]:
        key_life = self._key_life

        def with_room(handler: Handler) -> Handler:
            return lambda database, operation, now: handler(
                database, operation, now, self.room_of(operation)
            )

        return {
            of_jobs.Submit: with_room(submit),
            of_jobs.FeedNext: running.feed_next,
            of_jobs.Progress: running.progress,
            of_jobs.Finish: running.finish,
            of_jobs.Defer: running.defer,
            of_jobs.SetBack: running.set_back,
            of_jobs.NewGeneration: running.new_generation,
            of_jobs.Cancel: changing.cancel,
            of_jobs.Retry: changing.retry,
            of_jobs.Release: partial(changing.release, key_life=key_life),
            of_jobs.Sweep: partial(changing.sweep, key_life=key_life),
            of_jobs.ReadJob: reading.read_job,
            of_jobs.ReadRequest: reading.read_request,
            of_jobs.FetchPage: reading.fetch_page,
            of_jobs.ListJobs: reading.list_jobs,
            of_jobs.ListEnded: reading.list_ended,
            of_jobs.ReadBacklog: reading.read_backlog,
            of_jobs.ReadHistory: reading.read_history,
            of_jobs.ExportJobs: reading.export_jobs,
            of_jobs.VerifyJobs: reading.verify_jobs,
            of_jobs.ReadFigures: lambda database, operation, now: self.figures(),
            of_jobs.SetPoison: notices.set_poison,
            of_jobs.ReadPoisons: notices.read_poisons,
            of_jobs.ReadNotices: notices.read_notices,
            of_jobs.ListNotices: notices.list_notices,
            of_jobs.NoticeSent: notices.notice_sent,
            of_jobs.NoticeFailed: notices.notice_failed,
            of_batches.CreateFile: with_room(files.create_file),
            of_batches.AppendFile: with_room(files.append_file),
            of_batches.ReadFile: files.read_file,
            of_batches.ListFiles: files.list_files,
            of_batches.DeleteFile: files.delete_file,
            of_batches.SubmitBatch: batches.submit_batch,
            of_batches.ReadLines: batches.read_lines,
            of_batches.AddLines: with_room(batches.add_lines),
            of_batches.ReadBatch: batch_reading.read_batch,
            of_batches.ListBatches: batch_reading.list_batches,
            of_batches.CancelBatch: batches.cancel_batch,
            of_batches.RetryBatch: batches.retry_batch,
            of_batches.ReleaseBatch: batches.release_batch,
            of_batches.ReleaseOutcomes: partial(batches.release_outcomes, key_life=key_life),
            of_batches.EndBatch: batches.end_batch,
            of_batches.ReadOutcomes: batch_reading.read_outcomes,
        }


def _claim(operation: Operation) -> tuple[str, int]:
    """Returns the owner of an operation, and the bytes that it adds, ROW_BYTES for each row."""
    if isinstance(operation, of_batches.AddLines):
        owner = operation.jobs[0].scope.owner if operation.jobs else ""
        return owner, operation.size + len(operation.jobs) * ROW_BYTES
    if isinstance(operation, of_jobs.Submit):
        return operation.scope.owner, operation.size + ROW_BYTES
    assert isinstance(operation, of_batches.CreateFile | of_batches.AppendFile)
    return operation.owner, operation.size + ROW_BYTES


class Opener(Closing):
    """Opens the store, and holds its lock for the life of the broker. `close` releases the lock."""

    __slots__ = ()

    @abstractmethod
    def open(self) -> SqlStore:
        """Opens the store, or creates it if it does not exist. Raises StoreUnusable."""

    @abstractmethod
    def reopen(self) -> SqlStore:
        """Opens the store again after a failure. Raises StoreError."""


_FENCED = "another broker has taken the store of jobs over; this broker must not write any more"
