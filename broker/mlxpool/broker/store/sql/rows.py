"""Rows of jobs: how they are read, named, counted, ended and emptied."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlxpool.broker.store import checksums
from mlxpool.broker.store.chunks import (
    pack_borders,
    pack_text,
    stored_size,
    unpack_borders,
    unpack_text,
)
from mlxpool.broker.store.errors import Damaged
from mlxpool.broker.store.notice_bodies import job_notice
from mlxpool.broker.store.records import (
    ENDED,
    MAX_FAILURES,
    MAX_RETRIES,
    MAX_STACKS,
    Chunk,
    Failure,
    Fate,
    JobState,
    JobView,
    Name,
    Result,
    Scope,
    UnknownName,
)
from mlxpool.broker.store.sql import outbox
from mlxpool.broker.store.sql.database import Database, Row
from mlxpool.common.protocol.token_ids import count_of

ROW_BYTES = 512  # what a job takes beside its request and its output, about
VIEW = f"""seq, id, owner, tenant, key, digest, gen, kind, model, priority, seed, facts, state, pos,
    starts, attempts, charge, submitted, due, deadline, keep, forget, ended, end_seq, ending, cause,
    size, batch, line, label, notify, {outbox.state_of("job")}, facts_crc, ending_crc,
    retried"""
CHUNK = "pos, ids, text, borders, logprobs, crc"
WAITING = JobState.WAITING.value
ENDED_COLUMNS = {state: state.value for state in ENDED}  # of a batch


def view(row: Row) -> JobView:
    """The job of a row of the columns VIEW."""
    seq, id, owner, tenant, key, digest, gen, kind, model, priority, seed, facts, state = row[:13]
    end, facts_crc, end_crc = row[24], *row[-3:-1]
    damaged = ""
    if checksums.differs(facts_crc, checksums.of_facts(id, facts)):
        facts, damaged = None, "what its model was"
    if checksums.differs(end_crc, checksums.of_end(id, state, end)):
        end, damaged = None, "its end"
    fields: Any = (
        *(seq, id, Scope(owner, tenant, key), digest, gen, kind, model, priority),
        *(unsigned(seed), facts, JobState(state), *row[13:23], row[23] or 0, end, *row[25:-4]),
        *(row[-4] or "", damaged, unpack_borders(row[-1] or b"")),
    )
    return JobView(*fields)


def has_nul(scope: Scope) -> bool:
    """Whether a name has a character that PostgreSQL has not in texts, so that it names nothing."""
    return "\0" in scope.owner + scope.tenant + scope.key


def storable(text: str) -> str:
    """A message as both databases can store it: without NUL and halves of surrogate pairs."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def signed(seed: int) -> int:
    """A u64 as the integer of a database, which has a sign."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def unsigned(stored: int) -> int:
    """Undo `signed`."""
    return stored + (1 << 64) if stored < 0 else stored


def find(database: Database, name: Name) -> JobView | None:
    """The job of this name; None if there is none, or another owner's or tenant's."""
    if isinstance(name, bytes):
        row = database.one(f"SELECT {VIEW} FROM job WHERE id = ?", name)
    elif has_nul(name):
        return None
    else:
        row = database.one(
            f"SELECT {VIEW} FROM job WHERE owner = ? AND tenant = ? AND key = ?",
            name.owner,
            name.tenant,
            name.key,
        )
    return None if row is None else view(row)


def by_seq(database: Database, seq: int) -> JobView:
    """The job with this number, which exists."""
    row = database.one(f"SELECT {VIEW} FROM job WHERE seq = ?", seq)
    assert row is not None
    return view(row)


def fate(database: Database, name: Name) -> Result:
    """Why an operation on this job changed no row."""
    job = find(database, name)
    return UnknownName() if job is None else Fate(job)


# ---- output --------------------------------------------------------------------------------------


def chunk_of(job: JobView, row: Row) -> Chunk:
    """The chunk of a row of the columns CHUNK. Raises Damaged naming the job and the ids."""
    pos, ids, text, borders, logprobs, crc = row
    if checksums.differs(
        crc, checksums.of_chunk(job.seq, job.gen, pos, (ids, text, borders, logprobs))
    ):
        raise damage(
            job, f"ids from {pos} on, about {count_of(ids)} of {job.pos}, of generation {job.gen}"
        )
    return Chunk(pos, ids, unpack_text(text), unpack_borders(borders), logprobs)


def damage(job: JobView, what: str) -> Damaged:
    """The error for a part of a job that the disk has changed."""
    return Damaged(
        f"the disk has changed what is stored of the job {job.scope.key!r} ({job.id.hex()}): {what}"
    )


def chunks_of(database: Database, job: JobView, pos: int = 0) -> Iterator[Chunk]:
    """The chunk that has a position and those behind it, one read each. Raises Damaged."""
    row = database.one(
        f"SELECT {CHUNK} FROM chunk WHERE job = ? AND gen = ? AND pos <= ?"
        " ORDER BY pos DESC LIMIT 1",
        job.seq,
        job.gen,
        pos,
    )
    while row is not None:
        yield chunk_of(job, row)
        row = database.one(
            f"SELECT {CHUNK} FROM chunk WHERE job = ? AND gen = ? AND pos > ? ORDER BY pos LIMIT 1",
            job.seq,
            job.gen,
            row[0],
        )


def add_chunk(database: Database, seq: int, gen: int, chunk: Chunk) -> None:
    """Store output; the row of its job is not touched."""
    columns = (chunk.ids, pack_text(chunk.text), pack_borders(chunk.borders), chunk.logprobs)
    database.change(
        "INSERT INTO chunk (job, gen, pos, ids, text, borders, logprobs, crc)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        seq,
        gen,
        chunk.pos,
        *columns,
        checksums.of_chunk(seq, gen, chunk.pos, columns),
    )


def drop_output(database: Database, job: JobView) -> None:
    """Delete all output of a job and its facts; it is counted no more."""
    size = database.number(
        "SELECT SUM(LENGTH(ids) + LENGTH(text) + LENGTH(borders) + LENGTH(logprobs))"
        " FROM chunk WHERE job = ?",
        job.seq,
    )
    database.change("DELETE FROM chunk WHERE job = ?", job.seq)
    database.change(
        "UPDATE job SET pos = 0, facts = NULL, facts_crc = NULL, retried = NULL, size = size - ?"
        " WHERE seq = ?",
        size,
        job.seq,
    )
    count_usage(database, job.scope.owner, 0, -size)


# ---- what owners have stored ---------------------------------------------------------------------


def count_usage(database: Database, owner: str, jobs: int, size: int, file_bytes: int = 0) -> None:
    """Add to what an owner has stored: jobs, bytes of jobs and files, and what files count as."""
    if jobs or size or file_bytes:
        database.change(
            "INSERT INTO usage (owner, jobs, bytes, file_bytes) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (owner) DO UPDATE SET jobs = usage.jobs + excluded.jobs,"
            " bytes = usage.bytes + excluded.bytes,"
            " file_bytes = usage.file_bytes + excluded.file_bytes",
            owner,
            jobs,
            size,
            file_bytes,
        )


# ---- ends ----------------------------------------------------------------------------------------


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
        add_chunk(database, job.seq, job.gen, last)
        size, pos = size + stored_size(last), last.end
    end_seq = outbox.next_end(database)
    row = database.one(
        "UPDATE job SET state = ?, ending = ?, ending_crc = ?, cause = ?, end_seq = ?, ended = ?,"
        " forget = ?, starts = 0, size = size + ?, attempts = COALESCE(?, attempts), pos = ?,"
        " facts = COALESCE(facts, ?),"
        " facts_crc = CASE WHEN facts IS NULL THEN ? ELSE facts_crc END"
        f" WHERE seq = ? RETURNING {VIEW}",
        state.value,
        ending,
        checksums.of_end(job.id, state.value, ending),
        storable(cause),
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
    count_usage(database, job.scope.owner, 0, size)
    count_line(database, job, state, 1)
    ended = view(row)
    if not job.notify:
        return ended
    outbox.add(database, end_seq, outbox.JOB, job.id, job.notify, job_notice(ended), now)
    return by_seq(database, job.seq)


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
    count_usage(database, job.scope.owner, 0, -given_back)
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
        drop_output(database, job)
    return by_seq(database, job.seq)


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
    drop_blobs(database, job.seq)
    database.change(
        "UPDATE job SET state = ?, request = ?, request_crc = NULL, ending = NULL,"
        " ending_crc = NULL, facts = NULL, facts_crc = NULL, size = 0, forget = ? WHERE seq = ?",
        JobState.GONE.value,
        b"",
        until,
        job.seq,
    )
    count_usage(database, job.scope.owner, -1, -job.size)


# ---- failures ------------------------------------------------------------------------------------


def add_failure(database: Database, job: JobView, cause: str, stacks: str, now: float) -> None:
    """Note what went wrong with a job, if anything did; only the newest are kept."""
    if not cause:
        return
    cause, stacks = storable(cause), storable(stacks[:MAX_STACKS])
    number = 1 + database.number("SELECT MAX(number) FROM failure WHERE job = ?", job.seq)
    oldest = number - MAX_FAILURES
    dropped = database.number(
        "SELECT SUM(LENGTH(cause) + LENGTH(stacks)) FROM failure WHERE job = ? AND number <= ?",
        job.seq,
        oldest,
    )
    database.change("DELETE FROM failure WHERE job = ? AND number <= ?", job.seq, oldest)
    database.change(
        "INSERT INTO failure (job, number, at, cause, stacks) VALUES (?, ?, ?, ?, ?)",
        job.seq,
        number,
        now,
        cause,
        stacks,
    )
    added = len(cause) + len(stacks) - dropped
    database.change("UPDATE job SET size = size + ? WHERE seq = ?", added, job.seq)
    count_usage(database, job.scope.owner, 0, added)


def failures_of(database: Database, seq: int) -> tuple[Failure, ...]:
    """The stored failures of a job, the oldest first."""
    found = database.execute(
        "SELECT number, at, cause, stacks FROM failure WHERE job = ? ORDER BY number", seq
    )
    return tuple(Failure(*row) for row in found)


# ---- blobs ---------------------------------------------------------------------------------------


def add_blobs(database: Database, seq: int, blobs: Iterable[tuple[int, bytes]]) -> None:
    """Store (place, data) for a job; data that is stored already is only counted."""
    for place, data in blobs:
        sha = hashlib.sha256(data).digest()
        if not database.change("UPDATE blob SET refs = refs + 1 WHERE sha = ?", sha):
            database.change("INSERT INTO blob (sha, refs, data) VALUES (?, 1, ?)", sha, data)
        database.change("INSERT INTO job_blob (job, place, sha) VALUES (?, ?, ?)", seq, place, sha)


def add_answer(database: Database, job: JobView, blobs: Sequence[bytes]) -> None:
    """Store the blobs of the answer of a job that ends, at the places -1, -2 and so on."""
    if blobs:
        add_blobs(database, job.seq, ((-1 - index, data) for index, data in enumerate(blobs)))
        size = sum(map(len, blobs))
        database.change("UPDATE job SET size = size + ? WHERE seq = ?", size, job.seq)
        count_usage(database, job.scope.owner, 0, size)


def count_blobs(database: Database, job: JobView, *, of_answer: bool = False) -> int:
    """How many blobs the request of a job has, or its answer."""
    compared = "<" if of_answer else ">="
    return database.number(
        f"SELECT COUNT(*) FROM job_blob WHERE job = ? AND place {compared} 0", job.seq
    )


def read_blob(database: Database, job: JobView, place: int) -> bytes:
    """One blob of a job: of its answer, if the place is below 0. Raises Damaged."""
    row = database.one(
        "SELECT blob.sha, data FROM job_blob JOIN blob ON blob.sha = job_blob.sha"
        " WHERE job = ? AND place = ?",
        job.seq,
        place,
    )
    if row is None or hashlib.sha256(row[1]).digest() != row[0]:
        of = f"blob {place} of its request" if place >= 0 else f"blob {-1 - place} of its answer"
        raise damage(job, of)
    data: bytes = row[1]
    return data


def read_blobs(database: Database, job: JobView) -> tuple[bytes, ...]:
    """The blobs of the request of a job in their order. Raises Damaged."""
    count = count_blobs(database, job)
    return tuple(read_blob(database, job, place) for place in range(count))


def read_answer(database: Database, job: JobView) -> tuple[bytes, ...]:
    """The blobs of the answer of a job in their order. Raises Damaged."""
    count = count_blobs(database, job, of_answer=True)
    return tuple(read_blob(database, job, -1 - index) for index in range(count))


def read_request(database: Database, job: JobView) -> bytes:
    """The packed request of a job. Raises Damaged."""
    row = database.one("SELECT request, request_crc FROM job WHERE seq = ?", job.seq)
    assert row is not None
    return checked_request(job, *row)


def checked_request(job: JobView, request: bytes, crc: int | None) -> bytes:
    """A request as it was submitted. Raises Damaged if the disk has changed it."""
    if checksums.differs(crc, request_crc(job, request)):
        raise damage(job, "its request")
    return request


def request_crc(job: JobView, request: bytes) -> int:
    """The checksum of what a client has submitted."""
    return checksums.of_request(
        job.id, job.digest, job.kind, job.model, job.seed, request, job.notify
    )


def drop_blobs(database: Database, seq: int) -> None:
    """Delete the blobs that only this job has."""
    for (sha,) in database.execute("SELECT sha FROM job_blob WHERE job = ?", seq):
        database.change("UPDATE blob SET refs = refs - 1 WHERE sha = ?", sha)
        database.change("DELETE FROM blob WHERE sha = ? AND refs <= 0", sha)
    database.change("DELETE FROM job_blob WHERE job = ?", seq)
