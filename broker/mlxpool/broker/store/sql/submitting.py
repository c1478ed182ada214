"""`Submit`: a new job, or the one that its key names already."""

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


def submit(database: Database, asked: Submit, now: float, room: int) -> Result:
    """Store a job, unless it takes more than `room` bytes."""
    known = rows.find(database, asked.scope)
    if known is not None:
        if known.state is JobState.GONE:
            return KeyGone(known.id, known.forget or now)
        if known.digest != asked.digest:
            return DuplicateKey(known.id)
        return Submitted(known, new=False)
    size = asked.size + rows.ROW_BYTES
    refused = _no_room(asked, size, room) or _over_quota(database, asked, size)
    if refused is not None:
        return refused
    seq = _insert(database, asked, size, now)
    assert seq is not None  # the key is free
    rows.count_usage(database, asked.scope.owner, 1, size)
    return Submitted(rows.by_seq(database, seq), new=True)


def submit_line(database: Database, asked: Submit, now: float, room: int) -> Result | int:
    """Store a job that is a line of a batch, as `submit` does, at less cost where nothing is wrong.

    Returns the bytes of a new job, which the caller has to count for its owner, or what `submit`
    answered, which has counted them.
    """
    size = asked.size + rows.ROW_BYTES
    checked = asked.max_jobs or asked.max_bytes or size > room
    if not checked and _insert(database, asked, size, now) is not None:
        return size
    return submit(database, asked, now, room)


def check_names(scope: Scope, *texts: str) -> None:
    """Raises ValueError for a NUL character, which PostgreSQL has not in texts."""
    for text in (scope.owner, scope.tenant, scope.key, *texts):
        if "\0" in text:
            raise ValueError(f"a name must not contain a NUL character, got {text!r:.60}")


def _no_room(asked: Submit, size: int, room: int) -> Refused | None:
    if size <= room:
        return None
    return Refused(
        "store_full",
        f"the store has room for {max(0, room)} bytes of new jobs, this one takes {size}; release"
        " results that are not needed, free the disk, or raise the bound of the store",
    )


def _over_quota(database: Database, asked: Submit, size: int) -> Refused | None:
    if not (asked.max_jobs or asked.max_bytes):
        return None
    row = database.one("SELECT jobs, bytes FROM usage WHERE owner = ?", asked.scope.owner)
    jobs, used = (0, 0) if row is None else row
    if asked.max_jobs and jobs >= asked.max_jobs:
        return Refused(
            "over_quota",
            f"{jobs} jobs are stored for this owner, at most {asked.max_jobs} (quota_jobs); release"
            " results that are not needed, or wait until their time is over",
        )
    if asked.max_bytes and used + size > asked.max_bytes:
        return Refused(
            "over_quota",
            f"{used} bytes are stored for this owner, with this job {used + size},"
            f" at most {asked.max_bytes}",
        )
    return None


def _insert(database: Database, asked: Submit, size: int, now: float) -> int | None:
    """Insert the row of a job with its blobs; returns its number, None if its key is taken."""
    check_names(asked.scope, asked.kind, asked.model, asked.label, asked.notify)
    scope = asked.scope
    row = database.one(
        "INSERT INTO job (id, owner, tenant, key, model, priority, batch, line, state, gen, pos,"
        " starts, size, due, deadline) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?)"
        " ON CONFLICT (owner, tenant, key) DO NOTHING RETURNING seq",
        asked.id,
        scope.owner,
        scope.tenant,
        scope.key,
        asked.model,
        asked.priority,
        asked.batch,
        asked.line,
        rows.WAITING,
        size,
        max(now + asked.delay, asked.not_before),
        None if asked.deadline is None else now + asked.deadline,
    )
    if row is None:
        return None
    seq: int = row[0]
    crc = checksums.of_request(
        asked.id, asked.digest, asked.kind, asked.model, asked.seed, asked.request, asked.notify
    )
    database.change(
        "INSERT INTO request (job, digest, kind, seed, submitted, keep, label, notify, crc, data)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        seq,
        asked.digest,
        asked.kind,
        rows.signed(asked.seed),
        now,
        asked.keep,
        asked.label,
        asked.notify,
        crc,
        asked.request,
    )
    contents.add_blobs(database, seq, enumerate(asked.blobs))
    return seq
