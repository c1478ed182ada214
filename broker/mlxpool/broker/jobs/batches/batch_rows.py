"""The stored settings of batches, and the maps of batches and files for clients. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from mlxpool.broker.jobs.answers import notice_state, terminal_of
from mlxpool.broker.jobs.canonical import DIGEST_BYTES, canonical
from mlxpool.broker.jobs.job_states import phase_of
from mlxpool.broker.store.batch_operations import (
    BatchState,
    BatchView,
    FileView,
    LineOutcome,
    Outcomes,
)
from mlxpool.broker.store.notice_bodies import batch_outcome
from mlxpool.broker.store.records import ENDED, JobState, JobView
from mlxpool.common.errors import DeadlineExceeded, Internal, PoolError
from mlxpool.common.protocol.frames import pack, unpack
from mlxpool.common.protocol.kept.batch_messages import DONE, OTHERS, SubmitBatch
from mlxpool.common.protocol.to_client import Failed

RUNNING, CANCELLING = "running", "cancelling"
RELEASED = {DONE: Outcomes.DONE, OTHERS: Outcomes.OTHERS}  # the results, by their names for clients


class BatchSettings(Struct, frozen=True):
    """The settings of a batch that only the broker reads; the store keeps them as packed bytes.

    In the store's operations and views these bytes are the field `defaults`.
    """

    file: str = ""
    lines: int = 0  # lines that the client counted; 0: it did not count
    defaults: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    output_file: str = ""  # names of the result files, for the notice of the batch's end
    error_file: str = ""

    @classmethod
    def of(cls, message: SubmitBatch) -> BatchSettings:
        return cls(
            message.file,
            message.lines,
            message.defaults,
            message.priority,
            message.metadata,
            message.output_file,
            message.error_file,
        )

    def packed(self) -> bytes:
        return pack(
            {
                "file": self.file,
                "lines": self.lines,
                "defaults": dict(self.defaults),
                "priority": self.priority,
                "metadata": dict(self.metadata),
                "output_file": self.output_file,
                "error_file": self.error_file,
            }
        )

    @classmethod
    def unpacked(cls, packed: bytes) -> BatchSettings:
        """Returns the settings in packed bytes.

        Returns the defaults for a batch whose settings were deleted.
        """
        try:
            return cls(**unpack(packed))
        except (ValueError, TypeError):
            return cls()


def batch_digest(message: SubmitBatch) -> bytes:
    """Returns the digest of a batch's file and defaults.

    Two submissions with one key are the same batch if their digests are equal.
    """
    content = message.digest or message.file.encode()
    meaning = {"content": content, "defaults": canonical(message.defaults)}
    return hashlib.sha256(pack(meaning)).digest()[:DIGEST_BYTES]


def file_id(owner: str, tenant: str, key: str) -> bytes:
    """Returns the id of a file. Files of different owners have different ids."""
    return hashlib.sha256(pack(["file", owner, tenant, key])).digest()[:DIGEST_BYTES]


def file_row(file: FileView) -> dict[str, Any]:
    """Returns the map of a file, see docs/protocol.md, `file`."""
    return {
        "key": file.key,
        "name": file.name,
        "purpose": file.purpose,
        "size": file.size,
        "complete": file.complete,
        "created": file.created,
        "forget": file.forget,
    }


# ---- batches -----------------------------------------------------------------------------------


def shown_state(batch: BatchView) -> str:
    """Returns the state of a batch as its clients see it."""
    if batch.state is BatchState.CANCELLED:
        return CANCELLING if batch.live else JobState.CANCELLED.value
    return {
        BatchState.OPEN: RUNNING,
        BatchState.FED: RUNNING,
        BatchState.ENDED: JobState.DONE.value,
        BatchState.GONE: JobState.GONE.value,
    }[batch.state]


def mark_of(batch: BatchView) -> str:
    """Returns a text that changes whenever the state or progress that clients see changes."""
    counts = [batch.next_line, batch.failed, *(count for _, count in batch.counts)]
    return f"{shown_state(batch)} {'.'.join(map(str, counts))}"


def batch_row(batch: BatchView, running: int, trouble: str) -> dict[str, Any]:
    """Returns the map of a batch, see docs/protocol.md, `batch`.

    `running`: number of its running jobs. `trouble`: the reason why no lines become jobs, or "".
    """
    settings, counts = BatchSettings.unpacked(batch.defaults), dict(batch.counts)
    known = sum(counts.values()) + batch.failed
    lines = known if batch.state is not BatchState.OPEN else max(settings.lines, known)
    ended = batch.failed + sum(counts.get(state, 0) for state in ENDED)
    running = min(running, batch.waiting)
    return {
        "batch": batch.id,
        "key": batch.scope.key,
        "state": shown_state(batch),
        "outcome": batch_outcome(batch),
        "mark": mark_of(batch),
        "file": settings.file,
        "lines": lines,
        "waiting": lines - ended - running,
        "running": running,
        **{state.value: counts.get(state, 0) for state in sorted(ENDED)},
        "failed": batch.failed,
        "trouble": trouble,
        "priority": settings.priority,
        "created": batch.created,
        "ended": batch.ended,
        "deadline": batch.deadline,
        "forget": batch.forget,
        "metadata": dict(settings.metadata),
        "notify": batch.notify,
        "notice": notice_state(batch.notify, batch.ended, batch.notice),
        **({"deleted": _deleted(batch)} if batch.deleted else {}),
    }


def _deleted(batch: BatchView) -> list[str]:
    return [name for name, outcomes in RELEASED.items() if outcomes & batch.deleted]


# ---- lines -------------------------------------------------------------------------------------


def failure_text(error: PoolError) -> str:
    """Returns the error of a line that cannot become a job, as text for the store."""
    return f"{error.code}: {error.message}"


def _failure(cause: str) -> dict[str, Any]:
    """Returns code and message of a stored failure; a text without a code is an Internal error."""
    code, colon, message = cause.partition(": ")
    known = bool(colon) and code.replace("_", "").isalpha() and code.islower()
    return {"code": code, "message": message} if known else Internal(cause).body()


def outcome_row(outcome: LineOutcome) -> dict[str, Any] | None:
    """Returns the outcome of a line, see docs/protocol.md, `batch_results`; None before its end."""
    row: dict[str, Any] = {"line": outcome.line, "id": outcome.label}
    job = outcome.job
    if job is None:
        error = _failure(outcome.cause)
        late = error["code"] == DeadlineExceeded.code
        state = JobState.EXPIRED.value if late else "failed"
        return {**row, "state": state, "end": {"kind": Failed.kind, "body": error}}
    if job.state not in (*ENDED, JobState.GONE):
        return None
    return {**row, **_job_fields(job), **_output(outcome, job)}


def _job_fields(job: JobView) -> dict[str, Any]:
    return {
        "job": job.id,
        "key": job.scope.key,
        "model": job.model,
        "state": phase_of(job.state, runs=False).value,
        "gen": job.gen,
        "seed": job.seed,
        "ids_count": job.pos,
        "submitted": job.submitted,
        "ended": job.ended,
    }


def _output(outcome: LineOutcome, job: JobView) -> dict[str, Any]:
    if job.state is JobState.GONE or not outcome.whole:
        return {"whole": outcome.whole}
    terminal = terminal_of(job.end, outcome.answer)
    end: dict[str, Any] = {"kind": terminal.kind, "body": terminal.body()}
    end |= {"blobs": list(outcome.answer)} if outcome.answer else {}
    output: dict[str, Any] = {
        "whole": True,
        "text": outcome.text,
        "ids": outcome.ids,
        "end": end,
    }
    if outcome.logprobs:
        output["logprobs"] = [entry for part in outcome.logprobs for entry in unpack(part)]
    return output if job.facts is None else {**output, "facts": unpack(job.facts)}
