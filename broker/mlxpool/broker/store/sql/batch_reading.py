"""Reads batches with their counts, lists of batches, and the outcomes of batch lines."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from mlxpool.broker.store.batch_operations import (
    MAX_OUTPUT,
    BatchList,
    BatchState,
    BatchView,
    LineOutcome,
    LineOutcomes,
    ListBatches,
    Outcomes,
    ReadBatch,
    ReadOutcomes,
)
from mlxpool.broker.store.records import (
    ENDED,
    Damaged,
    JobState,
    JobView,
    Name,
    Result,
    Scope,
    UnknownName,
)
from mlxpool.broker.store.sql import contents, outbox, rows
from mlxpool.broker.store.sql.database import Database
from mlxpool.common.protocol.kept.job_work import CALLS

COUNTED = (JobState.DONE, JobState.CANCELLED, JobState.DEAD, JobState.EXPIRED)
LIVE = "batch.ended IS NULL AND batch.state IN ('open', 'fed', 'cancelled')"


class StoredBatch(NamedTuple):
    """A row of the table `batch`, and the state of the notice of the batch's end."""

    id: bytes
    owner: str
    tenant: str
    key: str
    file: bytes
    digest: bytes
    defaults: bytes
    state: str
    next_line: int
    next_start: int
    created: float
    ended: float | None
    deadline: float | None
    keep: float | None
    forget: float | None
    notify: str
    jobs: int
    done: int
    cancelled: int
    dead: int
    expired: int
    failed: int
    end_seq: int | None
    deleted: int
    notice: str | None


COLUMNS = ", ".join(
    (*(f"batch.{name}" for name in StoredBatch._fields[:-1]), outbox.state_of("batch"))
)


def select(database: Database, condition: str, *values: Any) -> list[BatchView]:
    """Returns the batches that meet an SQL condition, which may end with ORDER BY and LIMIT."""
    stored = database.execute(f"SELECT {COLUMNS} FROM batch WHERE {condition}", *values)
    return [_view(database, StoredBatch(*row)) for row in stored]


def _view(database: Database, stored: StoredBatch) -> BatchView:
    ended = {state: getattr(stored, state.value) for state in COUNTED}
    counts = {**ended, JobState.WAITING: stored.jobs - sum(ended.values())}
    return BatchView(
        id=stored.id,
        scope=Scope(stored.owner, stored.tenant, stored.key),
        file=stored.file,
        file_size=database.number("SELECT size FROM file WHERE id = ?", stored.file),
        digest=stored.digest,
        defaults=stored.defaults,
        state=BatchState(stored.state),
        next_line=stored.next_line,
        next_start=stored.next_start,
        failed=stored.failed,
        counts=tuple(pair for pair in counts.items() if pair[1]),
        created=stored.created,
        ended=stored.ended,
        deadline=stored.deadline,
        keep=stored.keep,
        notify=stored.notify,
        forget=stored.forget,
        end_seq=stored.end_seq or 0,
        notice=stored.notice or "",
        deleted=Outcomes(stored.deleted),
    )


def find(database: Database, name: Name) -> BatchView | None:
    """Returns the batch of this name; None if the owner and tenant have no such batch."""
    if isinstance(name, bytes):
        batches = select(database, "id = ?", name)
    elif rows.has_nul(name):
        return None
    else:
        scope = (name.owner, name.tenant, name.key)
        batches = select(database, "owner = ? AND tenant = ? AND key = ?", *scope)
    return batches[0] if batches else None


# ---- operations ----------------------------------------------------------------------------------


def read_batch(database: Database, operation: ReadBatch, now: float) -> Result:
    return find(database, operation.name) or UnknownName()


def list_batches(database: Database, operation: ListBatches, now: float) -> BatchList:
    states = operation.states or tuple(
        state for state in BatchState if state is not BatchState.GONE
    )
    where = [f"state IN ({', '.join('?' * len(states))})", *([LIVE] if operation.live else [])]
    values: list[Any] = [state.value for state in states]
    for column, value in (("owner", operation.owner), ("tenant", operation.tenant)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if operation.behind is not None:
        where.append("(created, id) < (?, ?)")
        values += operation.behind
    condition = f"{' AND '.join(where)} ORDER BY created DESC, id DESC LIMIT ?"
    batches = select(database, condition, *values, operation.count + 1)
    return BatchList(tuple(batches[: operation.count]), len(batches) > operation.count)


# ---- outcomes of lines ---------------------------------------------------------------------------


def read_outcomes(database: Database, operation: ReadOutcomes, now: float) -> Result:
    """Reads the outcomes of a batch's lines, in the order of the lines.

    The result also has the lines that could not become jobs.
    """
    batch = find(database, operation.name)
    if batch is None:
        return UnknownName()
    jobs = rows.select(
        database,
        "batch = ? AND line > ? ORDER BY line LIMIT ?",
        batch.id,
        operation.after,
        operation.count + 1,
    )
    failed = database.execute(
        "SELECT line, label, cause FROM failed_line WHERE batch = ? AND line > ?"
        " ORDER BY line LIMIT ?",
        batch.id,
        operation.after,
        operation.count + 1,
    )
    both = [LineOutcome(job.line, job.label, job.cause, job) for job in jobs]
    both += [LineOutcome(line, label, cause, None) for line, label, cause in failed]
    both.sort(key=lambda outcome: outcome.line)
    page: list[LineOutcome] = []
    size = 0
    for outcome in both[: operation.count]:
        if page and size >= operation.max_bytes:
            break
        page.append(_with_output(database, outcome))
        size += rows.ROW_BYTES + _output_size(page[-1])
    return LineOutcomes(tuple(page), page[-1].line if len(page) < len(both) else -1)


def _output_size(outcome: LineOutcome) -> int:
    """Returns an upper bound of the bytes of output in an outcome."""
    end = 0 if outcome.job is None else len(outcome.job.end or b"")
    blobs = sum(map(len, (*outcome.logprobs, *outcome.answer)))
    return end + 4 * len(outcome.text) + len(outcome.ids) + blobs


def _with_output(database: Database, outcome: LineOutcome) -> LineOutcome:
    """Returns an outcome, with the output of its job if the job has ended.

    The output is left out if it is damaged, or longer than MAX_OUTPUT bytes.
    """
    job = outcome.job
    if job is None or job.state not in ENDED:
        return outcome
    try:
        chunks = list(contents.chunks_of(database, job))
        answer = contents.read_answer(database, job) if job.kind in CALLS else ()
    except Damaged:  # only a fetch of the job reports the damage, with the range of ids
        return _left_out(outcome, job)
    whole = replace(
        outcome,
        text="".join(chunk.text for chunk in chunks),
        ids=b"".join(chunk.ids for chunk in chunks),
        logprobs=tuple(chunk.logprobs for chunk in chunks if chunk.logprobs),
        answer=answer,
    )
    return whole if _output_size(whole) <= MAX_OUTPUT else _left_out(outcome, job)


def _left_out(outcome: LineOutcome, job: JobView) -> LineOutcome:
    return replace(outcome, job=replace(job, end=None), whole=False)
