"""The status of a batch and its files, made from the batch's row."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.gateway.openai.batches.bodies import BatchRequest, batch_body
from mlxpool.gateway.openai.batches.lines import LineFault

ID = "batch_" + "a" * 32
FILE = "file-" + "a" * 32


def row(state: str, outcome: str = "", **fields: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("done", "dead", "expired", "cancelled", "failed"), 0)
    ended = 20.0 if outcome else None
    times = {"created": 10.0, "ended": ended, "deadline": None}
    return {"key": ID, "state": state, "outcome": outcome, **counts, **times, **fields}


def request(*faults: LineFault) -> BatchRequest:
    return BatchRequest("/v1/completions", "file-in", "24h", 3, {}, faults)


@pytest.mark.parametrize(
    ("found", "status", "time", "files"),
    [
        (row("running", done=1), "in_progress", "in_progress_at", (None, None)),
        (row("running", done=2, failed=1), "finalizing", "in_progress_at", (None, None)),
        (row("done", "completed", done=3), "completed", "completed_at", (f"{FILE}-output", None)),
        (
            row("done", "completed", done=2, dead=1),
            "completed",
            "completed_at",
            (f"{FILE}-output", f"{FILE}-error"),
        ),
        (row("done", "expired", expired=3), "expired", "expired_at", (None, f"{FILE}-error")),
        (row("done", "failed", failed=3), "failed", "failed_at", (None, f"{FILE}-error")),
        (row("cancelling", cancelled=1), "cancelling", "created_at", (None, None)),
        (
            row("cancelled", "cancelled", done=1, cancelled=2),
            "cancelled",
            "cancelled_at",
            (f"{FILE}-output", f"{FILE}-error"),
        ),
    ],
)
def test_a_batch_has_the_status_of_its_outcome(
    found: dict[str, Any], status: str, time: str, files: tuple[str | None, str | None]
) -> None:
    body = batch_body(found, request())
    assert (body["status"], body["errors"]) == (status, None)
    assert (body["output_file_id"], body["error_file_id"]) == files
    assert body[time] is not None
    assert body["failed_at"] == (20 if status == "failed" else None)


def test_a_batch_with_faults_has_failed_at_once_and_has_no_files() -> None:
    fault = LineFault(1, "empty_file", "the file has no line")
    body = batch_body(row("done", "failed", failed=1), request(fault))
    assert (body["status"], body["failed_at"]) == ("failed", 10)
    assert (body["output_file_id"], body["error_file_id"]) == (None, None)
    assert body["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
