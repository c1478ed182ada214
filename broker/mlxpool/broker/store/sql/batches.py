"""The operations on batches: lines of a file that become jobs."""

from __future__ import annotations

import re

from mlxpool.broker.store.batch_operations import (
    MAX_LINE,
    AddLines,
    BatchChanged,
    BatchState,
    BatchSubmitted,
    BatchView,
    CancelBatch,
    EndBatch,
    Lines,
    Outcomes,
    ReadLines,
    ReleaseBatch,
    ReleaseOutcomes,
    RetryBatch,
    SubmitBatch,
)
from mlxpool.broker.store.notice_bodies import batch_notice
from mlxpool.broker.store.records import (
    ENDED,
    RETRYABLE,
    DuplicateKey,
    JobState,
    JobView,
    KeyGone,
    Refused,
    Result,
    Submitted,
    UnknownName,
)
from mlxpool.broker.store.sql import endings, files, outbox, rows
from mlxpool.broker.store.sql.batch_reading import LIVE, find
from mlxpool.broker.store.sql.database import Database
from mlxpool.broker.store.sql.submitting import check_names, submit_line

# ---- begin and end -------------------------------------------------------------------------------


def submit_batch(database: Database, asked: SubmitBatch, now: float) -> Result:
    """Store a batch, or answer the one that its key names already."""
    scope = asked.scope
    known = find(database, scope)
    if known is not None:
        if known.state is BatchState.GONE:
            return KeyGone(known.id, known.forget or now)
        if known.digest != asked.digest:
            return DuplicateKey(known.id)
        return BatchSubmitted(known, new=False)
    file = files.find(database, asked.file, scope.owner, scope.tenant)
    if file is None:
        return UnknownName()
    if not file.complete:
        return file
    live = database.number(f"SELECT COUNT(*) FROM batch WHERE owner = ? AND {LIVE}", scope.owner)
    if live >= asked.max_live:
        why = f"{live} batches of this owner have not ended, at most {asked.max_live}"
        return Refused("over_quota", why)
    check_names(scope, asked.notify)
    database.change(
        "INSERT INTO batch (id, owner, tenant, key, file, digest, defaults, state, next_line,"
        " next_start, created, deadline, keep, notify)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, 'open', 0, 0, ?, ?, ?, ?)",
        asked.id,
        scope.owner,
        scope.tenant,
        scope.key,
        asked.file,
        asked.digest,
        asked.defaults,
        now,
        None if asked.deadline is None else now + asked.deadline,
        asked.keep,
        asked.notify,
    )
    database.change("UPDATE file SET waits_since = NULL WHERE id = ?", asked.file)
    return BatchSubmitted(_again(database, asked.id), new=True)


def _again(database: Database, id: bytes) -> BatchView:
    found = find(database, id)
    assert found is not None
    return found


def cancel_batch(database: Database, asked: CancelBatch, now: float) -> Result:
    """Cancel what waits, some jobs at a time."""
    batch = find(database, asked.name)
    if batch is None:
        return UnknownName()
    if batch.state in (BatchState.OPEN, BatchState.FED):
        database.change("UPDATE batch SET state = 'cancelled' WHERE id = ?", batch.id)
    elif batch.state is not BatchState.CANCELLED:
        return BatchChanged(batch, ())
    waiting = _jobs(database, batch, (JobState.WAITING,), asked.count)
    cause = "its batch was cancelled"
    ended = tuple(
        endings.end_job(database, job, JobState.CANCELLED, asked.end, cause, now) for job in waiting
    )
    return BatchChanged(_again(database, batch.id), ended)


EMPTY_LINES = re.compile(rb"(?:[ \t\r\v\f]*+\n)++")
OUTCOMES = {True: Outcomes.DONE, False: Outcomes.OTHERS}  # by whether a line is done


def retry_batch(database: Database, asked: RetryBatch, now: float) -> Result:
    """Let dead and expired jobs wait again, some at a time."""
    batch = find(database, asked.name)
    if batch is None:
        return UnknownName()
    if batch.state not in (BatchState.OPEN, BatchState.FED, BatchState.ENDED):
        return BatchChanged(batch, ())
    failed = _jobs(database, batch, tuple(RETRYABLE), asked.count)
    jobs = tuple(endings.let_wait(database, job, None, now) for job in failed)
    return BatchChanged(_again(database, batch.id), jobs)


def release_batch(database: Database, asked: ReleaseBatch, now: float) -> Result:
    """Have an ended batch forgotten by the next sweeps."""
    batch = find(database, asked.name)
    if batch is None:
        return UnknownName()
    if batch.ended is not None and batch.state is not BatchState.GONE:
        database.change("UPDATE batch SET forget = ? WHERE id = ?", now, batch.id)
    return _again(database, batch.id)


def release_outcomes(
    database: Database, asked: ReleaseOutcomes, now: float, key_life: float
) -> Result:
    """Delete results of an ended batch, some jobs at a time."""
    batch = find(database, asked.name)
    if batch is None:
        return UnknownName()
    if batch.ended is None or batch.state is BatchState.GONE:
        return BatchChanged(batch, ())
    states = tuple(
        state for state in sorted(ENDED) if OUTCOMES[state is JobState.DONE] & asked.outcomes
    )
    jobs = _jobs(database, batch, states, asked.count)
    for job in jobs:
        endings.empty_job(database, job, now + key_life)
    if Outcomes.OTHERS & asked.outcomes:
        database.change("DELETE FROM failed_line WHERE batch = ?", batch.id)
    # With the first results: who reads the others meanwhile is told why these are missing.
    deleted = batch.deleted | asked.outcomes
    if not _has_results(database, batch.id):
        deleted = Outcomes.DONE | Outcomes.OTHERS  # nobody reads its lines any more
        files.let_go(database, batch.id, now)
    database.change("UPDATE batch SET deleted = ? WHERE id = ?", int(deleted), batch.id)
    return BatchChanged(_again(database, batch.id), tuple(jobs))


def _has_results(database: Database, id: bytes) -> bool:
    found = database.one("SELECT 1 FROM job WHERE batch = ? AND state <> 'gone' LIMIT 1", id)
    failed = database.one("SELECT 1 FROM failed_line WHERE batch = ? LIMIT 1", id)
    return found is not None or failed is not None


def _jobs(
    database: Database, batch: BatchView, states: tuple[JobState, ...], count: int
) -> list[JobView]:
    """The first jobs of a batch that are in one of these states."""
    return rows.select(
        database,
        f"batch = ? AND state IN ({', '.join('?' * len(states))}) LIMIT ?",
        batch.id,
        *(state.value for state in states),
        count,
    )


def end_batch(database: Database, asked: EndBatch, now: float) -> Result:
    """Note the end of a batch whose jobs have all ended, and have it told if it asks so."""
    batch = find(database, asked.batch)
    if batch is None:
        return UnknownName()
    over = batch.state in (BatchState.FED, BatchState.CANCELLED) and not batch.waiting
    if not over or batch.ended is not None:
        return batch
    state = BatchState.ENDED if batch.state is BatchState.FED else batch.state
    end_seq = outbox.next_end(database)
    database.change(
        "UPDATE batch SET state = ?, ended = ?, forget = ?, end_seq = ? WHERE id = ?",
        state.value,
        now,
        None if batch.keep is None else now + batch.keep,
        end_seq,
        batch.id,
    )
    if batch.notify:
        body = batch_notice(_again(database, batch.id), asked.output_file, asked.error_file)
        outbox.add(database, end_seq, outbox.BATCH, batch.id, batch.notify, body, now)
    return _again(database, batch.id)


def takes_again(database: Database, job: JobView) -> bool:
    """Whether a job may wait again: it is no line of a batch that was cancelled or deleted."""
    if job.batch is None:
        return True
    row = database.one("SELECT state FROM batch WHERE id = ?", job.batch)
    return row is not None and row[0] not in (BatchState.CANCELLED, BatchState.GONE)


def sweep(database: Database, now: float, key_life: float, count: int) -> bool:
    """Forget batches and files past their time; returns whether more may be left.

    The results of a batch go some at a time, the batch when they are gone.
    """
    found = database.execute(
        "SELECT id, state, end_seq FROM batch WHERE forget <= ? ORDER BY forget LIMIT ?", now, count
    )
    left = count
    for id, state, end_seq in found:
        if state == BatchState.GONE.value:
            _delete(database, id, end_seq, now)
            continue
        jobs = rows.select(database, "batch = ? AND state <> 'gone' LIMIT ?", id, left)
        for job in jobs:
            endings.empty_job(database, job, now + key_life)
        left -= len(jobs)
        if left <= 0:
            break
        database.change("DELETE FROM failed_line WHERE batch = ?", id)
        files.let_go(database, id, now)
        database.change(
            "UPDATE batch SET state = 'gone', defaults = ?, forget = ? WHERE id = ?",
            b"",
            now + key_life,
            id,
        )
    more_files = files.sweep(database, now)
    return len(found) == count or left <= 0 or more_files


def _delete(database: Database, id: bytes, end_seq: int | None, now: float) -> None:
    """Delete a batch that is gone with its key, once its end was told."""
    if outbox.is_waiting(database, end_seq):
        database.change("UPDATE batch SET forget = ? WHERE id = ?", now + outbox.HOLD, id)
        return
    outbox.drop(database, end_seq)
    database.change("DELETE FROM batch WHERE id = ?", id)


# ---- lines ---------------------------------------------------------------------------------------


def read_lines(database: Database, asked: ReadLines, now: float) -> Result:
    """The next lines of an open batch; none of another."""
    batch = find(database, asked.batch)
    if batch is None:
        return UnknownName()
    left = None if batch.deadline is None else batch.deadline - now
    start, number = batch.next_start, batch.next_line
    if batch.state is not BatchState.OPEN:
        return Lines(batch, (), number, start, True, left)
    data = _next_bytes(database, batch, asked.max_bytes)
    at_end = start + len(data) >= batch.file_size
    found: list[tuple[int, int, bytes]] = []
    at = counted = skipped = 0
    while counted < asked.count and at < len(data):
        if empty := EMPTY_LINES.match(data, at):  # millions of them are one portion
            skipped += data.count(b"\n", at, empty.end())
            at = empty.end()
            continue
        end = data.find(b"\n", at)
        if end < 0 and not at_end:
            break
        line = data[at : len(data) if end < 0 else end]
        if line.strip():
            found.append((number + skipped + counted, start + at, line[: MAX_LINE + 1]))
        at = len(data) if end < 0 else end + 1
        counted += 1
    if not counted and not skipped and data:  # one line that is longer than what was read
        found, counted = [(number, start, data + b" " * (MAX_LINE + 1 - len(data)))], 1
        at = _line_end(database, batch, start + len(data)) - start
    last = start + at >= batch.file_size
    return Lines(batch, tuple(found), number + skipped + counted, start + at, last, left)


def _next_bytes(database: Database, batch: BatchView, max_bytes: int) -> bytes:
    """Bytes of the file from the next line on: a part, or as many as one long line needs."""
    data = files.read_from(database, batch.file, batch.next_start, min(files.PART, max_bytes))
    while b"\n" not in data and len(data) < max_bytes:
        start = batch.next_start + len(data)
        more = files.read_from(database, batch.file, start, min(len(data), max_bytes - len(data)))
        if not more:
            break
        data += more
    return data


def _line_end(database: Database, batch: BatchView, start: int) -> int:
    """Where the line behind that of a position begins."""
    while part := files.read_from(database, batch.file, start, files.PART):
        end = part.find(b"\n")
        if end >= 0:
            return start + end + 1
        start += len(part)
    return batch.file_size


def add_lines(database: Database, asked: AddLines, now: float, room: int) -> Result:
    """Make jobs of lines, all or none."""
    batch = find(database, asked.batch)
    if batch is None:
        return UnknownName()
    if batch.state is not BatchState.OPEN or batch.next_line != asked.first_line:
        return batch
    failed = list(asked.failed)
    new = uncounted = size = 0
    for job in asked.jobs:
        result = submit_line(database, job, now, room)
        if isinstance(result, int):
            new, uncounted, size = new + 1, uncounted + 1, size + result
        elif isinstance(result, Refused):
            raise Full(result)
        elif not isinstance(result, Submitted) or result.job.id != job.id:
            failed.append((job.line, job.label, f"the key {job.scope.key!r} is taken"))
        else:
            new += 1
        room -= job.size + rows.ROW_BYTES
    rows.count_usage(database, batch.scope.owner, uncounted, size)
    for line, label, cause in (*failed, *asked.expired):
        database.change(
            "INSERT INTO failed_line (batch, line, label, cause) VALUES (?, ?, ?, ?)",
            batch.id,
            line,
            rows.storable(label),
            rows.storable(cause),
        )
    database.change(
        "UPDATE batch SET next_line = ?, next_start = ?, jobs = jobs + ?, expired = expired + ?,"
        " failed = failed + ?, state = ? WHERE id = ?",
        asked.next_line,
        asked.end,
        new + len(asked.expired),
        len(asked.expired),
        len(failed),
        (BatchState.FED if asked.last else BatchState.OPEN).value,
        batch.id,
    )
    return _again(database, batch.id)


class Full(Exception):
    """One job of several was refused, so that all are."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused
