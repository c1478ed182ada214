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
    """The id that 32 hexadecimal digits are, else the key."""
    return bytes.fromhex(text) if JOB_ID.fullmatch(text) else text


def job_body(row: Mapping[str, Any]) -> dict[str, Any]:
    """A job from its row, see docs/protocol.md, `jobs`."""
    rest = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in row.items()
        if name not in ("job", "id")
    }
    label = {"custom_id": row["id"]} if "id" in row else {}  # of a line of a batch
    return {"id": bytes(row["job"]).hex(), "object": "job", **rest, **label}


def job_list(rows: Sequence[Mapping[str, Any]], following: int) -> dict[str, Any]:
    """A list; `following`: the `after` or `before` of the next one, 0 for the last."""
    return {"object": "list", "data": [*map(job_body, rows)], "next": following}


class Place(Struct, frozen=True):
    """Where a reader is: a generation (None: the present one) and how many of its ids it has.

    `ended`: it has the result, which is final. `failed`: it has those ids and was told an error,
    after which the job may be tried again (`retry`) and go on behind them, or fail there once more:
    it is the number of the error among those at this place, 0: it was told none.
    """

    gen: int | None = None
    pos: int = 0
    ended: bool = False
    failed: int = 0

    @property
    def id(self) -> str:
        """As the id of an event."""
        place = f"{self.gen or 0}.{'end' if self.ended else self.pos}"
        if not self.failed:
            return place
        return f"{place}.failed" if self.failed == 1 else f"{place}.failed.{self.failed}"

    def has_all(self, job: Mapping[str, Any]) -> bool:
        """Whether nothing follows of the job with this row: no id, and no other end."""
        if self.gen != job["gen"]:
            return False
        if not self.failed or job["state"] not in FAILED or self.pos != job["ids"]:
            return self.ended
        retries = {pos: count for pos, count in job.get("retried", ())}
        return self.failed > int(retries.get(self.pos, 0))


def place_of(last_event_id: str) -> Place:
    """The place that the header Last-Event-ID names. Raises HttpError for another text."""
    found = EVENT_ID.fullmatch(last_event_id)
    if found is None:
        message = f"Last-Event-ID is {last_event_id!r:.60}, must be the id of an event, as 0.12"
        raise bad_request(message)
    failed = 0 if found[3] is None else int(found[4] or 1)
    return Place(int(found[1]), int(found[2] or 0), found[2] is None, failed)


# ---- events --------------------------------------------------------------------------------------


def delta_event(delta: Delta, gen: int) -> bytes:
    """Ids and their text. Its id says how many ids the reader has with it."""
    body: dict[str, Any] = {"pos": delta.pos, "text": delta.text, "ids": list(delta.ids)}
    if delta.logprobs:
        body["logprobs"] = list(delta.logprobs)
    return sse(body, "delta", Place(gen, delta.pos + len(delta.ids)).id)


def restarted_event(gen: int) -> bytes:
    """The ids so far are void: the job is begun anew, and what follows begins with the first id."""
    return sse({"gen": gen}, "restarted", Place(gen).id)


def done_event(result: Result, gen: int) -> bytes:
    """The job has ended without an error; it may have been cancelled.

    A call's may have 256 vectors, which take a fraction of a second: for another thread.
    """
    body = {"reason": result.reason, "usage": dict(result.usage), "seed": result.seed}
    more: dict[str, Any] = {} if result.complete is None else {"complete": result.complete}
    if result.answer is not None:
        more |= result.answer.fields
        more |= {"vectors": Vectors.of(result).tolist()} if result.answer.kind == VECTORS else {}
    return large_sse({**body, **more}, "done", Place(gen, ended=True).id)


def failed_event(error: HttpError, gen: int, pos: int, failed: int) -> bytes:
    """The job has ended with an error; `pos`: how many ids its reader has.

    `failed`: the number of the error among those at this place.
    """
    return sse(_fault(error), "failed", Place(gen, pos, failed=failed).id)


def interrupted_event(error: HttpError) -> bytes:
    """The event that ends one reading of a job that goes on; its reader may connect again."""
    return sse(_fault(error), "interrupted")


def _fault(error: HttpError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message}
