"""The table `outbox`: notices of ended jobs and batches, undelivered or given up."""

from __future__ import annotations

from mlxpool.broker.store.notice_bodies import origin_of
from mlxpool.broker.store.sql.database import Database

JOB, BATCH = "job", "batch"  # kinds of notices: of the end of a job or a batch
HOLD = 60.0  # seconds until a sweep checks a deleted key with an undelivered notice again


def state_of(table: str) -> str:
    """Returns an SQL expression for the state of a notice: waiting or given_up.

    It is the notice of the job or batch in a row of `table`. The value is NULL if the row has no
    notice.
    """
    return (
        "(SELECT CASE WHEN outbox.given_up IS NULL THEN 'waiting' ELSE 'given_up' END"
        f" FROM outbox WHERE outbox.end_seq = {table}.end_seq)"
    )


def next_end(database: Database) -> int:
    """Returns a new `end_seq`: these numbers order the ends of all jobs and batches."""
    return database.number("UPDATE meta SET last_end = last_end + 1 RETURNING last_end")


def add(
    database: Database,
    end_seq: int,
    kind: str,
    subject: bytes,
    url: str,
    body: bytes,
    now: float,
) -> None:
    """Stores the notice of the end of a job or batch. The notice is due now."""
    database.change(
        "INSERT INTO outbox (end_seq, kind, subject, url, origin, since, tries, due, cause, body)"
        " VALUES (?, ?, ?, ?, ?, ?, 0, ?, '', ?)",
        end_seq,
        kind,
        subject,
        url,
        origin_of(url),
        now,
        now,
        body,
    )


def drop(database: Database, end_seq: int | None) -> None:
    """Deletes the notice of an end, if there is one."""
    if end_seq:
        database.change("DELETE FROM outbox WHERE end_seq = ?", end_seq)


def is_waiting(database: Database, end_seq: int | None) -> bool:
    """Returns whether the notice of an end is neither delivered nor given up."""
    if not end_seq:
        return False
    waiting = database.one("SELECT 1 FROM outbox WHERE end_seq = ? AND given_up IS NULL", end_seq)
    return waiting is not None
