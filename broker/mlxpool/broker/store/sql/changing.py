"""The operations that cancel, retry or release one job, and the deletion of expired data."""

from __future__ import annotations

from mlxpool.broker.store.operations import Cancel, Release, Retry, Sweep
from mlxpool.broker.store.records import (
    ENDED,
    MAX_RETRIES,
    RETRYABLE,
    Changed,
    JobState,
    JobView,
    Refused,
    Result,
    Swept,
)
from mlxpool.broker.store.sql import batches, endings, outbox, rows
from mlxpool.broker.store.sql.database import Database

DEADLINE_CAUSE = "its deadline passed while it waited"


def cancel(database: Database, operation: Cancel, now: float) -> Result:
    """Ends a waiting job as `cancelled`."""
    job = rows.find(database, operation.name)
    if job is None or job.state is not JobState.WAITING:
        return rows.fate(database, operation.name)
    return Changed(
        endings.end_job(database, job, JobState.CANCELLED, operation.end, operation.cause, now)
    )


def retry(database: Database, operation: Retry, now: float) -> Result:
    """Sets a dead or expired job to waiting, unless its batch was cancelled or deleted."""
    job = rows.find(database, operation.name)
    if job is None or job.state not in RETRYABLE:
        return rows.fate(database, operation.name)
    if not batches.takes_again(database, job):
        why = f"the job {job.scope.key!r} is a line of a batch that was cancelled: submit it alone"
        return Refused("in_use", why)
    if not operation.new_generation and not endings.may_retry(job):
        why = f"the job {job.scope.key!r} was tried again {MAX_RETRIES} times, which is the bound"
        return Refused("in_use", f"{why}: submit it under another key")
    deadline = None if operation.deadline is None else now + operation.deadline
    anew = operation.new_generation
    return Changed(endings.let_wait(database, job, deadline, now, new_generation=anew))


def release(database: Database, operation: Release, now: float, key_life: float) -> Result:
    """Deletes the result of an ended job."""
    job = rows.find(database, operation.name)
    if job is None or job.state not in ENDED:
        return rows.fate(database, operation.name)
    return Changed(endings.empty_job(database, job, now + key_life))


# ---- time ----------------------------------------------------------------------------------------


def sweep(database: Database, operation: Sweep, now: float, key_life: float) -> Swept:
    """Ends jobs whose deadline has passed, and deletes data whose retention time is over.

    These data are the results of ended jobs, then the jobs themselves, and files and batches.
    """
    overdue = _overdue(database, operation, now)
    expired = tuple(
        endings.end_job(database, job, JobState.EXPIRED, operation.expired_end, DEADLINE_CAUSE, now)
        for job in overdue[: operation.count]
    )
    forgotten = database.execute(
        "SELECT seq FROM job WHERE forget <= ? ORDER BY forget, seq LIMIT ?", now, operation.count
    )
    for (seq,) in forgotten:
        _forget(database, seq, now, key_life)
    database.change("DELETE FROM poison WHERE until <= ?", now)
    database.change("DELETE FROM usage WHERE jobs = 0 AND bytes = 0 AND file_bytes = 0")
    of_batches = batches.sweep(database, now, key_life, operation.count)
    more = operation.count in (len(overdue), len(forgotten)) or of_batches
    return Swept(expired, len(forgotten), more, _next(database, now))


def _overdue(database: Database, operation: Sweep, now: float) -> list[JobView]:
    jobs = rows.select(
        database,
        "state = 'waiting' AND deadline <= ? ORDER BY deadline, seq LIMIT ?",
        now,
        operation.count + len(operation.held),
    )
    return [job for job in jobs if job.id not in operation.held][: operation.count]


def _forget(database: Database, seq: int, now: float, key_life: float) -> None:
    """Deletes the result of an ended job. If the job is already `gone`, deletes its row.

    The row is kept while the notice of the job's end is undelivered.
    """
    job = rows.by_seq(database, seq)
    if job.state is not JobState.GONE:
        endings.empty_job(database, job, now + key_life)
        return
    if outbox.is_waiting(database, job.end_seq):
        database.change("UPDATE job SET forget = ? WHERE seq = ?", now + outbox.HOLD, seq)
        return
    outbox.drop(database, job.end_seq)
    database.change("DELETE FROM request WHERE job = ?", seq)
    database.change("DELETE FROM job WHERE seq = ?", seq)


def _next(database: Database, now: float) -> float | None:
    """Returns the earliest time after `now` at which a sweep has something to do.

    Returns None if there is no such time.
    """
    times = [
        row[0]
        for row in (
            database.one(
                "SELECT deadline FROM job WHERE state = 'waiting' AND deadline > ?"
                " ORDER BY deadline LIMIT 1",
                now,
            ),
            database.one("SELECT forget FROM job WHERE forget > ? ORDER BY forget LIMIT 1", now),
            database.one("SELECT forget FROM batch WHERE forget > ? ORDER BY forget LIMIT 1", now),
            database.one("SELECT forget FROM file WHERE forget > ? ORDER BY forget LIMIT 1", now),
        )
        if row is not None
    ]
    return min(times, default=None)
