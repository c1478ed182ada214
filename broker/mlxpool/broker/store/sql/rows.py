"""The rows of jobs: look-ups, changes, bytes in use, and failures.

The table `job` has the columns that queries or counts need. The table `request` has the submission,
so that a change of a job does not write its prompt again. All other fields are in the packed column
`record` of `job`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
from msgspec.structs import replace

from mlxpool.broker.store import checksums
from mlxpool.broker.store.records import (
    MAX_FAILURES,
    MAX_STACKS,
    Damaged,
    Failure,
    Fate,
    JobState,
    JobView,
    Name,
    Result,
    Scope,
    UnknownName,
)
from mlxpool.broker.store.sql import outbox
from mlxpool.broker.store.sql.database import Database, Row

ROW_BYTES = 512  # approximate bytes of a job without request and output
WAITING = JobState.WAITING.value
RECORD_DAMAGED = "its record (times, attempts, cause, model)"
END_DAMAGED = "its end"


class StoredJob(NamedTuple):
    """The columns of a job and of its request, without the request's data."""

    seq: int
    id: bytes
    owner: str
    tenant: str
    key: str
    model: str
    priority: int
    batch: bytes | None
    line: int
    state: str
    gen: int
    pos: int
    starts: int
    size: int
    due: float
    deadline: float | None
    forget: float | None
    end_seq: int | None
    record: bytes | None
    record_crc: int | None
    ending: bytes | None
    ending_crc: int | None
    digest: bytes
    kind: str
    seed: int
    submitted: float
    keep: float | None
    label: str
    notify: str
    notice: str | None


class Record(NamedTuple):
    """Fields of a job that no query needs. They are packed in this order."""

    attempts: int = 0
    charge: float = 0.0
    ended: float | None = None
    cause: str = ""
    facts: bytes | None = None
    retried: tuple[tuple[int, int], ...] = ()


def packed(id: bytes, record: Record) -> tuple[bytes, int]:
    """Returns the packed record of a job and the checksum of the record."""
    data = msgpack.packb(record)
    return data, checksums.of_record(id, data)


def unpacked(id: bytes, data: bytes | None, crc: int | None) -> Record | None:
    """Unpacks a record that `packed` has packed. Returns None if the checksum does not match.

    If `data` is None (NULL), returns a record with the default values.
    """
    if data is None:
        return Record()
    if crc != checksums.of_record(id, data):
        return None
    return Record(*msgpack.unpackb(data, use_list=False))


# A LEFT join, so that the query plan never begins with `request`.
JOBS = "job LEFT JOIN request ON request.job = job.seq"
COLUMNS = ", ".join((*StoredJob._fields[:-1], outbox.state_of("job")))
CHANGED = frozenset(  # columns that equal a field of JobView
    ("gen", "pos", "starts", "size", "due", "deadline", "forget")
)


def view(row: Row) -> JobView:
    """Returns the view of a job from a row of COLUMNS."""
    stored = StoredJob(*row)
    damages = []
    end = stored.ending
    record = unpacked(stored.id, stored.record, stored.record_crc)
    if record is None:
        record = Record()
        damages.append(RECORD_DAMAGED)
    if end is not None and stored.ending_crc != checksums.of_end(stored.id, stored.state, end):
        end = None
        damages.append(END_DAMAGED)
    return JobView(  # positional arguments: keyword arguments take three times as long
        stored.seq,
        stored.id,
        Scope(stored.owner, stored.tenant, stored.key),
        stored.digest,
        stored.gen,
        stored.kind,
        stored.model,
        stored.priority,
        unsigned(stored.seed),
        record.facts,
        JobState(stored.state),
        stored.pos,
        stored.starts,
        record.attempts,
        record.charge,
        stored.submitted,
        stored.due,
        stored.deadline,
        stored.keep,
        stored.forget,
        record.ended,
        stored.end_seq or 0,
        end,
        record.cause,
        stored.size,
        stored.batch,
        stored.line,
        stored.label,
        stored.notify,
        stored.notice or "",
        " and ".join(damages),
        record.retried,
    )


def change(database: Database, job: JobView, **changes: Any) -> JobView:
    """Stores new values of a job's fields, updates its owner's usage, and returns the new view.

    `job` is the job's view as this transaction has read it. A damaged record is overwritten only if
    `changes` has new `facts`. Otherwise the record stays as it is, so that the damage remains
    visible.
    """
    if "cause" in changes:
        changes["cause"] = storable(changes["cause"])
    after = replace(job, **changes)
    columns = {name: value for name, value in changes.items() if name in CHANGED}
    if "state" in changes:
        columns["state"] = after.state.value
    if "end_seq" in changes:
        columns["end_seq"] = after.end_seq or None
    if "end" in changes:
        columns["ending"] = after.end
        columns["ending_crc"] = (
            None if after.end is None else checksums.of_end(job.id, after.state.value, after.end)
        )
    noted = not changes.keys().isdisjoint(Record._fields)
    if noted and ("facts" in changes or RECORD_DAMAGED not in job.damaged):
        record = Record(*(getattr(after, name) for name in Record._fields))
        columns["record"], columns["record_crc"] = packed(job.id, record)
    names = ", ".join(f"{name} = ?" for name in columns)
    database.change(f"UPDATE job SET {names} WHERE seq = ?", *columns.values(), job.seq)
    count_usage(database, job.scope.owner, 0, after.size - job.size)
    return by_seq(database, job.seq) if job.damaged else after


def has_nul(scope: Scope) -> bool:
    """Returns whether a name has a NUL character.

    No job has such a name: PostgreSQL cannot store it.
    """
    return "\0" in scope.owner + scope.tenant + scope.key


def storable(text: str) -> str:
    """Returns a text with NUL and lone surrogates escaped, so that both databases can store it."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def signed(seed: int) -> int:
    """Returns a u64 as a signed 64-bit integer, which databases can store."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def unsigned(stored: int) -> int:
    """Undoes `signed`: returns the u64 that was stored as a signed integer."""
    return stored + (1 << 64) if stored < 0 else stored


def select(database: Database, condition: str, *values: Any) -> list[JobView]:
    """Returns the jobs that meet an SQL condition, which may end with ORDER BY and LIMIT."""
    stored = database.execute(f"SELECT {COLUMNS} FROM {JOBS} WHERE {condition}", *values)
    return list(map(view, stored))


def find(database: Database, name: Name) -> JobView | None:
    """Returns the job of this name; None if the owner and tenant have no such job."""
    if isinstance(name, bytes):
        jobs = select(database, "id = ?", name)
    elif has_nul(name):
        return None
    else:
        scope = (name.owner, name.tenant, name.key)
        jobs = select(database, "owner = ? AND tenant = ? AND key = ?", *scope)
    return jobs[0] if jobs else None


def by_seq(database: Database, seq: int) -> JobView:
    """Returns the job with the number `seq`, which must exist."""
    (job,) = select(database, "seq = ?", seq)
    return job


def fate(database: Database, name: Name) -> Result:
    """Returns the result of an operation that cannot be performed on the job of this name.

    The result is UnknownName without such a job, else Fate with the job's view.
    """
    job = find(database, name)
    return UnknownName() if job is None else Fate(job)


def damage(job: JobView, what: str) -> Damaged:
    """Returns the error for a part of a job that does not match its checksum."""
    return Damaged(
        f"the disk has changed what is stored of the job {job.scope.key!r} ({job.id.hex()}): {what}"
    )


def count_usage(database: Database, owner: str, jobs: int, size: int, file_bytes: int = 0) -> None:
    """Adds to the stored usage of an owner.

    `size` is the bytes of jobs and files, `file_bytes` the bytes of files alone.
    """
    if jobs or size or file_bytes:
        database.change(
            "INSERT INTO usage (owner, jobs, bytes, file_bytes) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (owner) DO UPDATE SET jobs = usage.jobs + excluded.jobs,"
            " bytes = usage.bytes + excluded.bytes,"
            " file_bytes = usage.file_bytes + excluded.file_bytes",
            owner,
            jobs,
            size,
            file_bytes,
        )


def add_failure(database: Database, job: JobView, cause: str, stacks: str, now: float) -> int:
    """Adds a failure to a job, unless `cause` is empty. Only the newest failures are kept.

    Returns the change of the job's size in bytes, which can be negative.
    """
    if not cause:
        return 0
    cause, stacks = storable(cause), storable(stacks[:MAX_STACKS])
    number = 1 + database.number("SELECT MAX(number) FROM failure WHERE job = ?", job.seq)
    oldest = number - MAX_FAILURES
    dropped = database.number(
        "SELECT SUM(LENGTH(cause) + LENGTH(stacks)) FROM failure WHERE job = ? AND number <= ?",
        job.seq,
        oldest,
    )
    database.change("DELETE FROM failure WHERE job = ? AND number <= ?", job.seq, oldest)
    database.change(
        "INSERT INTO failure (job, number, at, cause, stacks) VALUES (?, ?, ?, ?, ?)",
        job.seq,
        number,
        now,
        cause,
        stacks,
    )
    return len(cause) + len(stacks) - dropped


def failures_of(database: Database, seq: int) -> tuple[Failure, ...]:
    """Returns the stored failures of a job, the oldest first."""
    stored = database.execute(
        "SELECT number, at, cause, stacks FROM failure WHERE job = ? ORDER BY number", seq
    )
    return tuple(Failure(*row) for row in stored)
