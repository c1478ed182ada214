"""The operations on jobs by their name, and what time does to them."""

from __future__ import annotations

from mlxpool.broker.store.chunks import stored_size
from mlxpool.broker.store.notice_bodies import job_notice
from mlxpool.broker.store.operations import Cancel, Release, Retry, Sweep
from mlxpool.broker.store.records import (
    ENDED,
    MAX_RETRIES,
    RETRYABLE,
    Changed,
    Chunk,
    JobState,
    JobView,
    Refused,
    Result,
    Swept,
)
from mlxpool.broker.store.sql import batches, contents, outbox, rows
from mlxpool.broker.store.sql.database import Database

ENDED_COLUMNS = {state: state.value for state in ENDED}  # of a batch


def end_job(
    database: Database,
    job: JobView,
    state: JobState,
    ending: bytes,
    cause: str,
    now: float,
    last: Chunk | None = None,
    facts: bytes | None = None,
    attempts: int | None = None,
    added: int = 0,
) -> JobView:
    """Let a waiting job end: the next number of an end is its own, and a notice if it asks so.

    `last` is appended to its output, with the facts if they are the first. `attempts` replaces
    what is stored, unless None. `added`: bytes that were stored of it and are not counted yet.
    """
    if state not in ENDED:
        raise ValueError(f"a job cannot end as {state.value!r}")
    size, pos = job.size + added + len(ending), job.pos
    if last is not None:
        contents.add_chunk(database, job.seq, job.gen, last)
        size, pos = size + stored_size(last), last.end
    ended = rows.change(
        database,
        job,
        state=state,
        end=ending,
        cause=cause,
        end_seq=outbox.next_end(database),
        ended=now,
        forget=None if job.keep is None else now + job.keep,
        starts=0,
        attempts=job.attempts if attempts is None else attempts,
        size=size,
        pos=pos,
        **({} if facts is None or job.facts is not None or job.damaged else {"facts": facts}),
    )
    count_line(database, job, state, 1)
    if not job.notify:
        return ended
    body = job_notice(ended)
    outbox.add(database, ended.end_seq, outbox.JOB, job.id, job.notify, body, now)
    return rows.by_seq(database, job.seq)


def let_wait(
    database: Database,
    job: JobView,
    deadline: float | None,
    now: float,
    *,
    new_generation: bool = False,
) -> JobView:
    """Let an ended job wait again.

    Notices of its end, and of that of its batch, that were not delivered are dropped: it has not
    ended any more.
    """
    outbox.drop(database, job.end_seq)
    database.change("DELETE FROM poison WHERE digest = ?", job.digest)
    waiting = rows.change(
        database,
        job,
        state=JobState.WAITING,
        starts=0,
        attempts=0,
        charge=0.0,
        due=now,
        deadline=deadline,
        forget=None,
        ended=None,
        end_seq=0,
        end=None,
        cause="",
        notice="",
        retried=_retried_again(job),
        size=job.size - len(job.end or b""),
    )
    count_line(database, job, job.state, -1)
    if job.batch is not None:  # its batch, if that has ended, has not any more
        row = database.one("SELECT end_seq FROM batch WHERE id = ? AND state = 'ended'", job.batch)
        if row is not None:
            outbox.drop(database, row[0])
            database.change(
                "UPDATE batch SET state = 'fed', ended = NULL, forget = NULL, end_seq = NULL,"
                " deleted = 0 WHERE id = ?",
                job.batch,
            )
    return contents.begin_anew(database, waiting) if new_generation else waiting


def may_retry(job: JobView) -> bool:
    """Whether a job may be let wait once more: each time is stored."""
    return sum(count for _, count in job.retried) < MAX_RETRIES


def _retried_again(job: JobView) -> tuple[tuple[int, int], ...]:
    """The places where a job was let wait again, with the one where it is now."""
    if not may_retry(job):
        return job.retried
    counts = {**dict(job.retried), job.pos: job.retries_at(job.pos) + 1}
    return tuple(counts.items())


def count_line(database: Database, job: JobView, state: JobState, change: int) -> None:
    """Count the end of a line of a batch; `change` is -1 when it waits again."""
    if job.batch is not None:
        column = ENDED_COLUMNS[state]
        database.change(f"UPDATE batch SET {column} = {column} + ? WHERE id = ?", change, job.batch)


def empty_job(database: Database, job: JobView, until: float) -> JobView:
    """Delete the request and the result of an ended job; its key is remembered until then."""
    database.change("DELETE FROM chunk WHERE job = ?", job.seq)
    database.change("DELETE FROM failure WHERE job = ?", job.seq)
    contents.drop_blobs(database, job.seq)
    database.change("UPDATE request SET data = ?, crc = NULL WHERE job = ?", b"", job.seq)
    rows.count_usage(database, job.scope.owner, -1, 0)
    return rows.change(
        database, job, state=JobState.GONE, end=None, facts=None, size=0, forget=until
    )


DEADLINE_CAUSE = "its deadline passed while it waited"


def cancel(database: Database, asked: Cancel, now: float) -> Result:
    """End a waiting job."""
    job = rows.find(database, asked.name)
    if job is None or job.state is not JobState.WAITING:
        return rows.fate(database, asked.name)
    return Changed(end_job(database, job, JobState.CANCELLED, asked.end, asked.cause, now))


def retry(database: Database, asked: Retry, now: float) -> Result:
    """Let a dead or expired job wait, unless its batch was cancelled."""
    job = rows.find(database, asked.name)
    if job is None or job.state not in RETRYABLE:
        return rows.fate(database, asked.name)
    if not batches.takes_again(database, job):
        why = f"the job {job.scope.key!r} is a line of a batch that was cancelled: submit it alone"
        return Refused("in_use", why)
    if not asked.new_generation and not may_retry(job):
        why = f"the job {job.scope.key!r} was tried again {MAX_RETRIES} times, which is the bound"
        return Refused("in_use", f"{why}: submit it under another key")
    deadline = None if asked.deadline is None else now + asked.deadline
    anew = asked.new_generation
    return Changed(let_wait(database, job, deadline, now, new_generation=anew))


def release(database: Database, asked: Release, now: float, key_life: float) -> Result:
    """Delete the result of an ended job."""
    job = rows.find(database, asked.name)
    if job is None or job.state not in ENDED:
        return rows.fate(database, asked.name)
    return Changed(empty_job(database, job, now + key_life))


# ---- time ----------------------------------------------------------------------------------------


def sweep(database: Database, asked: Sweep, now: float, key_life: float) -> Swept:
    """Expire, forget and delete what is past its time."""
    overdue = _overdue(database, asked, now)
    expired = tuple(
        end_job(database, job, JobState.EXPIRED, asked.expired_end, DEADLINE_CAUSE, now)
        for job in overdue[: asked.count]
    )
    forgotten = database.execute(
        "SELECT seq FROM job WHERE forget <= ? ORDER BY forget, seq LIMIT ?", now, asked.count
    )
    for (seq,) in forgotten:
        _forget(database, seq, now, key_life)
    database.change("DELETE FROM poison WHERE until <= ?", now)
    database.change("DELETE FROM usage WHERE jobs = 0 AND bytes = 0 AND file_bytes = 0")
    of_batches = batches.sweep(database, now, key_life, asked.count)
    more = asked.count in (len(overdue), len(forgotten)) or of_batches
    return Swept(expired, len(forgotten), more, _next(database, now))


def _overdue(database: Database, asked: Sweep, now: float) -> list[JobView]:
    jobs = rows.select(
        database,
        "state = 'waiting' AND deadline <= ? ORDER BY deadline, seq LIMIT ?",
        now,
        asked.count + len(asked.held),
    )
    return [job for job in jobs if job.id not in asked.held][: asked.count]


def _forget(database: Database, seq: int, now: float, key_life: float) -> None:
    """An ended job is gone; a gone one is deleted with its key, once its end was told."""
    job = rows.by_seq(database, seq)
    if job.state is not JobState.GONE:
        empty_job(database, job, now + key_life)
        return
    if outbox.is_waiting(database, job.end_seq):
        database.change("UPDATE job SET forget = ? WHERE seq = ?", now + outbox.HOLD, seq)
        return
    outbox.drop(database, job.end_seq)
    database.change("DELETE FROM request WHERE job = ?", seq)
    database.change("DELETE FROM job WHERE seq = ?", seq)


def _next(database: Database, now: float) -> float | None:
    """The earliest time of the future that ends something."""
    times = [
        row[0]
        for row in (
            database.one(
                "SELECT deadline FROM job WHERE state = 'waiting' AND deadline > ?"
                " ORDER BY deadline LIMIT 1",
                now,
            ),
            database.one("SELECT forget FROM job WHERE forget > ? ORDER BY forget LIMIT 1", now),
            database.one("SELECT forget FROM batch WHERE forget > ? ORDER BY forget LIMIT 1", now),
            database.one("SELECT forget FROM file WHERE forget > ? ORDER BY forget LIMIT 1", now),
        )
        if row is not None
    ]
    return min(times, default=None)
