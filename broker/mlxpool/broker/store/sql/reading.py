"""The operations that read jobs and change nothing."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.store.chunks import cut_from, cut_to
from mlxpool.broker.store.operations import (
    ExportJobs,
    FetchPage,
    ListEnded,
    ListJobs,
    ReadBacklog,
    ReadHistory,
    ReadJob,
    ReadRequest,
    VerifyJobs,
)
from mlxpool.broker.store.records import (
    ENDED,
    Backlog,
    Chunk,
    Cursor,
    Damaged,
    Export,
    ExportedJob,
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
    Verified,
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


# ---- whole jobs: copies, and comparison with checksums -------------------------------------------


def export_jobs(database: Database, asked: ExportJobs, now: float) -> Export:
    """Jobs and their output, until the bytes are more than asked for."""
    jobs: list[ExportedJob] = []
    room = asked.max_bytes
    cursor: Cursor | None = asked.cursor
    while cursor is not None and room > 0 and len(jobs) < asked.count:
        job = _first_from(database, cursor.seq, asked.states or NOT_GONE)
        if job is None:
            return Export(tuple(jobs), None)
        began = (cursor.seq, cursor.gen) == (job.seq, job.gen)
        at = cursor if began else Cursor(job.seq, job.gen)
        exported, cursor = _exported(database, job, at, room)
        jobs.append(exported)
        room -= _size(exported)
    return Export(tuple(jobs), cursor)


def _first_from(database: Database, seq: int, states: tuple[JobState, ...]) -> JobView | None:
    condition = f"seq >= ? AND state IN ({', '.join('?' * len(states))}) ORDER BY seq LIMIT 1"
    found = rows.select(database, condition, seq, *(state.value for state in states))
    return found[0] if found else None


def _exported(
    database: Database, job: JobView, at: Cursor, room: int
) -> tuple[ExportedJob, Cursor]:
    """A job, or what of it comes from a place on, and where to go on."""
    damaged: list[str] = []
    request: bytes | None = None
    if not at.part:
        request = b""
        damaged += [str(rows.damage(job, job.damaged))] if job.damaged else []
        try:
            request = contents.read_request(database, job)
        except Damaged as error:
            damaged.append(str(error))
        room -= len(request) + len(job.end or b"")
    blobs: list[tuple[int, bytes]] = []
    places = [*range(contents.count_blobs(database, job))]
    places += [-1 - one for one in range(contents.count_blobs(database, job, of_answer=True))]
    for index in range(max(0, at.part - 1), len(places)):
        try:
            data = contents.read_blob(database, job, places[index])
        except Damaged as error:
            damaged.append(str(error))
            continue
        if len(data) > room and (blobs or request is not None):
            return _part(job, request, blobs, (), damaged), Cursor(job.seq, job.gen, index + 1)
        blobs.append((places[index], data))
        room -= len(data)
    first = not blobs and request is None
    chunks, pos = _output(database, job, at.pos, room, damaged, first)
    following = Cursor(job.seq + 1)
    if pos is not None:
        following = Cursor(job.seq, job.gen, len(places) + 1, pos)
    return _part(job, request, blobs, chunks, damaged), following


def _part(
    job: JobView,
    request: bytes | None,
    blobs: list[tuple[int, bytes]],
    chunks: tuple[Chunk, ...],
    damaged: list[str],
) -> ExportedJob:
    """What a page has of a job; blobs at places below 0 are those of its answer."""
    of_request = tuple(one for one in blobs if one[0] >= 0)
    answer = tuple((-1 - place, data) for place, data in blobs if place < 0)
    return ExportedJob(job, request, of_request, chunks, tuple(damaged), answer)


def _output(
    database: Database, job: JobView, pos: int, room: int, damaged: list[str], first: bool
) -> tuple[tuple[Chunk, ...], int | None]:
    """Output from `pos` on, and where to go on, None: it is all. `first`: at least one chunk."""
    chunks: list[Chunk] = []
    try:
        for chunk in contents.chunks_of(database, job, pos):
            if chunk.pos < pos:
                continue
            if chunk.size > room and (chunks or not first):
                return tuple(chunks), chunk.pos
            chunks.append(chunk)
            room -= chunk.size
    except Damaged as error:
        damaged.append(str(error))
    return tuple(chunks), None


def _size(exported: ExportedJob) -> int:
    blobs = sum(len(data) for _, data in (*exported.blobs, *exported.answer))
    chunks = sum(chunk.size for chunk in exported.chunks)
    head = len(exported.request or b"") + len(exported.job.end or b"")
    return rows.ROW_BYTES + head + blobs + chunks


def verify_jobs(database: Database, asked: VerifyJobs, now: float) -> Verified:
    """Read jobs as they are stored, and name those that are not what was written."""
    found = rows.select(database, "seq > ? ORDER BY seq LIMIT ?", asked.after, asked.count)
    damaged: list[tuple[JobView, str]] = []
    size = checked = 0
    last = asked.after
    for job in found:
        if checked and size + job.size > asked.max_bytes:
            return Verified(checked, size, tuple(damaged), last)
        damaged += [(job, what) for what in _damages(database, job)]
        checked, size, last = checked + 1, size + job.size, job.seq
    return Verified(checked, size, tuple(damaged), last if len(found) == asked.count else 0)


def _damages(database: Database, job: JobView) -> list[str]:
    """What of a job is not as it was written; of its output the first part."""
    found = [str(rows.damage(job, job.damaged))] if job.damaged else []
    if job.state is JobState.GONE:
        return found
    try:
        contents.read_request(database, job)
        contents.read_blobs(database, job)
        contents.read_answer(database, job)
    except Damaged as error:
        found.append(str(error))
    try:
        end = 0
        for chunk in contents.chunks_of(database, job):
            if chunk.pos != end:
                break
            end = chunk.end
        if end != job.pos:
            found.append(str(rows.damage(job, f"{job.pos - end} ids from {end} on are missing")))
    except Damaged as error:
        found.append(str(error))
    return found
