"""Makes answers to clients about jobs: descriptions of jobs (maps), and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxpool.broker.jobs.job_states import phase_of
from mlxpool.broker.store.records import JobView, Name, Refused, Result, Scope
from mlxpool.common import errors
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.frames import pack, unpack
from mlxpool.common.protocol.kept.job_messages import JobName
from mlxpool.common.protocol.to_client import Done, Failed

BUSY_RETRY_MS = 1000
FULL_RETRY_MS = 10_000
MAX_LIST_BYTES = 192 * 1024  # bytes of the rows in one answer; a body has at most MAX_BODY
_OF_STORE: dict[str, tuple[type[PoolError], int | None]] = {
    "store_full": (errors.StoreFull, FULL_RETRY_MS),
    "over_quota": (errors.OverQuota, FULL_RETRY_MS),
    "store_busy": (errors.QueueFull, BUSY_RETRY_MS),
    "store_closed": (errors.StoreUnavailable, BUSY_RETRY_MS),
    "store_error": (errors.Internal, None),
    "damaged": (errors.Damaged, None),
    "in_use": (errors.BadRequest, None),
}


def name_of(owner: str, name: JobName) -> Name:
    """Returns the store's name of a job: its id, or owner, tenant and key.

    An id alone does not name the owner, so the caller must check the owner.
    """
    return name.id or Scope(owner, name.tenant, name.key)


def store_error(refused: Refused) -> PoolError:
    """Returns the error for a client whose store operation was refused."""
    kind, retry_after_ms = _OF_STORE.get(refused.code, (errors.Internal, None))
    details = {"value": refused.value, "bound": refused.bound} if refused.bound else None
    return kind(refused.message, details=details, retry_after_ms=retry_after_ms)


def unexpected(result: Result) -> PoolError:
    """Returns the error for a store result of a type that the question does not expect."""
    if isinstance(result, Refused):
        return store_error(result)
    return errors.Internal(f"the store answered with {type(result).__name__}")


def unknown(name: JobName) -> PoolError:
    return errors.UnknownJob(
        f"there is no job {name} of this owner: it was never submitted, or was deleted so long ago"
        " that its key is free again"
    )


def restarted(job: JobView) -> PoolError:
    return errors.JobRestarted(
        f"the job {job.scope.key!r} was begun anew as generation {job.gen}, for its model has"
        " changed; fetch it from 0",
        details={"gen": job.gen},
    )


def row_of(job: JobView, *, runs: bool) -> dict[str, Any]:
    """Returns the map of one job, see docs/protocol.md, `jobs`. Times are seconds since 1970."""
    return {
        "job": job.id,
        "seq": job.seq,
        "key": job.scope.key,
        "kind": job.kind,
        "model": job.model,
        "state": phase_of(job.state, runs=runs).value,
        "gen": job.gen,
        "ids": job.pos,
        "priority": job.priority,
        "attempts": job.attempts,
        "submitted": job.submitted,
        "due": job.due,
        "deadline": job.deadline,
        "ended": job.ended,
        "end_seq": job.end_seq,
        "forget": job.forget,
        "cause": job.cause,
        "bytes": job.size,
        "notice": notice_state(job.notify, job.ended, job.notice),
        **({"damaged": job.damaged} if job.damaged else {}),
        **({"retried": [list(place) for place in job.retried]} if job.retried else {}),
        **({} if job.batch is None else {"batch": job.batch, "line": job.line, "id": job.label}),
    }


def notice_state(notify: str, ended: float | None, stored: str) -> str:
    """Returns waiting, delivered or given_up for the notice of a job's end; "" without a notice.

    `notify` is the URL for the notice. `stored` is the state that the store has for the notice; ""
    if the store has none, because the notice was delivered.
    """
    return "" if not notify or ended is None else stored or "delivered"


def fitting(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first maps of `rows` that fit in MAX_LIST_BYTES."""
    if len(pack(list(rows))) <= MAX_LIST_BYTES:
        return list(rows)
    size = 0
    for index, row in enumerate(rows):
        size += len(pack(row))
        if size > MAX_LIST_BYTES:
            return list(rows[:index])
    return list(rows)


# ---- ends ----------------------------------------------------------------------------------------


def packed_end(terminal: Done | Failed) -> bytes:
    """Returns the packed end of a job for the store, without the blobs of its answer."""
    return pack({"kind": terminal.kind, "body": terminal.body()})


def terminal_of(end: bytes | None, blobs: Sequence[bytes] = ()) -> Done | Failed:
    """Returns the terminal message in `end`, the result of `packed_end`.

    `blobs` are the blobs of the answer, if it has any. If `end` is unreadable, returns a Done
    without text or figures.
    """
    try:
        stored = unpack(end or b"")
        body = stored["body"]
        return Failed(body) if stored["kind"] == Failed.kind else Done.parse(body, blobs)
    except (ValueError, KeyError, TypeError):
        return Done("cancelled")
