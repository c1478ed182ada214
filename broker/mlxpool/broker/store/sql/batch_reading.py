"""Batches as they are read: their rows with the counts, lists of them, outcomes of their lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxpool.broker.store.batch_operations import ListBatches, ReadBatch, ReadOutcomes
from mlxpool.broker.store.batch_records import (
    MAX_OUTPUT,
    BatchList,
    BatchState,
    BatchView,
    LineOutcome,
    LineOutcomes,
)
from mlxpool.broker.store.errors import Damaged
from mlxpool.broker.store.records import ENDED, JobState, Name, Result, Scope, UnknownName
from mlxpool.broker.store.sql import outbox, rows
from mlxpool.broker.store.sql.database import Database, Row

VIEW = f"""batch.id, batch.owner, batch.tenant, batch.key, batch.file, batch.digest, batch.defaults,
    batch.state, batch.next_line, batch.next_start, batch.created, batch.ended, batch.deadline,
    batch.keep, batch.notify, batch.forget, batch.jobs, batch.done, batch.cancelled, batch.dead,
    batch.expired, batch.failed, batch.end_seq, {outbox.state_of("batch")}"""
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
    if asked.before:
        last = database.one("SELECT created FROM batch WHERE id = ?", asked.before)
        where.append("(created < ? OR (created = ? AND id > ?))")
        created = 0.0 if last is None else last[0]
        values += [created, created, asked.before]
    found = database.execute(
        f"SELECT {VIEW} FROM batch WHERE {' AND '.join(where)} ORDER BY created DESC, id LIMIT ?",
        *values,
        asked.count,
    )
    batches = tuple(view(database, row) for row in found)
    return BatchList(batches, batches[-1].id if len(batches) == asked.count else b"")


def read_outcomes(database: Database, asked: ReadOutcomes, now: float) -> Result:
    """What became of lines, jobs and failed ones together in the order of lines."""
    row = find_row(database, asked.name)
    if row is None:
        return UnknownName()
    jobs = database.execute(
        f"SELECT {rows.VIEW} FROM job WHERE batch = ? AND line > ? ORDER BY line LIMIT ?",
        row[0],
        asked.after,
        asked.count + 1,
    )
    failed = database.execute(
        "SELECT line, label, cause FROM failed_line WHERE batch = ? AND line > ?"
        " ORDER BY line LIMIT ?",
        row[0],
        asked.after,
        asked.count + 1,
    )
    both = [LineOutcome(job.line, job.label, job.cause, job) for job in map(rows.view, jobs)]
    both += [LineOutcome(line, label, cause, None) for line, label, cause in failed]
    both.sort(key=lambda outcome: outcome.line)
    page: list[LineOutcome] = []
    size = 0
    for outcome in both[: asked.count]:
        if page and size >= asked.max_bytes:
            break
        page.append(_with_output(database, outcome))
        size += rows.ROW_BYTES + _output_size(page[-1])
    return LineOutcomes(tuple(page), page[-1].line if len(page) < len(both) else -1)


def _output_size(outcome: LineOutcome) -> int:
    """Bytes of its output, at most."""
    end = 0 if outcome.job is None else len(outcome.job.end or b"")
    return end + 4 * len(outcome.text) + len(outcome.ids) + sum(map(len, outcome.logprobs))


def _with_output(database: Database, outcome: LineOutcome) -> LineOutcome:
    """With the output of an ended job, unless it has more than MAX_OUTPUT bytes."""
    job = outcome.job
    if job is None or job.state not in ENDED:
        return outcome
    left_out = replace(outcome, job=replace(job, end=None), whole=False)
    try:
        chunks = list(rows.chunks_of(database, job))
    except Damaged:  # who fetches the job is told which ids
        return left_out
    whole = replace(
        outcome,
        text="".join(chunk.text for chunk in chunks),
        ids=b"".join(chunk.ids for chunk in chunks),
        logprobs=tuple(chunk.logprobs for chunk in chunks if chunk.logprobs),
    )
    return whole if _output_size(whole) <= MAX_OUTPUT else left_out
