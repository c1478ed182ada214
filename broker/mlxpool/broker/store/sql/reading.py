"""The operations that only read jobs."""

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


def read_job(database: Database, operation: ReadJob, now: float) -> Result:
    job = rows.find(database, operation.name)
    return UnknownName() if job is None else Found(job)


def read_history(database: Database, operation: ReadHistory, now: float) -> Result:
    job = rows.find(database, operation.name)
    return UnknownName() if job is None else History(job, rows.failures_of(database, job.seq))


def read_request(database: Database, operation: ReadRequest, now: float) -> Result:
    """Reads the submitted request of a job; returns KeyGone if the job was deleted."""
    job = rows.find(database, operation.id)
    if job is None:
        return UnknownName()
    if job.state is JobState.GONE:
        return KeyGone(job.id, job.forget or now, job.scope)
    request = contents.read_request(database, job)
    return StoredRequest(job, request, contents.read_blobs(database, job))


# ---- output --------------------------------------------------------------------------------------


def fetch_page(database: Database, operation: FetchPage, now: float) -> Result:
    """Reads a page of a job's output in whole steps, from the step that contains `pos` on."""
    job = rows.find(database, operation.name)
    if job is None:
        return UnknownName()
    if job.state is JobState.GONE:
        return KeyGone(job.id, job.forget or now, job.scope)
    if operation.gen not in (None, job.gen):
        return JobRestarted(job)
    if job.damaged:
        raise rows.damage(job, job.damaged)
    chunks: list[Chunk] = []
    room = operation.max_bytes
    for stored in contents.chunks_of(database, job, operation.pos):
        chunk = cut_from(stored, operation.pos)
        if not chunk.borders:
            continue  # the chunk ends at `pos`
        part = cut_to(chunk, room)
        if chunks and part.size > room:
            break
        chunks.append(part)
        room -= part.size
        if room <= 0 or part is not chunk:
            break
    whole = job.state in ENDED and (chunks[-1].end if chunks else operation.pos) >= job.pos
    return Page(job, tuple(chunks), contents.read_answer(database, job) if whole else ())


# ---- lists ---------------------------------------------------------------------------------------


def list_jobs(database: Database, operation: ListJobs, now: float) -> JobList:
    """Lists jobs in order of arrival, or in the reverse order."""
    where, values = _filters(operation.owner, operation.tenant, operation.states or NOT_GONE)
    if operation.batch is None:
        where.append("batch IS NULL")
    else:
        where.append("batch = ?")
        values.append(operation.batch)
    if operation.model:
        where.append("model = ?")
        values.append(operation.model)
    if operation.after or not operation.reverse:
        where.append("seq < ?" if operation.reverse else "seq > ?")
        values.append(operation.after)
    order = "seq DESC" if operation.reverse else "seq"
    jobs = _jobs(database, where, values, order, operation.count)
    return JobList(jobs, jobs[-1].seq if len(jobs) == operation.count else 0)


def list_ended(database: Database, operation: ListEnded, now: float) -> JobList:
    """Lists ended jobs in the order of their ends."""
    where, values = _filters(operation.owner, operation.tenant, tuple(JobState))
    jobs = _jobs(
        database, [*where, "end_seq > ?"], [*values, operation.after], "end_seq", operation.count
    )
    return JobList(jobs, jobs[-1].end_seq if len(jobs) == operation.count else 0)


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


def read_backlog(database: Database, operation: ReadBacklog, now: float) -> Backlog:
    backlog = database.execute(
        "SELECT model, priority, COUNT(*), MIN(due), MAX(starts) FROM job WHERE state = 'waiting'"
        " GROUP BY model, priority ORDER BY model, priority"
    )
    return Backlog(tuple((row[0], row[1], row[2], row[3], row[4]) for row in backlog), now)


# ---- whole jobs: copies, and comparison with checksums -------------------------------------------


def export_jobs(database: Database, operation: ExportJobs, now: float) -> Export:
    """Reads jobs with their output, up to the requested number of bytes."""
    jobs: list[ExportedJob] = []
    room = operation.max_bytes
    cursor: Cursor | None = operation.cursor
    while cursor is not None and room > 0 and len(jobs) < operation.count:
        job = _first_from(database, cursor.seq, operation.states or NOT_GONE)
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
    jobs = rows.select(database, condition, seq, *(state.value for state in states))
    return jobs[0] if jobs else None


def _exported(
    database: Database, job: JobView, at: Cursor, room: int
) -> tuple[ExportedJob, Cursor]:
    """Returns the parts of a job from a cursor on, and the cursor at which to continue."""
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
    places += [-1 - number for number in range(contents.count_blobs(database, job, of_answer=True))]
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
    """Returns the given parts of a job as an ExportedJob.

    `blobs` are (number, data); numbers below 0 belong to the job's answer.
    """
    of_request = tuple(blob for blob in blobs if blob[0] >= 0)
    answer = tuple((-1 - place, data) for place, data in blobs if place < 0)
    return ExportedJob(job, request, of_request, chunks, tuple(damaged), answer)


def _output(
    database: Database, job: JobView, pos: int, room: int, damaged: list[str], first: bool
) -> tuple[tuple[Chunk, ...], int | None]:
    """Returns output from `pos` on, and the position at which to continue; None at the end.

    `first`: return at least one chunk.
    """
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


def verify_jobs(database: Database, operation: VerifyJobs, now: float) -> Verified:
    """Compares stored jobs with their checksums, and returns the damaged parts."""
    jobs = rows.select(database, "seq > ? ORDER BY seq LIMIT ?", operation.after, operation.count)
    damaged: list[tuple[JobView, str]] = []
    size = checked = 0
    last = operation.after
    for job in jobs:
        if checked and size + job.size > operation.max_bytes:
            return Verified(checked, size, tuple(damaged), last)
        damaged += [(job, what) for what in _damages(database, job)]
        checked, size, last = checked + 1, size + job.size, job.seq
    return Verified(checked, size, tuple(damaged), last if len(jobs) == operation.count else 0)


def _damages(database: Database, job: JobView) -> list[str]:
    """Returns the damaged parts of a job. Of its output it returns only the first damaged part."""
    damages = [str(rows.damage(job, job.damaged))] if job.damaged else []
    if job.state is JobState.GONE:
        return damages
    try:
        contents.read_request(database, job)
        contents.read_blobs(database, job)
        contents.read_answer(database, job)
    except Damaged as error:
        damages.append(str(error))
    try:
        end = 0
        for chunk in contents.chunks_of(database, job):
            if chunk.pos != end:
                break
            end = chunk.end
        if end != job.pos:
            damages.append(str(rows.damage(job, f"{job.pos - end} ids from {end} on are missing")))
    except Damaged as error:
        damages.append(str(error))
    return damages
