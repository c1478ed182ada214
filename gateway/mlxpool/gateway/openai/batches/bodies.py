"""The file and batch objects of OpenAI's interface. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.protocol.kept.batch_messages import DONE, OTHERS
from mlxpool.common.protocol.kept.file_messages import LINES_PURPOSE
from mlxpool.gateway.openai.batches.lines import LineFault

UPLOADED, LINES = "batch", LINES_PURPOSE  # purposes of files: of a client, and of the pool
MARK = "openai"  # key of the BatchRequest in the pool's metadata of a batch
OUTPUT, ERROR = "output", "error"
RELEASED = {OUTPUT: DONE, ERROR: OTHERS}  # kind of a file -> the results that it contains
_RESULTS = re.compile(r"file-([0-9a-f]{32})-(output|error)")
MAX_FAULTS = 10  # most faults that are reported
MAX_FAULT = 300  # most characters of a reported fault


def file_id(hex: str) -> str:
    return f"file-{hex}"


def batch_id(hex: str) -> str:
    return f"batch_{hex}"


def results_id(batch: str, kind: str) -> str:
    """Returns the id of a file with results of a batch."""
    return f"file-{batch.removeprefix(batch_id(''))}-{kind}"


def results_of(file: str) -> tuple[str, str] | None:
    """Returns the batch of a results file, and the kind of results; None for another file."""
    match = _RESULTS.fullmatch(file)
    return None if match is None else (batch_id(match[1]), match[2])


def is_deleted(batch: Mapping[str, Any], kind: str) -> bool:
    """Whether a results file of a batch was deleted. `batch`: the pool's map of the batch."""
    return RELEASED[kind] in batch.get("deleted", ())


def file_body(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of an uploaded file, from the pool's map of the file."""
    forget = row["forget"]
    return {
        "id": row["key"],
        "object": "file",
        "bytes": row["size"],
        "created_at": int(row["created"]),
        "expires_at": None if forget is None else int(forget),
        "filename": row["name"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }


def results_body(batch: Mapping[str, Any], kind: str, size: int) -> dict[str, Any]:
    """Returns a file of the results of a batch, from the pool's map of the batch."""
    ended, forget = batch["ended"], batch["forget"]
    return {
        "id": results_id(batch["key"], kind),
        "object": "file",
        "bytes": size,
        "created_at": int(ended or batch["created"]),
        "expires_at": None if forget is None else int(forget),
        "filename": f"{batch['key']}_{kind}.jsonl",
        "purpose": "batch_output",
        "status": "processed",
        "status_details": None,
    }


class BatchRequest(Struct, frozen=True):
    """The request that made a batch, as the pool keeps it in the batch's metadata."""

    endpoint: str
    input: str  # the id of the input file
    window: str
    total: int
    metadata: Mapping[str, str]
    faults: Sequence[LineFault] = ()

    def body(self) -> dict[str, Any]:
        faults = [
            [fault.line, fault.code, fault.message[:MAX_FAULT], fault.param]
            for fault in self.faults
        ]
        return {
            MARK: {
                "endpoint": self.endpoint,
                "input": self.input,
                "window": self.window,
                "total": self.total,
                "metadata": dict(self.metadata),
                "faults": faults,
            }
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> BatchRequest | None:
        """Reads the request from the pool's map of a batch.

        Returns None if the batch was not made over OpenAI's interface.
        """
        kept = row["metadata"].get(MARK)
        if not isinstance(kept, Mapping):
            return None
        faults = [LineFault(*fault) for fault in kept["faults"]]
        return cls(**{**kept, "faults": faults})


def status_of(row: Mapping[str, Any], request: BatchRequest) -> str:
    """Returns the status of a batch."""
    if request.faults:
        return "failed"
    if row["state"] == "running":
        ended = row["done"] + _failed(row)
        return "finalizing" if ended >= request.total else "in_progress"
    return str(row["outcome"] or row["state"])  # a cancelling batch has no outcome yet


def _failed(row: Mapping[str, Any]) -> int:
    return sum(int(row[state]) for state in ("dead", "expired", "cancelled", "failed"))


def batch_body(row: Mapping[str, Any], request: BatchRequest) -> dict[str, Any]:
    """Returns the body of a batch, from the pool's map of it."""
    status, key = status_of(row, request), str(row["key"])
    created, deadline = int(row["created"]), row["deadline"]
    ended = None if row["ended"] is None else int(row["ended"])
    over = row["ended"] is not None and not request.faults
    failed = 0 if request.faults else _failed(row)
    faults = [
        {"code": fault.code, "line": fault.line, "message": fault.message, "param": fault.param}
        for fault in request.faults
    ]
    return {
        "id": key,
        "object": "batch",
        "endpoint": request.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": request.input,
        "completion_window": request.window,
        "status": status,
        "output_file_id": results_id(key, OUTPUT) if over and row["done"] else None,
        "error_file_id": results_id(key, ERROR) if over and failed else None,
        "created_at": created,
        "in_progress_at": None if faults else created,
        "expires_at": None if deadline is None else int(deadline),
        "finalizing_at": ended if status == "completed" else None,
        "completed_at": ended if status == "completed" else None,
        "failed_at": created if faults else ended if status == "failed" else None,
        "expired_at": ended if status == "expired" else None,
        "cancelling_at": ended if status in ("cancelling", "cancelled") else None,
        "cancelled_at": ended if status == "cancelled" else None,
        "request_counts": {
            "total": 0 if faults else request.total,
            "completed": 0 if faults else row["done"],
            "failed": failed,
        },
        "metadata": dict(request.metadata) or None,
    }
