"""The operations that read jobs and change nothing."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.store.chunks import cut_from, cut_to
from mlxpool.broker.store.operations import (
    FetchPage,
    ListEnded,
    ListJobs,
    ReadBacklog,
    ReadHistory,
    ReadJob,
    ReadRequest,
)
from mlxpool.broker.store.records import (
    ENDED,
    Backlog,
    Chunk,
    Found,
    History,
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
from mlxpool.broker.store.sql import contents, rows
from mlxpool.broker.store.sql.database import Database

NOT_GONE = tuple(state for state in JobState if state is not JobState.GONE)


def read_job(database: Database, asked: ReadJob, now: float) -> Result:
    job = rows.find(database, asked.name)
    return UnknownName() if job is None else Found(job)


def read_history(database: Database, asked: ReadHistory, now: float) -> Result:
    job = rows.find(database, asked.name)
    return UnknownName() if job is None else History(job, rows.failures_of(database, job.seq))


def read_request(database: Database, asked: ReadRequest, now: float) -> Result:
    """What was submitted; of a job that is gone it is deleted."""
    job = rows.find(database, asked.id)
    if job is None:
        return UnknownName()
    if job.state is JobState.GONE:
        return KeyGone(job.id, job.forget or now, job.scope)
    request = contents.read_request(database, job)
    return StoredRequest(job, request, contents.read_blobs(database, job))


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
    if job.damaged:
        raise rows.damage(job, job.damaged)
    chunks: list[Chunk] = []
    room = asked.max_bytes
    for stored in contents.chunks_of(database, job, asked.pos):
        chunk = cut_from(stored, asked.pos)
        if not chunk.borders:
            continue  # the position is its end
        part = cut_to(chunk, room)
        if chunks and part.size > room:
            break
        chunks.append(part)
        room -= part.size
        if room <= 0 or part is not chunk:
            break
    whole = job.state in ENDED and (chunks[-1].end if chunks else asked.pos) >= job.pos
    return Page(job, tuple(chunks), contents.read_answer(database, job) if whole else ())


# ---- lists ---------------------------------------------------------------------------------------


def list_jobs(database: Database, asked: ListJobs, now: float) -> JobList:
    """Jobs in order of arrival, or in the reverse order."""
    where, values = _filters(asked.owner, asked.tenant, asked.states or NOT_GONE)
    if asked.batch is None:
        where.append("batch IS NULL")
    else:
        where.append("batch = ?")
        values.append(asked.batch)
    if asked.model:
        where.append("model = ?")
        values.append(asked.model)
    if asked.after or not asked.reverse:
        where.append("seq < ?" if asked.reverse else "seq > ?")
        values.append(asked.after)
    order = "seq DESC" if asked.reverse else "seq"
    jobs = _jobs(database, where, values, order, asked.count)
    return JobList(jobs, jobs[-1].seq if len(jobs) == asked.count else 0)


def list_ended(database: Database, asked: ListEnded, now: float) -> JobList:
    """Ended jobs in the order of their ends."""
    where, values = _filters(asked.owner, asked.tenant, tuple(JobState))
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
    condition = f"{' AND '.join(where)} ORDER BY {order} LIMIT ?"
    return tuple(rows.select(database, condition, *values, count))


def read_backlog(database: Database, asked: ReadBacklog, now: float) -> Backlog:
    found = database.execute(
        "SELECT model, priority, COUNT(*), MIN(due), MAX(starts) FROM job WHERE state = 'waiting'"
        " GROUP BY model, priority ORDER BY model, priority"
    )
    return Backlog(tuple((row[0], row[1], row[2], row[3], row[4]) for row in found), now)
