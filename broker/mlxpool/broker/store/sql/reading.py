"""The operations that read jobs and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxpool.broker.store.chunks import cut_from, cut_to
from mlxpool.broker.store.operations import (
    ExportJobs,
    FetchPage,
    ListEnded,
    ListJobs,
    ReadBacklog,
    ReadJob,
    ReadRequest,
)
from mlxpool.broker.store.records import (
    Backlog,
    Chunk,
    Export,
    ExportedJob,
    Found,
    JobList,
    JobRestarted,
    JobState,
    JobView,
    KeyGone,
    Page,
    Result,
    StoredRequest,
    UnknownName,
)
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sql.database import Database

CHUNK = "pos, ids, text, borders, logprobs"
NOT_GONE = tuple(state for state in JobState if state is not JobState.GONE)


def read_job(database: Database, asked: ReadJob, now: float) -> Result:
    job = rows.find(database, asked.name)
    return UnknownName() if job is None else Found(job)


def read_request(database: Database, asked: ReadRequest, now: float) -> Result:
    """What was submitted; of a job that is gone it is deleted."""
    job = rows.find(database, asked.id)
    if job is None:
        return UnknownName()
    if job.state is JobState.GONE:
        return KeyGone(job.id, job.forget or now, job.scope)
    row = database.one("SELECT request FROM job WHERE seq = ?", job.seq)
    assert row is not None
    return StoredRequest(job, row[0], rows.read_blobs(database, job.seq))


# ---- output --------------------------------------------------------------------------------------


def fetch_page(database: Database, asked: FetchPage, now: float) -> Result:
    """Whole steps of output from the border at or before a position on."""
    job = rows.find(database, asked.name)
    if job is None:
        return UnknownName()
    if job.state is JobState.GONE:
        return KeyGone(job.id, job.forget or now, job.scope)
    if asked.gen not in (None, job.gen):
        return JobRestarted(job)
    chunks: list[Chunk] = []
    room = asked.max_bytes
    for chunk in _chunks_from(database, job, asked.pos):
        if not chunk.borders:
            continue  # the position is its end
        part = cut_to(chunk, room)
        if chunks and part.size > room:
            break
        chunks.append(part)
        room -= part.size
        if room <= 0 or part is not chunk:
            break
    return Page(job, tuple(chunks))


def _chunks_from(database: Database, job: JobView, pos: int) -> Iterator[Chunk]:
    """The chunk that has a position, from a border on, and those behind it, one read each."""
    row = database.one(
        f"SELECT {CHUNK} FROM chunk WHERE job = ? AND gen = ? AND pos <= ?"
        " ORDER BY pos DESC LIMIT 1",
        job.seq,
        job.gen,
        pos,
    )
    while row is not None:
        chunk = rows.chunk_of(row)
        yield cut_from(chunk, pos)
        row = database.one(
            f"SELECT {CHUNK} FROM chunk WHERE job = ? AND gen = ? AND pos > ? ORDER BY pos LIMIT 1",
            job.seq,
            job.gen,
            chunk.pos,
        )


# ---- lists ---------------------------------------------------------------------------------------


def list_jobs(database: Database, asked: ListJobs, now: float) -> JobList:
    """Jobs in order of arrival, or in the reverse order."""
    where, values = _filters(asked.owner, asked.tenant, asked.states or NOT_GONE)
    if asked.batch is None:
        where.append("batch IS NULL")
    else:
        where.append("batch = ?")
        values.append(asked.batch)
    if asked.after or not asked.reverse:
        where.append("seq < ?" if asked.reverse else "seq > ?")
        values.append(asked.after)
    order = "seq DESC" if asked.reverse else "seq"
    jobs = _jobs(database, where, values, order, asked.count)
    return JobList(jobs, jobs[-1].seq if len(jobs) == asked.count else 0)


def list_ended(database: Database, asked: ListEnded, now: float) -> JobList:
    """Ended jobs in the order of their ends."""
    where, values = _filters(asked.owner, asked.tenant, NOT_GONE)
    jobs = _jobs(database, [*where, "end_seq > ?"], [*values, asked.after], "end_seq", asked.count)
    return JobList(jobs, jobs[-1].end_seq if len(jobs) == asked.count else 0)


def _filters(
    owner: str | None, tenant: str | None, states: tuple[JobState, ...]
) -> tuple[list[str], list[Any]]:
    where = [f"state IN ({', '.join('?' * len(states))})"]
    values: list[Any] = [state.value for state in states]
    for column, value in (("owner", owner), ("tenant", tenant)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    return where, values


def _jobs(
    database: Database, where: list[str], values: list[Any], order: str, count: int
) -> tuple[JobView, ...]:
    found = database.execute(
        f"SELECT {rows.VIEW} FROM job WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?",
        *values,
        count,
    )
    return tuple(map(rows.view, found))


def read_backlog(database: Database, asked: ReadBacklog, now: float) -> Backlog:
    found = database.execute(
        "SELECT model, priority, COUNT(*), MIN(due) FROM job WHERE state = 'waiting'"
        " GROUP BY model, priority ORDER BY model, priority"
    )
    return Backlog(tuple((row[0], row[1], row[2], row[3]) for row in found), now)


# ---- export --------------------------------------------------------------------------------------


def export_jobs(database: Database, asked: ExportJobs, now: float) -> Export:
    """Whole jobs, until the bytes are more than asked for."""
    where, values = _filters(None, None, asked.states or NOT_GONE)
    found = database.execute(
        f"SELECT seq FROM job WHERE {' AND '.join(where)} AND seq > ? ORDER BY seq LIMIT ?",
        *values,
        asked.after,
        asked.count,
    )
    jobs: list[ExportedJob] = []
    size = 0
    for (seq,) in found:
        if jobs and size >= asked.max_bytes:
            break
        job = rows.by_seq(database, seq)
        jobs.append(_exported(database, job))
        size += job.size
    complete = len(jobs) == len(found) and len(found) < asked.count
    return Export(tuple(jobs), 0 if complete or not jobs else jobs[-1].job.seq)


def _exported(database: Database, job: JobView) -> ExportedJob:
    chunks = database.execute(
        f"SELECT {CHUNK} FROM chunk WHERE job = ? AND gen = ? ORDER BY pos", job.seq, job.gen
    )
    row = database.one("SELECT request FROM job WHERE seq = ?", job.seq)
    assert row is not None
    return ExportedJob(
        job, row[0], rows.read_blobs(database, job.seq), tuple(map(rows.chunk_of, chunks))
    )
