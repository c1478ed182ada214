"""The operations on jobs that run: feed, progress, ends, and back to waiting."""

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

PAGE = 64  # rows that are read of an owner's jobs at once


# ---- feed ----------------------------------------------------------------------------------------


def feed_next(database: Database, asked: FeedNext, now: float) -> Fed:
    """Take due jobs in turns of their owners, and raise their `starts`."""
    jobs: list[FedJob] = []
    last_owner, size = asked.after_owner, 0
    seen: list[str] = []
    turns = _turns(database, asked, now, seen)
    for owner, seq in turns:
        job = _feed(database, seq, now)
        jobs.append(job)
        last_owner = owner
        size += len(job.request) + sum(map(len, job.blobs)) + len(job.ids)
        if len(jobs) >= asked.count or size >= asked.max_bytes:
            more = next(turns, None) is not None
            return Fed(tuple(jobs), last_owner, None, now, more=more)
    return Fed(tuple(jobs), last_owner, _next_due(database, asked, seen, now), now)


def _turns(
    database: Database, asked: FeedNext, now: float, seen: list[str]
) -> Iterator[tuple[str, int]]:
    """One job of each owner, then a second one, and so on; owners that were asked are `seen`."""
    again: deque[tuple[str, Iterator[int]]] = deque()
    for owner in _owners(database, asked):
        seen.append(owner)
        waiting = _due(database, asked, owner, now)
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


def _waiting(asked: FeedNext) -> str:
    """The condition of waiting jobs of a model and a priority that may be asked for.

    An index has those that were started often, see schema.SUSPECTS.
    """
    condition = "state = 'waiting' AND model = ? AND priority = ?"
    if asked.min_starts < OFTEN_STARTED:
        return condition
    return f"{condition} AND starts >= {OFTEN_STARTED}"


def owners_sql(asked: FeedNext) -> str:
    """The query of the next owner with waiting jobs."""
    return f"SELECT owner FROM job WHERE {_waiting(asked)} AND owner > ? ORDER BY owner LIMIT 1"


def due_sql(asked: FeedNext) -> str:
    """The query of a page of an owner's jobs that are due, the earliest first."""
    return (
        f"SELECT seq, id, due FROM job WHERE {_waiting(asked)}"
        " AND owner = ? AND due <= ? AND (due, seq) > (?, ?)"
        " AND (deadline IS NULL OR deadline > ?) AND starts >= ? AND starts < ?"
        f" ORDER BY due, seq LIMIT {PAGE}"
    )


def next_due_sql(asked: FeedNext) -> str:
    """The query of the time at which the next of an owner's jobs is due."""
    return (
        f"SELECT due FROM job WHERE {_waiting(asked)}"
        " AND owner = ? AND due > ? AND starts >= ? ORDER BY due LIMIT 1"
    )


def _owners(database: Database, asked: FeedNext) -> Iterator[str]:
    """Owners with waiting jobs, from the first behind `after_owner` once around."""
    sql = owners_sql(asked)
    around = False
    owner = asked.after_owner
    while True:
        row = database.one(sql, asked.model, asked.priority, owner)
        if row is None and not around and asked.after_owner:
            around, owner = True, ""
            continue
        if row is None or (around and row[0] > asked.after_owner):
            return
        owner = row[0]
        if owner not in asked.but_owners:
            yield owner


def _due(database: Database, asked: FeedNext, owner: str, now: float) -> Iterator[int]:
    """Numbers of an owner's jobs that may be fed, the earliest due first."""
    last = (float("-inf"), 0)
    sql, starts = due_sql(asked), (asked.min_starts, asked.below_starts)
    while True:
        page = database.execute(sql, asked.model, asked.priority, owner, now, *last, now, *starts)
        for seq, id, due in page:
            last = (due, seq)
            if id not in asked.held:
                yield seq
        if len(page) < PAGE:
            return


def _next_due(database: Database, asked: FeedNext, owners: list[str], now: float) -> float | None:
    found, sql = [], next_due_sql(asked)
    for owner in owners:
        row = database.one(sql, asked.model, asked.priority, owner, now, asked.min_starts)
        if row is not None:
            found.append(row[0])
    return min(found, default=None)


def _feed(database: Database, seq: int, now: float) -> FedJob:
    """A job with its durable ids; one whose output the disk has changed begins anew."""
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
        # Readers may have had ids from behind the damage: what is computed again is another text.
        job, ids = contents.begin_anew(database, job), b""
    return FedJob(job, request, blobs, ids, left)


def _durable_ids(database: Database, job: JobView) -> bytes | None:
    """The packed ids of a job; None if the disk has changed them, or its facts."""
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


def progress(database: Database, asked: Progress, now: float) -> Result:
    """Append a chunk where the stored output ends."""
    chunk = asked.chunk
    check(chunk)
    size = stored_size(chunk)
    row = database.one(
        "UPDATE job SET pos = ?, starts = 0, size = size + ?"
        " WHERE id = ? AND gen = ? AND pos = ? AND state = 'waiting'"
        " RETURNING seq, owner, record, record_crc",
        chunk.end,
        size,
        asked.id,
        asked.gen,
        chunk.pos,
    )
    if row is None:
        return rows.fate(database, asked.id)
    seq, owner, record, crc = row
    contents.add_chunk(database, seq, asked.gen, chunk)
    rows.count_usage(database, owner, 0, size)
    noted = None if asked.facts is None else rows.unpacked(asked.id, record, crc)
    if noted is not None and noted.facts is None:
        columns = rows.packed(asked.id, noted._replace(facts=asked.facts))
        database.change("UPDATE job SET record = ?, record_crc = ? WHERE seq = ?", *columns, seq)
    return Durable(asked.id, asked.gen, chunk.end)


def finish(database: Database, asked: Finish, now: float) -> Result:
    """Append the last chunk and end the job, or neither."""
    if len(asked.end) > MAX_END:
        raise ValueError(f"the end of a job has {len(asked.end)} bytes, at most {MAX_END}")
    if (size := sum(map(len, asked.answer))) > MAX_ANSWER:
        raise ValueError(f"the answer of a job has {size} bytes, at most {MAX_ANSWER}")
    if asked.answer and asked.state is not JobState.DONE:
        raise ValueError(f"a job that is {asked.state.value} has no answer")
    job = _running(database, asked.id, asked.gen)
    if job is None:
        return rows.fate(database, asked.id)
    last, facts = asked.chunk, None
    if last is not None:
        check(last)
        if last.pos != job.pos:
            return Fate(job)
        facts = asked.facts
    added = rows.add_failure(database, job, asked.cause, asked.stacks, now)
    added += contents.add_answer(database, job, asked.answer)
    ended = endings.end_job(
        database,
        job,
        asked.state,
        asked.end,
        asked.cause,
        now,
        last,
        facts,
        asked.attempts,
        added,
    )
    return Changed(ended)


def _running(database: Database, id: bytes, gen: int) -> JobView | None:
    """A waiting job of this generation."""
    job = rows.find(database, id)
    fits = job is not None and job.gen == gen and job.state is JobState.WAITING
    return job if fits else None


def defer(database: Database, asked: Defer, now: float) -> Result:
    """Let a job that ran wait until it is due again."""
    job = _running(database, asked.id, asked.gen)
    if job is None:
        return rows.fate(database, asked.id)
    added = rows.add_failure(database, job, asked.cause, asked.stacks, now)
    job = rows.change(
        database,
        job,
        due=now + asked.delay,
        attempts=asked.attempts,
        charge=asked.charge,
        starts=job.starts if asked.starts is None else asked.starts,
        cause=asked.cause,
        size=job.size + added,
    )
    return Changed(job)


def set_back(database: Database, asked: SetBack, now: float) -> Result:
    """Note the loss of a worker that ran a job."""
    job = _running(database, asked.id, asked.gen)
    if job is None:
        return rows.fate(database, asked.id)
    added = rows.add_failure(database, job, asked.cause, asked.stacks, now)
    rows.change(database, job, charge=asked.charge, size=job.size + added)
    return Done()


def new_generation(database: Database, asked: NewGeneration, now: float) -> Result:
    """Delete the output of a waiting job, which begins anew."""
    job = _running(database, asked.id, asked.gen)
    if job is None:
        return rows.fate(database, asked.id)
    return Changed(contents.begin_anew(database, job))
