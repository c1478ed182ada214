"""Jobs as JSON, and the events of their readers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.client import Delta, Result, Vectors
from mlxpool.common.protocol.encoder_calls import VECTORS
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.generation.kept_answers import FAILED
from mlxpool.gateway.server_sent_events import large_sse, sse

JOB_ID = re.compile(r"[0-9a-f]{32}")
EVENT_ID = re.compile(r"([0-9]{1,9})\.(?:([0-9]{1,12})(?:\.(failed)(?:\.([0-9]{1,4}))?)?|end)")


def job_ref(text: str) -> str | bytes:
    """Returns a job's id as bytes if the text is 32 hexadecimal digits, else the text: its key."""
    return bytes.fromhex(text) if JOB_ID.fullmatch(text) else text


def job_body(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job's body from the pool's map of the job, see docs/protocol.md, `jobs`."""
    rest = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in row.items()
        if name not in ("job", "id")
    }
    label = {"custom_id": row["id"]} if "id" in row else {}  # for a job of a batch's line
    return {"id": bytes(row["job"]).hex(), "object": "job", **rest, **label}


def job_list(rows: Sequence[Mapping[str, Any]], following: int) -> dict[str, Any]:
    """Returns a list of jobs.

    `following`: the value of `after` or `before` for the next page; 0 on the last page.
    """
    return {"object": "list", "data": [*map(job_body, rows)], "next": following}


class Place(Struct, frozen=True):
    """The position of a reader of a job: a generation, and how many of its ids the reader has.

    `gen` None means the present generation. `ended`: the reader has the final result. `failed`: how
    many errors of the job the reader has got at this position. After an error the job may be
    retried; the retry then continues from here, or fails here again.
    """

    gen: int | None = None
    pos: int = 0
    ended: bool = False
    failed: int = 0

    @property
    def id(self) -> str:
        """The position as the id of an event."""
        place = f"{self.gen or 0}.{'end' if self.ended else self.pos}"
        if not self.failed:
            return place
        return f"{place}.failed" if self.failed == 1 else f"{place}.failed.{self.failed}"

    def has_all(self, job: Mapping[str, Any]) -> bool:
        """Whether the reader has all ids and the end of a job. `job`: the pool's map of the job."""
        if self.gen != job["gen"]:
            return False
        if not self.failed or job["state"] not in FAILED or self.pos != job["ids"]:
            return self.ended
        retries = {pos: count for pos, count in job.get("retried", ())}
        return self.failed > int(retries.get(self.pos, 0))


def place_of(last_event_id: str) -> Place:
    """Returns the position in the header Last-Event-ID. Raises HttpError for another text."""
    match = EVENT_ID.fullmatch(last_event_id)
    if match is None:
        message = f"Last-Event-ID is {last_event_id!r:.60}, must be the id of an event, as 0.12"
        raise bad_request(message)
    failed = 0 if match[3] is None else int(match[4] or 1)
    return Place(int(match[1]), int(match[2] or 0), match[2] is None, failed)


# ---- events --------------------------------------------------------------------------------------


def delta_event(delta: Delta, gen: int) -> bytes:
    """Encodes ids and their text. The event's id is the reader's position after this event."""
    body: dict[str, Any] = {"pos": delta.pos, "text": delta.text, "ids": list(delta.ids)}
    if delta.logprobs:
        body["logprobs"] = list(delta.logprobs)
    return sse(body, "delta", Place(gen, delta.pos + len(delta.ids)).id)


def restarted_event(gen: int) -> bytes:
    """Encodes the start of a new generation: earlier ids are void, and the next id is the first."""
    return sse({"gen": gen}, "restarted", Place(gen).id)


def done_event(result: Result, gen: int) -> bytes:
    """Encodes the end of a job without an error; it may have been cancelled.

    Do not call it on the event loop: 256 vectors of a call's result take a fraction of a second.
    """
    body = {"reason": result.reason, "usage": dict(result.usage), "seed": result.seed}
    more: dict[str, Any] = {} if result.complete is None else {"complete": result.complete}
    if result.answer is not None:
        more |= result.answer.fields
        more |= {"vectors": Vectors.of(result).tolist()} if result.answer.kind == VECTORS else {}
    return large_sse({**body, **more}, "done", Place(gen, ended=True).id)


def failed_event(error: HttpError, gen: int, pos: int, failed: int) -> bytes:
    """Encodes the end of a job with an error; `pos`: the number of ids that its reader has.

    `failed`: the number of the error, counted from 1 at this position.
    """
    return sse(_fault(error), "failed", Place(gen, pos, failed=failed).id)


def interrupted_event(error: HttpError) -> bytes:
    """Encodes an error that ends only this stream; the job continues, clients may reconnect."""
    return sse(_fault(error), "interrupted")


def _fault(error: HttpError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message}
