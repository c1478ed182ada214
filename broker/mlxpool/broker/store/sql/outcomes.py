"""What became of the lines of a batch, with their output."""

from __future__ import annotations

from msgspec.structs import replace

from mlxpool.broker.store.batch_operations import ReadOutcomes
from mlxpool.broker.store.batch_records import MAX_OUTPUT, LineOutcome, LineOutcomes
from mlxpool.broker.store.errors import Damaged
from mlxpool.broker.store.records import ENDED, JobView, Result, UnknownName
from mlxpool.broker.store.sql import contents, rows
from mlxpool.broker.store.sql.batch_reading import find
from mlxpool.broker.store.sql.database import Database
from mlxpool.common.protocol.kept.job_work import CALLS


def read_outcomes(database: Database, asked: ReadOutcomes, now: float) -> Result:
    """What became of lines, jobs and failed ones together in the order of lines."""
    batch = find(database, asked.name)
    if batch is None:
        return UnknownName()
    jobs = rows.select(
        database,
        "batch = ? AND line > ? ORDER BY line LIMIT ?",
        batch.id,
        asked.after,
        asked.count + 1,
    )
    failed = database.execute(
        "SELECT line, label, cause FROM failed_line WHERE batch = ? AND line > ?"
        " ORDER BY line LIMIT ?",
        batch.id,
        asked.after,
        asked.count + 1,
    )
    both = [LineOutcome(job.line, job.label, job.cause, job) for job in jobs]
    both += [LineOutcome(line, label, cause, None) for line, label, cause in failed]
    both.sort(key=lambda outcome: outcome.line)
    page: list[LineOutcome] = []
    size = 0
    for outcome in both[: asked.count]:
        if page and size >= asked.max_bytes:
            break
        page.append(_with_output(database, outcome))
        size += rows.ROW_BYTES + _output_size(page[-1])
    return LineOutcomes(tuple(page), page[-1].line if len(page) < len(both) else -1)


def _output_size(outcome: LineOutcome) -> int:
    """Bytes of its output, at most."""
    end = 0 if outcome.job is None else len(outcome.job.end or b"")
    blobs = sum(map(len, (*outcome.logprobs, *outcome.answer)))
    return end + 4 * len(outcome.text) + len(outcome.ids) + blobs


def _with_output(database: Database, outcome: LineOutcome) -> LineOutcome:
    """With the output of an ended job, unless it has more than MAX_OUTPUT bytes."""
    job = outcome.job
    if job is None or job.state not in ENDED:
        return outcome
    try:
        chunks = list(contents.chunks_of(database, job))
        answer = contents.read_answer(database, job) if job.kind in CALLS else ()
    except Damaged:  # who fetches the job is told which ids
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
