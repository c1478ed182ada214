"""The operation `Submit`: stores a job, or finds the stored job that has its key."""

from __future__ import annotations

from mlxpool.broker.store import checksums
from mlxpool.broker.store.operations import Submit
from mlxpool.broker.store.records import (
    DuplicateKey,
    JobState,
    KeyGone,
    Refused,
    Result,
    Scope,
    Submitted,
)
from mlxpool.broker.store.sql import contents, rows
from mlxpool.broker.store.sql.database import Database


def submit(database: Database, operation: Submit, now: float, room: int) -> Result:
    """Stores a job, unless its key is used, a quota is exceeded, or `room` bytes do not suffice."""
    known = rows.find(database, operation.scope)
    if known is not None:
        if known.state is JobState.GONE:
            return KeyGone(known.id, known.forget or now)
        if known.digest != operation.digest:
            return DuplicateKey(known.id)
        return Submitted(known, new=False)
    size = operation.size + rows.ROW_BYTES
    refused = _no_room(operation, size, room) or _over_quota(database, operation, size)
    if refused is not None:
        return refused
    seq = _insert(database, operation, size, now)
    assert seq is not None  # the key is unused, so the insert succeeds
    rows.count_usage(database, operation.scope.owner, 1, size)
    return Submitted(rows.by_seq(database, seq), new=True)


def submit_line(database: Database, operation: Submit, now: float, room: int) -> Result | int:
    """Stores a job that was made of a line of a batch.

    If no quota applies, `room` suffices and the key is unused, inserts the job with fewer
    statements than `submit`. It then returns the bytes of the job, which the caller must add to the
    owner's usage. In all other cases it returns the result of `submit`, which itself adds the
    bytes.
    """
    size = operation.size + rows.ROW_BYTES
    checked = operation.max_jobs or operation.max_bytes or size > room
    if not checked and _insert(database, operation, size, now) is not None:
        return size
    return submit(database, operation, now, room)


def check_names(scope: Scope, *texts: str) -> None:
    """Raises ValueError if a text has a NUL character, which PostgreSQL cannot store."""
    for text in (scope.owner, scope.tenant, scope.key, *texts):
        if "\0" in text:
            raise ValueError(f"a name must not contain a NUL character, got {text!r:.60}")


def _no_room(operation: Submit, size: int, room: int) -> Refused | None:
    if size <= room:
        return None
    return Refused(
        "store_full",
        f"the store has room for {max(0, room)} bytes of new jobs, this one takes {size}; release"
        " results that are not needed, free the disk, or raise the bound of the store",
    )


def _over_quota(database: Database, operation: Submit, size: int) -> Refused | None:
    if not (operation.max_jobs or operation.max_bytes):
        return None
    row = database.one("SELECT jobs, bytes FROM usage WHERE owner = ?", operation.scope.owner)
    jobs, used = (0, 0) if row is None else row
    if operation.max_jobs and jobs >= operation.max_jobs:
        return Refused(
            "over_quota",
            f"{jobs} jobs are stored for this owner, at most {operation.max_jobs} (quota_jobs);"
            " release results that are not needed, or wait until their time is over",
        )
    if operation.max_bytes and used + size > operation.max_bytes:
        return Refused(
            "over_quota",
            f"{used} bytes are stored for this owner, with this job {used + size},"
            f" at most {operation.max_bytes}",
        )
    return None


def _insert(database: Database, operation: Submit, size: int, now: float) -> int | None:
    """Inserts the row of a job and its blobs. Returns the job's number; None if its key is used."""
    check_names(operation.scope, operation.kind, operation.model, operation.label, operation.notify)
    scope = operation.scope
    row = database.one(
        "INSERT INTO job (id, owner, tenant, key, model, priority, batch, line, state, gen, pos,"
        " starts, size, due, deadline) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?)"
        " ON CONFLICT (owner, tenant, key) DO NOTHING RETURNING seq",
        operation.id,
        scope.owner,
        scope.tenant,
        scope.key,
        operation.model,
        operation.priority,
        operation.batch,
        operation.line,
        rows.WAITING,
        size,
        max(now + operation.delay, operation.not_before),
        None if operation.deadline is None else now + operation.deadline,
    )
    if row is None:
        return None
    seq: int = row[0]
    crc = checksums.of_request(
        operation.id,
        operation.digest,
        operation.kind,
        operation.model,
        operation.seed,
        operation.request,
        operation.notify,
    )
    database.change(
        "INSERT INTO request (job, digest, kind, seed, submitted, keep, label, notify, crc, data)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        seq,
        operation.digest,
        operation.kind,
        rows.signed(operation.seed),
        now,
        operation.keep,
        operation.label,
        operation.notify,
        crc,
        operation.request,
    )
    contents.add_blobs(database, seq, enumerate(operation.blobs))
    return seq
