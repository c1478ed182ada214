"""The operations on running jobs: start, progress, end, and return to the waiting jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mlxpool.broker.store.chunks import check, stored_size, without_gap
from mlxpool.broker.store.operations import (
    Defer,
    FeedNext,
    Finish,
    NewGeneration,
    Progress,
    SetBack,
)
from mlxpool.broker.store.records import (
    MAX_ANSWER,
    MAX_END,
    Changed,
    Damaged,
    Done,
    Durable,
    Fate,
    Fed,
    FedJob,
    JobState,
    JobView,
    Result,
)
from mlxpool.broker.store.sql import contents, endings, rows
from mlxpool.broker.store.sql.database import Database
from mlxpool.broker.store.sql.schema import OFTEN_STARTED
from mlxpool.common.protocol.token_ids import count_of

PAGE = 64  # most jobs of an owner in one query


# ---- feed ----------------------------------------------------------------------------------------


def feed_next(database: Database, operation: FeedNext, now: float) -> Fed:
    """Reads due jobs to run, and adds 1 to the `starts` of each job. The owners take turns."""
    jobs: list[FedJob] = []
    last_owner, size = operation.after_owner, 0
    seen: list[str] = []
    turns = _turns(database, operation, now, seen)
    for owner, seq in turns:
        job = _feed(database, seq, now)
        jobs.append(job)
        last_owner = owner
        size += len(job.request) + sum(map(len, job.blobs)) + len(job.ids)
        if len(jobs) >= operation.count or size >= operation.max_bytes:
            more = next(turns, None) is not None
            return Fed(tuple(jobs), last_owner, None, now, more=more)
    return Fed(tuple(jobs), last_owner, _next_due(database, operation, seen, now), now)


def _turns(
    database: Database, operation: FeedNext, now: float, seen: list[str]
) -> Iterator[tuple[str, int]]:
    """Yields (owner, seq) of due jobs: one of each owner, then a second of each, and so on.

    Each owner is appended to `seen` when its first job is read.
    """
    again: deque[tuple[str, Iterator[int]]] = deque()
    for owner in _owners(database, operation):
        seen.append(owner)
        waiting = _due(database, operation, owner, now)
        seq = next(waiting, None)
        if seq is not None:
            again.append((owner, waiting))
            yield owner, seq
    while again:
        owner, waiting = again.popleft()
        seq = next(waiting, None)
        if seq is not None:
            yield owner, seq
            again.append((owner, waiting))


def _waiting(operation: FeedNext) -> str:
    """Returns the SQL condition for waiting jobs of the operation's model and priority.

    If the operation reads only jobs with at least OFTEN_STARTED starts, the condition names this
    number, so that SQL can use the index of such jobs.
    """
    condition = "state = 'waiting' AND model = ? AND priority = ?"
    if operation.min_starts < OFTEN_STARTED:
        return condition
    return f"{condition} AND starts >= {OFTEN_STARTED}"


def owners_sql(operation: FeedNext) -> str:
    """Returns the query of the next owner with waiting jobs."""
    return f"SELECT owner FROM job WHERE {_waiting(operation)} AND owner > ? ORDER BY owner LIMIT 1"


def due_sql(operation: FeedNext) -> str:
    """Returns the query for one page of an owner's due jobs, the earliest due first."""
    return (
        f"SELECT seq, id, due FROM job WHERE {_waiting(operation)}"
        " AND owner = ? AND due <= ? AND (due, seq) > (?, ?)"
        " AND (deadline IS NULL OR deadline > ?) AND starts >= ? AND starts < ?"
        f" ORDER BY due, seq LIMIT {PAGE}"
    )


def next_due_sql(operation: FeedNext) -> str:
    """Returns the query for the next due time among an owner's jobs."""
    return (
        f"SELECT due FROM job WHERE {_waiting(operation)}"
        " AND owner = ? AND due > ? AND starts >= ? ORDER BY due LIMIT 1"
    )


def _owners(database: Database, operation: FeedNext) -> Iterator[str]:
    """Yields each owner with waiting jobs once, in the order of names.

    Begins after `after_owner`, and after the last name continues with the first name.
    """
    sql = owners_sql(operation)
    around = False
    owner = operation.after_owner
    while True:
        row = database.one(sql, operation.model, operation.priority, owner)
        if row is None and not around and operation.after_owner:
            around, owner = True, ""
            continue
        if row is None or (around and row[0] > operation.after_owner):
            return
        owner = row[0]
        if owner not in operation.but_owners:
            yield owner


def _due(database: Database, operation: FeedNext, owner: str, now: float) -> Iterator[int]:
    """Yields the numbers of an owner's due jobs, the earliest due first."""
    last = (float("-inf"), 0)
    sql, starts = due_sql(operation), (operation.min_starts, operation.below_starts)
    while True:
        page = database.execute(
            sql, operation.model, operation.priority, owner, now, *last, now, *starts
        )
        for seq, id, due in page:
            last = (due, seq)
            if id not in operation.held:
                yield seq
        if len(page) < PAGE:
            return


def _next_due(
    database: Database, operation: FeedNext, owners: list[str], now: float
) -> float | None:
    times, sql = [], next_due_sql(operation)
    for owner in owners:
        row = database.one(
            sql, operation.model, operation.priority, owner, now, operation.min_starts
        )
        if row is not None:
            times.append(row[0])
    return min(times, default=None)


def _feed(database: Database, seq: int, now: float) -> FedJob:
    """Returns a job to run, with the token ids that are already on disk.

    If its output is damaged, the job begins a new generation without token ids.
    """
    database.change("UPDATE job SET starts = starts + 1 WHERE seq = ?", seq)
    row = database.one(
        f"SELECT {rows.COLUMNS}, request.data, request.crc FROM {rows.JOBS} WHERE seq = ?", seq
    )
    assert row is not None
    *columns, data, crc = row
    job = rows.view(columns)
    left = None if job.deadline is None else job.deadline - now
    try:
        request = contents.checked_request(job, data, crc)
        blobs = contents.read_blobs(database, job)
    except Damaged as error:
        return FedJob(job, b"", (), b"", left, damaged=str(error))
    ids = _durable_ids(database, job)
    if ids is None:
        # Readers may have ids from after the damage, and a second run may compute other ids.
        job, ids = contents.begin_anew(database, job), b""
    return FedJob(job, request, blobs, ids, left)


def _durable_ids(database: Database, job: JobView) -> bytes | None:
    """Returns the packed token ids of a job's stored output; None if stored data is damaged."""
    if job.damaged:
        return None
    if not job.pos:
        return b""
    try:
        ids = without_gap((chunk.pos, chunk.ids) for chunk in contents.chunks_of(database, job))
    except Damaged:
        return None
    return ids if count_of(ids) == job.pos else None


# ---- output and ends -----------------------------------------------------------------------------


def progress(database: Database, operation: Progress, now: float) -> Result:
    """Appends a chunk to the stored output of a running job."""
    chunk = operation.chunk
    check(chunk)
    size = stored_size(chunk)
    row = database.one(
        "UPDATE job SET pos = ?, starts = 0, size = size + ?"
        " WHERE id = ? AND gen = ? AND pos = ? AND state = 'waiting'"
        " RETURNING seq, owner, record, record_crc",
        chunk.end,
        size,
        operation.id,
        operation.gen,
        chunk.pos,
    )
    if row is None:
        return rows.fate(database, operation.id)
    seq, owner, record, crc = row
    contents.add_chunk(database, seq, operation.gen, chunk)
    rows.count_usage(database, owner, 0, size)
    noted = None if operation.facts is None else rows.unpacked(operation.id, record, crc)
    if noted is not None and noted.facts is None:
        columns = rows.packed(operation.id, noted._replace(facts=operation.facts))
        database.change("UPDATE job SET record = ?, record_crc = ? WHERE seq = ?", *columns, seq)
    return Durable(operation.id, operation.gen, chunk.end)


def finish(database: Database, operation: Finish, now: float) -> Result:
    """Appends the last chunk and ends the job. Either both happen or neither."""
    if len(operation.end) > MAX_END:
        raise ValueError(f"the end of a job has {len(operation.end)} bytes, at most {MAX_END}")
    if (size := sum(map(len, operation.answer))) > MAX_ANSWER:
        raise ValueError(f"the answer of a job has {size} bytes, at most {MAX_ANSWER}")
    if operation.answer and operation.state is not JobState.DONE:
        raise ValueError(f"a job that is {operation.state.value} has no answer")
    job = _running(database, operation.id, operation.gen)
    if job is None:
        return rows.fate(database, operation.id)
    last, facts = operation.chunk, None
    if last is not None:
        check(last)
        if last.pos != job.pos:
            return Fate(job)
        facts = operation.facts
    added = rows.add_failure(database, job, operation.cause, operation.stacks, now)
    added += contents.add_answer(database, job, operation.answer)
    ended = endings.end_job(
        database,
        job,
        operation.state,
        operation.end,
        operation.cause,
        now,
        last,
        facts,
        operation.attempts,
        added,
    )
    return Changed(ended)


def _running(database: Database, id: bytes, gen: int) -> JobView | None:
    """Returns the running job with this id and generation, else None.

    Running jobs are stored in the state `waiting`.
    """
    job = rows.find(database, id)
    fits = job is not None and job.gen == gen and job.state is JobState.WAITING
    return job if fits else None


def defer(database: Database, operation: Defer, now: float) -> Result:
    """Returns a running job to the waiting jobs; it is due again after `operation.delay`."""
    job = _running(database, operation.id, operation.gen)
    if job is None:
        return rows.fate(database, operation.id)
    added = rows.add_failure(database, job, operation.cause, operation.stacks, now)
    job = rows.change(
        database,
        job,
        due=now + operation.delay,
        attempts=operation.attempts,
        charge=operation.charge,
        starts=job.starts if operation.starts is None else operation.starts,
        cause=operation.cause,
        size=job.size + added,
    )
    return Changed(job)


def set_back(database: Database, operation: SetBack, now: float) -> Result:
    """Stores that the worker of a job was lost, as a failure of the job; the job continues."""
    job = _running(database, operation.id, operation.gen)
    if job is None:
        return rows.fate(database, operation.id)
    added = rows.add_failure(database, job, operation.cause, operation.stacks, now)
    rows.change(database, job, charge=operation.charge, size=job.size + added)
    return Done()


def new_generation(database: Database, operation: NewGeneration, now: float) -> Result:
    """Deletes the output of a running job, and begins its next generation."""
    job = _running(database, operation.id, operation.gen)
    if job is None:
        return rows.fate(database, operation.id)
    return Changed(contents.begin_anew(database, job))
