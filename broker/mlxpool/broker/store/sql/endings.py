"""Ends jobs, lets ended jobs wait again, and deletes the results of jobs."""

from __future__ import annotations

from mlxpool.broker.store.chunks import stored_size
from mlxpool.broker.store.notice_bodies import job_notice
from mlxpool.broker.store.records import ENDED, MAX_RETRIES, Chunk, JobState, JobView
from mlxpool.broker.store.sql import contents, outbox, rows
from mlxpool.broker.store.sql.database import Database

ENDED_COLUMNS = {state: state.value for state in ENDED}  # columns of `batch` that count its jobs


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
    """Ends a waiting job. If it has a `notify` URL, stores a notice of its end.

    `last` is appended to the job's output. `facts`, the values for a resume, are stored if the job
    has none yet. `attempts` replaces the stored number of attempts, unless it is None. `added`: the
    number of stored bytes of the job that the usage of its owner does not include yet.
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
    """Sets an ended job to waiting, so that it runs again.

    Undelivered notices of its end, and of its batch's end, are deleted.
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
    if job.batch is not None:  # an ended batch becomes live again
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
    """Returns whether this generation of a job was retried fewer than MAX_RETRIES times."""
    return sum(count for _, count in job.retried) < MAX_RETRIES


def _retried_again(job: JobView) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (position, number of retries) of a job after another retry.

    The retry counts at the job's present position. After MAX_RETRIES retries nothing is counted.
    """
    if not may_retry(job):
        return job.retried
    counts = {**dict(job.retried), job.pos: job.retries_at(job.pos) + 1}
    return tuple(counts.items())


def count_line(database: Database, job: JobView, state: JobState, change: int) -> None:
    """Adds `change` to the number of a batch's jobs that ended in `state`.

    `change` is 1 if the job has ended, and -1 if the ended job is set to waiting.
    """
    if job.batch is not None:
        column = ENDED_COLUMNS[state]
        database.change(f"UPDATE batch SET {column} = {column} + ? WHERE id = ?", change, job.batch)


def empty_job(database: Database, job: JobView, until: float) -> JobView:
    """Deletes the request and the result of an ended job; its key stays reserved until `until`."""
    database.change("DELETE FROM chunk WHERE job = ?", job.seq)
    database.change("DELETE FROM failure WHERE job = ?", job.seq)
    contents.drop_blobs(database, job.seq)
    database.change("UPDATE request SET data = ?, crc = NULL WHERE job = ?", b"", job.seq)
    rows.count_usage(database, job.scope.owner, -1, 0)
    return rows.change(
        database, job, state=JobState.GONE, end=None, facts=None, size=0, forget=until
    )
