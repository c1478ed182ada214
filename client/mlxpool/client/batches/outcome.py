"""The outcomes of the lines of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.client.stream import Result
from mlxpool.client.vectors import Vectors
from mlxpool.common.errors import PoolError, from_body
from mlxpool.common.protocol.encoder_calls import VECTORS
from mlxpool.common.protocol.frames import Message, unpack
from mlxpool.common.protocol.to_client import Done, Failed
from mlxpool.common.protocol.token_ids import unpack_ids


class LineResult(Struct, frozen=True):
    """The outcome of one line of a batch: a `result`, or an `error`."""

    line: int  # the number of the line in the file, from 0
    id: str  # the `id` of the line, "" if the line has no `id`
    state: str  # done, dead, expired, cancelled or gone; failed: the line did not become a job
    job: bytes | None  # the id of the line's job; None: the line did not become a job
    result: Result | None  # the result of the line; None without a result
    error: PoolError | None  # the error of the line; None without an error

    @property
    def text(self) -> str:
        """The text of the result; "" without a result."""
        return "" if self.result is None else self.result.text

    @property
    def vectors(self) -> Vectors | None:
        """The vectors of an `embed`, `rerank` or `classify` line; None for other lines."""
        answer = None if self.result is None else self.result.answer
        if self.result is None or answer is None or answer.kind != VECTORS:
            return None
        return Vectors.of(self.result)


class Page(Struct, frozen=True):
    """Outcomes of lines, in the order of the lines.

    `next` is the argument `after` of the request for the next page; -1 on the last page.
    """

    rows: tuple[Mapping[str, Any], ...]
    next: int

    @classmethod
    def of(cls, answer: Message) -> Page:
        return cls(tuple(unpack(answer.blobs[0])), int(answer.body["next"]))


def line_result(row: Mapping[str, Any], whole: Result | PoolError | None = None) -> LineResult:
    """Returns the outcome in a line's map.

    `whole` is the result or error of a job that was fetched because it is too long for a page.
    """
    result, error = None, None
    if isinstance(whole, Result):
        result = whole
    elif isinstance(whole, PoolError):
        error = whole
    elif (end := row.get("end")) is not None:
        if end["kind"] == Failed.kind:
            error = from_body(end["body"])
        else:
            result = _result(row, Done.parse(end["body"], end.get("blobs", ())))
    return LineResult(row["line"], row["id"], row["state"], row.get("job"), result, error)


def _result(row: Mapping[str, Any], done: Done) -> Result:
    return Result(
        text=row["text"] + done.text,
        ids=tuple(unpack_ids(row["ids"])),
        reason=done.reason,
        usage=done.usage,
        timings_ms=done.timings_ms,
        seed=row["seed"],
        attempts=done.attempts,
        logprobs=tuple(row.get("logprobs", ())),
        complete=done.complete,
        answer=done.answer,
    )


def is_too_long(row: Mapping[str, Any]) -> bool:
    """Returns whether the output of a line's job is too long for a page and has to be fetched."""
    return row.get("job") is not None and not row.get("whole", True)


def count_ended(row: Mapping[str, Any]) -> int:
    """Returns the number of lines of a batch that have ended in any state."""
    return sum(row[state] for state in ("done", "dead", "expired", "cancelled", "failed"))


def count_bad(row: Mapping[str, Any]) -> int:
    """Returns the number of lines of a batch that have ended without a result."""
    return sum(row[state] for state in ("dead", "expired", "failed"))
