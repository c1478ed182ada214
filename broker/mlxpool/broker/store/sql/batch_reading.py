"""Batches as they are read: their rows with the counts, and lists of them."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.store.batch_operations import ListBatches, ReadBatch
from mlxpool.broker.store.batch_records import (
    BatchList,
    BatchState,
    BatchView,
    Outcomes,
)
from mlxpool.broker.store.records import JobState, Name, Result, Scope, UnknownName
from mlxpool.broker.store.sql import outbox, rows
from mlxpool.broker.store.sql.database import Database, Row

VIEW = f"""batch.id, batch.owner, batch.tenant, batch.key, batch.file, batch.digest, batch.defaults,
    batch.state, batch.next_line, batch.next_start, batch.created, batch.ended, batch.deadline,
    batch.keep, batch.notify, batch.forget, batch.jobs, batch.done, batch.cancelled, batch.dead,
    batch.expired, batch.failed, batch.end_seq, {outbox.state_of("batch")}, batch.deleted"""
COUNTED = (JobState.DONE, JobState.CANCELLED, JobState.DEAD, JobState.EXPIRED)
LIVE = "batch.ended IS NULL AND batch.state IN ('open', 'fed', 'cancelled')"


def view(database: Database, row: Row) -> BatchView:
    """The batch of a row of the columns VIEW, with its counts."""
    id, owner, tenant, key, file, digest, defaults, state = row[:8]
    jobs, *ended = row[16:21]
    counts = (*zip(COUNTED, ended, strict=True), (JobState.WAITING, jobs - sum(ended)))
    return BatchView(
        id=id,
        scope=Scope(owner, tenant, key),
        file=file,
        file_size=database.number("SELECT size FROM file WHERE id = ?", file),
        digest=digest,
        defaults=defaults,
        state=BatchState(state),
        next_line=row[8],
        next_start=row[9],
        failed=row[21],
        counts=tuple(pair for pair in counts if pair[1]),
        created=row[10],
        ended=row[11],
        deadline=row[12],
        keep=row[13],
        notify=row[14],
        forget=row[15],
        end_seq=row[22] or 0,
        notice=row[23] or "",
        deleted=Outcomes(row[24]),
    )


def find_row(database: Database, name: Name) -> Row | None:
    if isinstance(name, bytes):
        return database.one(f"SELECT {VIEW} FROM batch WHERE id = ?", name)
    if rows.has_nul(name):
        return None
    return database.one(
        f"SELECT {VIEW} FROM batch WHERE owner = ? AND tenant = ? AND key = ?",
        name.owner,
        name.tenant,
        name.key,
    )


def find(database: Database, name: Name) -> BatchView | None:
    """The batch of this name; None if there is none, or another owner's or tenant's."""
    row = find_row(database, name)
    return None if row is None else view(database, row)


# ---- operations ----------------------------------------------------------------------------------


def read_batch(database: Database, asked: ReadBatch, now: float) -> Result:
    return find(database, asked.name) or UnknownName()


def list_batches(database: Database, asked: ListBatches, now: float) -> BatchList:
    states = asked.states or tuple(state for state in BatchState if state is not BatchState.GONE)
    where = [f"state IN ({', '.join('?' * len(states))})", *([LIVE] if asked.live else [])]
    values: list[Any] = [state.value for state in states]
    for column, value in (("owner", asked.owner), ("tenant", asked.tenant)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if asked.behind is not None:
        where.append("(created, id) < (?, ?)")
        values += asked.behind
    found = database.execute(
        f"SELECT {VIEW} FROM batch WHERE {' AND '.join(where)}"
        " ORDER BY created DESC, id DESC LIMIT ?",
        *values,
        asked.count + 1,
    )
    batches = tuple(view(database, row) for row in found[: asked.count])
    return BatchList(batches, len(found) > asked.count)
