"""Rows of jobs: how they are read and named, what counts as stored, and what failed."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.store import checksums
from mlxpool.broker.store.chunks import (
    unpack_borders,
)
from mlxpool.broker.store.errors import Damaged
from mlxpool.broker.store.records import (
    MAX_FAILURES,
    MAX_STACKS,
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

ROW_BYTES = 512  # what a job takes beside its request and its output, about
VIEW = f"""seq, id, owner, tenant, key, digest, gen, kind, model, priority, seed, facts, state, pos,
    starts, attempts, charge, submitted, due, deadline, keep, forget, ended, end_seq, ending, cause,
    size, batch, line, label, notify, {outbox.state_of("job")}, facts_crc, ending_crc,
    retried"""
WAITING = JobState.WAITING.value


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


def damage(job: JobView, what: str) -> Damaged:
    """The error for a part of a job that the disk has changed."""
    return Damaged(
        f"the disk has changed what is stored of the job {job.scope.key!r} ({job.id.hex()}): {what}"
    )


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
