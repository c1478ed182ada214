"""The operations on jobs that run: feed, progress, ends, and back to waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mlxpool.broker.store import checksums
from mlxpool.broker.store.chunks import check, stored_size, without_gap
from mlxpool.broker.store.errors import Damaged
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
    row = database.one(
        f"UPDATE job SET starts = starts + 1 WHERE seq = ? RETURNING {rows.VIEW}, request,"
        " request_crc, EXISTS (SELECT 1 FROM job_blob WHERE job_blob.job = job.seq)",
        seq,
    )
    assert row is not None
    job = rows.view(row[:-3])
    stored, crc, has_blobs = row[-3:]
    left = None if job.deadline is None else job.deadline - now
    try:
        request = contents.checked_request(job, stored, crc)
        blobs = contents.read_blobs(database, job) if has_blobs else ()
    except Damaged as error:
        return FedJob(job, b"", (), b"", left, damaged=str(error))
    ids = _durable_ids(database, job)
    if ids is None:
        # Readers may have had ids from behind the damage: what is computed again is another text.
        job, ids = _begin_anew(database, job), b""
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


def _begin_anew(database: Database, job: JobView) -> JobView:
    database.change("UPDATE job SET gen = gen + 1 WHERE seq = ?", job.seq)
    contents.drop_output(database, job)
    return rows.by_seq(database, job.seq)


# ---- output and ends -----------------------------------------------------------------------------


def progress(database: Database, asked: Progress, now: float) -> Result:
    """Append a chunk where the stored output ends."""
    chunk = asked.chunk
    check(chunk)
    size = stored_size(chunk)
    row = database.one(
        "UPDATE job SET pos = ?, starts = 0, size = size + ?, facts = COALESCE(facts, ?),"
        " facts_crc = CASE WHEN facts IS NULL THEN ? ELSE facts_crc END"
        " WHERE id = ? AND gen = ? AND pos = ? AND state = 'waiting' RETURNING seq, owner",
        chunk.end,
        size,
        asked.facts,
        checksums.of_facts(asked.id, asked.facts),
        asked.id,
        asked.gen,
        chunk.pos,
    )
    if row is None:
        return rows.fate(database, asked.id)
    contents.add_chunk(database, row[0], asked.gen, chunk)
    rows.count_usage(database, row[1], 0, size)
    return Durable(asked.id, asked.gen, chunk.end)


def finish(database: Database, asked: Finish, now: float) -> Result:
    """Append the last chunk and end the job, or neither."""
    if len(asked.end) > MAX_END:
        raise ValueError(f"the end of a job has {len(asked.end)} bytes, at most {MAX_END}")
    if (size := sum(map(len, asked.answer))) > MAX_ANSWER:
        raise ValueError(f"the answer of a job has {size} bytes, at most {MAX_ANSWER}")
    if asked.answer and asked.state is not JobState.DONE:
        raise ValueError(f"a job that is {asked.state.value} has no answer")
    job = rows.find(database, asked.id)
    if job is None or job.gen != asked.gen or job.state.value != rows.WAITING:
        return rows.fate(database, asked.id)
    last, facts = asked.chunk, None
    if last is not None:
        check(last)
        if last.pos != job.pos:
            return Fate(job)
        facts = asked.facts
    rows.add_failure(database, job, asked.cause, asked.stacks, now)
    contents.add_answer(database, job, asked.answer)
    ended = endings.end_job(
        database, job, asked.state, asked.end, asked.cause, now, last, facts, asked.attempts
    )
    return Changed(ended)


def defer(database: Database, asked: Defer, now: float) -> Result:
    """Let a job that ran wait until it is due again."""
    row = database.one(
        "UPDATE job SET due = ?, attempts = ?, charge = ?, starts = COALESCE(?, starts), cause = ?"
        " WHERE id = ? AND gen = ? AND state = 'waiting' RETURNING seq",
        now + asked.delay,
        asked.attempts,
        asked.charge,
        asked.starts,
        rows.storable(asked.cause),
        asked.id,
        asked.gen,
    )
    if row is None:
        return rows.fate(database, asked.id)
    job = rows.by_seq(database, row[0])
    rows.add_failure(database, job, asked.cause, asked.stacks, now)
    return Changed(rows.by_seq(database, row[0]))


def set_back(database: Database, asked: SetBack, now: float) -> Result:
    """Note the loss of a worker that ran a job."""
    row = database.one(
        "UPDATE job SET charge = ? WHERE id = ? AND gen = ? AND state = 'waiting' RETURNING seq",
        asked.charge,
        asked.id,
        asked.gen,
    )
    if row is None:
        return rows.fate(database, asked.id)
    rows.add_failure(database, rows.by_seq(database, row[0]), asked.cause, asked.stacks, now)
    return Done()


def new_generation(database: Database, asked: NewGeneration, now: float) -> Result:
    """Delete the output of a waiting job, which begins anew."""
    row = database.one(
        "UPDATE job SET gen = gen + 1 WHERE id = ? AND gen = ? AND state = 'waiting' RETURNING seq",
        asked.id,
        asked.gen,
    )
    if row is None:
        return rows.fate(database, asked.id)
    job = rows.by_seq(database, row[0])
    contents.drop_output(database, job)
    return Changed(rows.by_seq(database, job.seq))
