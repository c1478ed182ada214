"""The contents of a job outside the table `job`: request and output, each with a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from mlxpool.broker.store import checksums
from mlxpool.broker.store.chunks import pack_borders, pack_text, unpack_borders, unpack_text
from mlxpool.broker.store.records import Chunk, JobView
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sql.database import Database, Row
from mlxpool.common.protocol.token_ids import count_of

CHUNK = "pos, ids, text, borders, logprobs, crc"


def chunk_of(job: JobView, row: Row) -> Chunk:
    """Returns the chunk of output in a row with the columns CHUNK.

    Raises Damaged, naming the job and the range of token ids, if the checksum is wrong.
    """
    pos, ids, text, borders, logprobs, crc = row
    if crc != checksums.of_chunk(job.seq, job.gen, pos, (ids, text, borders, logprobs)):
        raise rows.damage(
            job, f"ids from {pos} on, about {count_of(ids)} of {job.pos}, of generation {job.gen}"
        )
    return Chunk(pos, ids, unpack_text(text), unpack_borders(borders), logprobs)


def chunks_of(database: Database, job: JobView, pos: int = 0) -> Iterator[Chunk]:
    """Yields the chunk that contains `pos`, then all later chunks. Raises Damaged.

    Each chunk is read by its own query.
    """
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
    """Stores a chunk of output. The row of its job does not change."""
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


def begin_anew(database: Database, job: JobView) -> JobView:
    """Deletes the output of a job, and begins its next generation at position 0.

    Also deletes its `facts`, the values that a worker needs to resume the output.
    """
    size = database.number(
        "SELECT SUM(LENGTH(ids) + LENGTH(text) + LENGTH(borders) + LENGTH(logprobs))"
        " FROM chunk WHERE job = ?",
        job.seq,
    )
    database.change("DELETE FROM chunk WHERE job = ?", job.seq)
    return rows.change(
        database, job, gen=job.gen + 1, pos=0, facts=None, retried=(), size=job.size - size
    )


def add_blobs(database: Database, seq: int, blobs: Iterable[tuple[int, bytes]]) -> None:
    """Stores blobs (number, data) for a job.

    If the same data is already stored, only the count of its uses rises.
    """
    for place, data in blobs:
        sha = hashlib.sha256(data).digest()
        if not database.change("UPDATE blob SET refs = refs + 1 WHERE sha = ?", sha):
            database.change("INSERT INTO blob (sha, refs, data) VALUES (?, 1, ?)", sha, data)
        database.change("INSERT INTO job_blob (job, place, sha) VALUES (?, ?, ?)", seq, place, sha)


def add_answer(database: Database, job: JobView, blobs: Sequence[bytes]) -> int:
    """Stores the blobs of a job's answer with the numbers -1, -2 and so on.

    Returns the total size of the blobs in bytes.
    """
    add_blobs(database, job.seq, ((-1 - index, data) for index, data in enumerate(blobs)))
    return sum(map(len, blobs))


def count_blobs(database: Database, job: JobView, *, of_answer: bool = False) -> int:
    """Returns the number of blobs of a job's request, or of its answer."""
    compared = "<" if of_answer else ">="
    return database.number(
        f"SELECT COUNT(*) FROM job_blob WHERE job = ? AND place {compared} 0", job.seq
    )


def read_blob(database: Database, job: JobView, place: int) -> bytes:
    """Reads the blob of a job with the number `place`. Raises Damaged.

    Blobs of the request have the numbers 0, 1 …; blobs of the answer have -1, -2 …
    """
    row = database.one(
        "SELECT blob.sha, data FROM job_blob JOIN blob ON blob.sha = job_blob.sha"
        " WHERE job = ? AND place = ?",
        job.seq,
        place,
    )
    if row is None or hashlib.sha256(row[1]).digest() != row[0]:
        of = f"blob {place} of its request" if place >= 0 else f"blob {-1 - place} of its answer"
        raise rows.damage(job, of)
    data: bytes = row[1]
    return data


def read_blobs(database: Database, job: JobView) -> tuple[bytes, ...]:
    """Reads the blobs of a job's request, in order. Raises Damaged."""
    count = count_blobs(database, job)
    return tuple(read_blob(database, job, place) for place in range(count))


def read_answer(database: Database, job: JobView) -> tuple[bytes, ...]:
    """Reads the blobs of a job's answer, in order. Raises Damaged."""
    count = count_blobs(database, job, of_answer=True)
    return tuple(read_blob(database, job, -1 - index) for index in range(count))


def read_request(database: Database, job: JobView) -> bytes:
    """Reads the packed request of a job; returns b"" if the request was deleted. Raises Damaged."""
    row = database.one("SELECT data, crc FROM request WHERE job = ?", job.seq)
    assert row is not None
    return checked_request(job, *row)


def checked_request(job: JobView, data: bytes, crc: int | None) -> bytes:
    """Returns the data of a request after a comparison with its checksum. Raises Damaged."""
    submitted = (job.id, job.digest, job.kind, job.model, job.seed, data, job.notify)
    if crc is not None and crc != checksums.of_request(*submitted):
        raise rows.damage(job, "its request")
    return data


def drop_blobs(database: Database, seq: int) -> None:
    """Removes the blobs of a job. Blobs that other jobs have too stay stored."""
    for (sha,) in database.execute("SELECT sha FROM job_blob WHERE job = ?", seq):
        database.change("UPDATE blob SET refs = refs - 1 WHERE sha = ?", sha)
        database.change("DELETE FROM blob WHERE sha = ? AND refs <= 0", sha)
    database.change("DELETE FROM job_blob WHERE job = ?", seq)
