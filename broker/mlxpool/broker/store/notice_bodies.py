"""Bodies of notices: the JSON that is posted after the end of a job or batch. Pure functions.

A body is made in the transaction that stores the end. Every attempt posts this body, so later
changes of the job or batch have no effect on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlxpool.broker.store.batch_operations import BatchState, BatchView
from mlxpool.broker.store.records import ENDED, JobState, JobView
from mlxpool.common.web_targets import Target

MAX_CAUSE = 1000  # most characters of a job's cause
JOB_ENDED = "job.ended"


def notice_id(kind: str, subject: bytes, end_seq: int) -> str:
    """Returns the unique id of a notice, equal in all attempts to post it. `kind`: job or batch."""
    return f"{kind}_{subject.hex()}_{end_seq}"


def origin_of(url: str) -> str:
    """Returns scheme, host and port of a URL; the whole URL if it cannot be split."""
    try:
        return str(Target.parse(url).origin)
    except ValueError:
        return url


def job_notice(job: JobView) -> bytes:
    """Returns the notice of an ended job. `job`: its view after the end."""
    data = {
        "job": job.id.hex(),
        "key": job.scope.key,
        "tenant": job.scope.tenant,
        "model": job.model,
        "state": job.state.value,
        "gen": job.gen,
        "ids": job.pos,
        "end_seq": job.end_seq,
        "cause": job.cause[:MAX_CAUSE],
    }
    return _event(notice_id("job", job.id, job.end_seq), JOB_ENDED, job.ended or 0.0, data)


def batch_outcome(batch: BatchView) -> str:
    """Returns completed, cancelled, expired or failed; "" if the batch has not ended or is gone.

    A batch is expired if its deadline ended some of its lines, before or after they became jobs. It
    is failed if no line could become a job.
    """
    if batch.ended is None or batch.state is BatchState.GONE:
        return ""
    if batch.state is BatchState.CANCELLED:
        return "cancelled"
    counts = dict(batch.counts)
    if counts.get(JobState.EXPIRED):
        return "expired"
    return "completed" if counts or not batch.failed else "failed"


def batch_notice(batch: BatchView, output_file: str, error_file: str) -> bytes:
    """Returns the notice of an ended batch. `batch`: its view after the end.

    The notice names only files that have lines: done lines are in `output_file`, all other lines in
    `error_file`.
    """
    counts = {state.value: dict(batch.counts).get(state, 0) for state in sorted(ENDED)}
    done = counts[JobState.DONE.value]
    lines = sum(counts.values()) + batch.failed
    outcome = batch_outcome(batch)
    data = {
        "id": batch.scope.key,
        "batch": batch.id.hex(),
        "key": batch.scope.key,
        "tenant": batch.scope.tenant,
        "state": "cancelled" if batch.state is BatchState.CANCELLED else JobState.DONE.value,
        "lines": lines,
        **counts,
        "failed": batch.failed,
        "output_file_id": output_file if done and output_file else None,
        "error_file_id": error_file if lines > done and error_file else None,
        "end_seq": batch.end_seq,
    }
    id = notice_id("batch", batch.id, batch.end_seq)
    return _event(id, f"batch.{outcome}", batch.ended or 0.0, data)


def _event(id: str, type: str, ended: float, data: Mapping[str, Any]) -> bytes:
    """Returns an event in the form that Standard Webhooks and OpenAI's clients read."""
    moment = datetime.fromtimestamp(ended, UTC).isoformat(timespec="milliseconds")
    event = {
        "id": id,
        "object": "event",
        "type": type,
        "created_at": int(ended),
        "timestamp": moment.replace("+00:00", "Z"),
        "data": data,
    }
    return json.dumps(event).encode()
