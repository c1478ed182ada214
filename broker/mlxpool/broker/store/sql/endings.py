"""How jobs end, wait again after their end, and are emptied."""

from __future__ import annotations

from mlxpool.broker.store import checksums
from mlxpool.broker.store.chunks import pack_borders, stored_size
from mlxpool.broker.store.notice_bodies import job_notice
from mlxpool.broker.store.records import ENDED, MAX_RETRIES, Chunk, JobState, JobView
from mlxpool.broker.store.sql import contents, outbox, rows
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
) -> JobView:
    """Let a waiting job end: the next number of an end is its own, and a notice if it asks so.

    `last` is appended to its output, with the facts if they are the first. `attempts` replaces
    what is stored, unless None.
    """
    if state not in ENDED:
        raise ValueError(f"a job cannot end as {state.value!r}")
    size, pos = len(ending), job.pos
    if last is not None:
        contents.add_chunk(database, job.seq, job.gen, last)
        size, pos = size + stored_size(last), last.end
    end_seq = outbox.next_end(database)
    row = database.one(
        "UPDATE job SET state = ?, ending = ?, ending_crc = ?, cause = ?, end_seq = ?, ended = ?,"
        " forget = ?, starts = 0, size = size + ?, attempts = COALESCE(?, attempts), pos = ?,"
        " facts = COALESCE(facts, ?),"
        " facts_crc = CASE WHEN facts IS NULL THEN ? ELSE facts_crc END"
        f" WHERE seq = ? RETURNING {rows.VIEW}",
        state.value,
        ending,
        checksums.of_end(job.id, state.value, ending),
        rows.storable(cause),
        end_seq,
        now,
        None if job.keep is None else now + job.keep,
        size,
        attempts,
        pos,
        facts,
        checksums.of_facts(job.id, facts),
        job.seq,
    )
    assert row is not None
    rows.count_usage(database, job.scope.owner, 0, size)
    count_line(database, job, state, 1)
    ended = rows.view(row)
    if not job.notify:
        return ended
    outbox.add(database, end_seq, outbox.JOB, job.id, job.notify, job_notice(ended), now)
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
    given_back = len(job.end or b"")
    database.change(
        "UPDATE job SET state = 'waiting', gen = gen + ?, starts = 0, attempts = 0, charge = 0,"
        " due = ?, deadline = ?, forget = NULL, ended = NULL, end_seq = NULL, ending = NULL,"
        " ending_crc = NULL, cause = '', retried = ?, size = size - ? WHERE seq = ?",
        int(new_generation),
        now,
        deadline,
        pack_borders(_retried_again(job)),
        given_back,
        job.seq,
    )
    rows.count_usage(database, job.scope.owner, 0, -given_back)
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
    if new_generation:
        contents.drop_output(database, job)
    return rows.by_seq(database, job.seq)


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


def empty_job(database: Database, job: JobView, until: float) -> None:
    """Delete the request and the result of an ended job; its key is remembered until then."""
    database.change("DELETE FROM chunk WHERE job = ?", job.seq)
    database.change("DELETE FROM failure WHERE job = ?", job.seq)
    contents.drop_blobs(database, job.seq)
    database.change(
        "UPDATE job SET state = ?, request = ?, request_crc = NULL, ending = NULL,"
        " ending_crc = NULL, facts = NULL, facts_crc = NULL, size = 0, forget = ? WHERE seq = ?",
        JobState.GONE.value,
        b"",
        until,
        job.seq,
    )
    rows.count_usage(database, job.scope.owner, -1, -job.size)
