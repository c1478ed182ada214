"""The operations that read whole jobs: for a copy outside, and to compare them with checksums."""

from __future__ import annotations

from mlxpool.broker.store.errors import Damaged
from mlxpool.broker.store.operations import ExportJobs, VerifyJobs
from mlxpool.broker.store.records import (
    Chunk,
    Cursor,
    Export,
    ExportedJob,
    JobState,
    JobView,
    Verified,
)
from mlxpool.broker.store.sql import contents, rows
from mlxpool.broker.store.sql.database import Database

NOT_GONE = tuple(state for state in JobState if state is not JobState.GONE)


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
