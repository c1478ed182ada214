"""The operations on batches, whose lines become jobs."""

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


def submit_batch(database: Database, operation: SubmitBatch, now: float) -> Result:
    """Stores a batch, or returns the stored batch that has its key."""
    scope = operation.scope
    known = find(database, scope)
    if known is not None:
        if known.state is BatchState.GONE:
            return KeyGone(known.id, known.forget or now)
        if known.digest != operation.digest:
            return DuplicateKey(known.id)
        return BatchSubmitted(known, new=False)
    file = files.find(database, operation.file, scope.owner, scope.tenant)
    if file is None:
        return UnknownName()
    if not file.complete:
        return file
    live = database.number(f"SELECT COUNT(*) FROM batch WHERE owner = ? AND {LIVE}", scope.owner)
    if live >= operation.max_live:
        why = f"{live} batches of this owner have not ended, at most {operation.max_live}"
        return Refused("over_quota", why)
    check_names(scope, operation.notify)
    database.change(
        "INSERT INTO batch (id, owner, tenant, key, file, digest, defaults, state, next_line,"
        " next_start, created, deadline, keep, notify)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, 'open', 0, 0, ?, ?, ?, ?)",
        operation.id,
        scope.owner,
        scope.tenant,
        scope.key,
        operation.file,
        operation.digest,
        operation.defaults,
        now,
        None if operation.deadline is None else now + operation.deadline,
        operation.keep,
        operation.notify,
    )
    database.change("UPDATE file SET waits_since = NULL WHERE id = ?", operation.file)
    return BatchSubmitted(_again(database, operation.id), new=True)


def _again(database: Database, id: bytes) -> BatchView:
    batch = find(database, id)
    assert batch is not None
    return batch


def cancel_batch(database: Database, operation: CancelBatch, now: float) -> Result:
    """Cancels at most `count` waiting jobs of a batch."""
    batch = find(database, operation.name)
    if batch is None:
        return UnknownName()
    if batch.state in (BatchState.OPEN, BatchState.FED):
        database.change("UPDATE batch SET state = 'cancelled' WHERE id = ?", batch.id)
    elif batch.state is not BatchState.CANCELLED:
        return BatchChanged(batch, ())
    waiting = _jobs(database, batch, (JobState.WAITING,), operation.count)
    cause = "its batch was cancelled"
    ended = tuple(
        endings.end_job(database, job, JobState.CANCELLED, operation.end, cause, now)
        for job in waiting
    )
    return BatchChanged(_again(database, batch.id), ended)


EMPTY_LINES = re.compile(rb"(?:[ \t\r\v\f]*+\n)++")
OUTCOMES = {True: Outcomes.DONE, False: Outcomes.OTHERS}  # whether a line is done -> its outcome


def retry_batch(database: Database, operation: RetryBatch, now: float) -> Result:
    """Sets at most `count` dead or expired jobs of a batch to waiting, so that they run again."""
    batch = find(database, operation.name)
    if batch is None:
        return UnknownName()
    if batch.state not in (BatchState.OPEN, BatchState.FED, BatchState.ENDED):
        return BatchChanged(batch, ())
    failed = _jobs(database, batch, tuple(RETRYABLE), operation.count)
    jobs = tuple(endings.let_wait(database, job, None, now) for job in failed)
    return BatchChanged(_again(database, batch.id), jobs)


def release_batch(database: Database, operation: ReleaseBatch, now: float) -> Result:
    """Sets the results of an ended batch to expire now; the next sweeps delete them."""
    batch = find(database, operation.name)
    if batch is None:
        return UnknownName()
    if batch.ended is not None and batch.state is not BatchState.GONE:
        database.change("UPDATE batch SET forget = ? WHERE id = ?", now, batch.id)
    return _again(database, batch.id)


def release_outcomes(
    database: Database, operation: ReleaseOutcomes, now: float, key_life: float
) -> Result:
    """Deletes the results of at most `count` jobs of an ended batch."""
    batch = find(database, operation.name)
    if batch is None:
        return UnknownName()
    if batch.ended is None or batch.state is BatchState.GONE:
        return BatchChanged(batch, ())
    states = tuple(
        state for state in sorted(ENDED) if OUTCOMES[state is JobState.DONE] & operation.outcomes
    )
    jobs = _jobs(database, batch, states, operation.count)
    for job in jobs:
        endings.empty_job(database, job, now + key_life)
    if Outcomes.OTHERS & operation.outcomes:
        database.change("DELETE FROM failed_line WHERE batch = ?", batch.id)
    # Set at the first deletion, so that a reader of the results knows why some are missing.
    deleted = batch.deleted | operation.outcomes
    if not _has_results(database, batch.id):
        deleted = Outcomes.DONE | Outcomes.OTHERS  # no results remain: the file is not needed
        files.let_go(database, batch.id, now)
    database.change("UPDATE batch SET deleted = ? WHERE id = ?", int(deleted), batch.id)
    return BatchChanged(_again(database, batch.id), tuple(jobs))


def _has_results(database: Database, id: bytes) -> bool:
    job = database.one("SELECT 1 FROM job WHERE batch = ? AND state <> 'gone' LIMIT 1", id)
    failed = database.one("SELECT 1 FROM failed_line WHERE batch = ? LIMIT 1", id)
    return job is not None or failed is not None


def _jobs(
    database: Database, batch: BatchView, states: tuple[JobState, ...], count: int
) -> list[JobView]:
    """Returns the first `count` jobs of a batch in any of `states`."""
    return rows.select(
        database,
        f"batch = ? AND state IN ({', '.join('?' * len(states))}) LIMIT ?",
        batch.id,
        *(state.value for state in states),
        count,
    )


def end_batch(database: Database, operation: EndBatch, now: float) -> Result:
    """Stores the end of a batch whose jobs have all ended.

    If the batch has a `notify` URL, a notice of its end is stored, to be posted to this URL.
    """
    batch = find(database, operation.batch)
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
        body = batch_notice(_again(database, batch.id), operation.output_file, operation.error_file)
        outbox.add(database, end_seq, outbox.BATCH, batch.id, batch.notify, body, now)
    return _again(database, batch.id)


def takes_again(database: Database, job: JobView) -> bool:
    """Returns whether a job may be retried: False if its batch is cancelled or deleted."""
    if job.batch is None:
        return True
    row = database.one("SELECT state FROM batch WHERE id = ?", job.batch)
    return row is not None and row[0] not in (BatchState.CANCELLED, BatchState.GONE)


def sweep(database: Database, now: float, key_life: float, count: int) -> bool:
    """Deletes batches and files whose retention time is over.

    Each call deletes the results of at most `count` jobs. A batch whose last result is deleted
    keeps only its key, for `key_life` seconds. Returns whether more batches or files may be due.
    """
    batches = database.execute(
        "SELECT id, state, end_seq FROM batch WHERE forget <= ? ORDER BY forget LIMIT ?", now, count
    )
    left = count
    for id, state, end_seq in batches:
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
    return len(batches) == count or left <= 0 or more_files


def _delete(database: Database, id: bytes, end_seq: int | None, now: float) -> None:
    """Deletes the row of a batch in the state `gone`, and so its key.

    The deletion is postponed while the notice of the batch's end is undelivered.
    """
    if outbox.is_waiting(database, end_seq):
        database.change("UPDATE batch SET forget = ? WHERE id = ?", now + outbox.HOLD, id)
        return
    outbox.drop(database, end_seq)
    database.change("DELETE FROM batch WHERE id = ?", id)


# ---- lines ---------------------------------------------------------------------------------------


def read_lines(database: Database, operation: ReadLines, now: float) -> Result:
    """Reads the next lines of a batch's file.

    Returns no lines if the batch is not open.
    """
    batch = find(database, operation.batch)
    if batch is None:
        return UnknownName()
    left = None if batch.deadline is None else batch.deadline - now
    start, number = batch.next_start, batch.next_line
    if batch.state is not BatchState.OPEN:
        return Lines(batch, (), number, start, True, left)
    data = _next_bytes(database, batch, operation.max_bytes)
    at_end = start + len(data) >= batch.file_size
    lines: list[tuple[int, int, bytes]] = []
    at = counted = skipped = 0
    while counted < operation.count and at < len(data):
        if empty := EMPTY_LINES.match(data, at):  # one match skips millions of empty lines
            skipped += data.count(b"\n", at, empty.end())
            at = empty.end()
            continue
        end = data.find(b"\n", at)
        if end < 0 and not at_end:
            break
        line = data[at : len(data) if end < 0 else end]
        if line.strip():
            lines.append((number + skipped + counted, start + at, line[: MAX_LINE + 1]))
        at = len(data) if end < 0 else end + 1
        counted += 1
    if not counted and not skipped and data:  # the line is longer than `data`
        lines, counted = [(number, start, data + b" " * (MAX_LINE + 1 - len(data)))], 1
        at = _line_end(database, batch, start + len(data)) - start
    last = start + at >= batch.file_size
    return Lines(batch, tuple(lines), number + skipped + counted, start + at, last, left)


def _next_bytes(database: Database, batch: BatchView, max_bytes: int) -> bytes:
    """Returns bytes of the batch's file from its next line on, at most `max_bytes`.

    Reads one stored part, and more bytes if this part contains no line end.
    """
    data = files.read_from(database, batch.file, batch.next_start, min(files.PART, max_bytes))
    while b"\n" not in data and len(data) < max_bytes:
        start = batch.next_start + len(data)
        more = files.read_from(database, batch.file, start, min(len(data), max_bytes - len(data)))
        if not more:
            break
        data += more
    return data


def _line_end(database: Database, batch: BatchView, start: int) -> int:
    """Returns the offset of the line that follows the line at `start`."""
    while part := files.read_from(database, batch.file, start, files.PART):
        end = part.find(b"\n")
        if end >= 0:
            return start + end + 1
        start += len(part)
    return batch.file_size


def add_lines(database: Database, operation: AddLines, now: float, room: int) -> Result:
    """Stores a job for each valid line, and an error for each other line.

    Raises Full if the store refuses a job, so that the caller undoes the whole operation.
    """
    batch = find(database, operation.batch)
    if batch is None:
        return UnknownName()
    if batch.state is not BatchState.OPEN or batch.next_line != operation.first_line:
        return batch
    failed = list(operation.failed)
    new = uncounted = size = 0
    for job in operation.jobs:
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
    for line, label, cause in (*failed, *operation.expired):
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
        operation.next_line,
        operation.end,
        new + len(operation.expired),
        len(operation.expired),
        len(failed),
        (BatchState.FED if operation.last else BatchState.OPEN).value,
        batch.id,
    )
    return _again(database, batch.id)


class Full(Exception):
    """Raised if the store refuses one of several jobs, so that none of them is stored."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused
