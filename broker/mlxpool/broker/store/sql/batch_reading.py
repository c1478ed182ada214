"""Batches as they are read: their rows with the counts, and lists of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlxpool.broker.store.batch_operations import ListBatches, ReadBatch
from mlxpool.broker.store.batch_records import (
    BatchList,
    BatchState,
    BatchView,
    Outcomes,
)
from mlxpool.broker.store.records import JobState, Name, Result, Scope, UnknownName
from mlxpool.broker.store.sql import outbox, rows
from mlxpool.broker.store.sql.database import Database

COUNTED = (JobState.DONE, JobState.CANCELLED, JobState.DEAD, JobState.EXPIRED)
LIVE = "batch.ended IS NULL AND batch.state IN ('open', 'fed', 'cancelled')"


class StoredBatch(NamedTuple):
    """The columns of a batch."""

    id: bytes
    owner: str
    tenant: str
    key: str
    file: bytes
    digest: bytes
    defaults: bytes
    state: str
    next_line: int
    next_start: int
    created: float
    ended: float | None
    deadline: float | None
    keep: float | None
    forget: float | None
    notify: str
    jobs: int
    done: int
    cancelled: int
    dead: int
    expired: int
    failed: int
    end_seq: int | None
    deleted: int
    notice: str | None


COLUMNS = ", ".join(
    (*(f"batch.{name}" for name in StoredBatch._fields[:-1]), outbox.state_of("batch"))
)


def select(database: Database, condition: str, *values: Any) -> list[BatchView]:
    """The batches that meet a condition of SQL, which may end with an order and a limit."""
    found = database.execute(f"SELECT {COLUMNS} FROM batch WHERE {condition}", *values)
    return [_view(database, StoredBatch(*row)) for row in found]


def _view(database: Database, stored: StoredBatch) -> BatchView:
    ended = {state: getattr(stored, state.value) for state in COUNTED}
    counts = {**ended, JobState.WAITING: stored.jobs - sum(ended.values())}
    return BatchView(
        id=stored.id,
        scope=Scope(stored.owner, stored.tenant, stored.key),
        file=stored.file,
        file_size=database.number("SELECT size FROM file WHERE id = ?", stored.file),
        digest=stored.digest,
        defaults=stored.defaults,
        state=BatchState(stored.state),
        next_line=stored.next_line,
        next_start=stored.next_start,
        failed=stored.failed,
        counts=tuple(pair for pair in counts.items() if pair[1]),
        created=stored.created,
        ended=stored.ended,
        deadline=stored.deadline,
        keep=stored.keep,
        notify=stored.notify,
        forget=stored.forget,
        end_seq=stored.end_seq or 0,
        notice=stored.notice or "",
        deleted=Outcomes(stored.deleted),
    )


def find(database: Database, name: Name) -> BatchView | None:
    """The batch of this name; None if there is none, or another owner's or tenant's."""
    if isinstance(name, bytes):
        found = select(database, "id = ?", name)
    elif rows.has_nul(name):
        return None
    else:
        scope = (name.owner, name.tenant, name.key)
        found = select(database, "owner = ? AND tenant = ? AND key = ?", *scope)
    return found[0] if found else None


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
    condition = f"{' AND '.join(where)} ORDER BY created DESC, id DESC LIMIT ?"
    found = select(database, condition, *values, asked.count + 1)
    return BatchList(tuple(found[: asked.count]), len(found) > asked.count)
