"""Requests of operators about the jobs and batches of all owners: admin socket and status page.

A job is named by `job`, its id of 16 bytes, or by `owner` and `key`. `jobs`, `job`, `retry` and
`release` work as they do for clients, but on the jobs of every owner; `cancel_job` works like a
client's `cancel` of a job.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.checks import integer, shown, text
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.kept import batch_messages
from mlxpool.common.protocol.kept import job_messages as messages
from mlxpool.common.protocol.kept.file_messages import is_time
from mlxpool.common.protocol.kept.job_messages import (
    DEFAULT_LISTED,
    MAX_LISTED,
    MAX_NUMBER,
    AboutJob,
    JobName,
    ListJobs,
    job_id,
)

CANCEL_JOB, NOTICES, EXPORT, VERIFY = "cancel_job", "notices", "export_jobs", "verify_jobs"
BATCHES = batch_messages.ListBatches.kind
KINDS = frozenset(
    {ListJobs.kind, *messages.JOB_CALLS, CANCEL_JOB, BATCHES, NOTICES, EXPORT, VERIFY}
)
CHANGING = frozenset({CANCEL_JOB, messages.RETRY, messages.RELEASE})


class BatchPlace(Struct, frozen=True):
    """A position in a list of batches: the creation time of a batch, and the id of this batch.

    The batches after this position are found even if the batch itself was deleted.
    """

    created: float
    batch: bytes

    def body(self) -> list[Any]:
        return [self.created, self.batch]

    @classmethod
    def parse(cls, value: object) -> BatchPlace:
        """Reads a list of time and id. Raises BadRequest if it is not such a list."""
        if not isinstance(value, list | tuple) or len(value) != 2 or not is_time(value[0]):
            raise BadRequest(
                f"behind must be a list of a batch's time and id, as `next` is; got {shown(value)}"
            )
        return cls(float(value[0]), job_id(value[1]))


class ListAllBatches(Struct, frozen=True):
    """Asks for the batches after a position, the newest first; of all owners if `owner` is None."""

    owner: str | None
    behind: BatchPlace | None
    limit: int


class ListNotices(Struct, frozen=True):
    """Asks for notices (POSTs about ended jobs and batches) that are undelivered or given up.

    `after` is an `end_seq`, a number in the order of ends: only notices of later ends are listed.
    If `owner` is None, the notices of all owners are listed.
    """

    owner: str | None
    after: int
    limit: int


class ExportJobs(Struct, frozen=True):
    """Asks for jobs with all their stored data; the answer is `Exported`.

    `seq`, `gen`, `part` and `pos` are the position at which the answer begins: zeros, or the values
    of `next` in the previous answer. `states` are the states of the exported jobs; empty means all.
    """

    seq: int
    gen: int
    part: int
    pos: int
    states: tuple[str, ...]


class VerifyJobs(Struct, frozen=True):
    """Compares the data of jobs with their checksums, beginning after the job with this number."""

    after: int


Question = ListJobs | AboutJob | ListAllBatches | ListNotices | ExportJobs | VerifyJobs


def parse_question(kind: str, body: Mapping[str, Any]) -> tuple[str, Question]:
    """Returns the owner in a message of one of KINDS, "" if it names none, and the typed message.

    Raises BadRequest naming the key, its value and its bound.
    """
    owner = text(body, "owner")
    if kind == ListJobs.kind:
        model = text(body, "model")
        batch = None if body.get("batch") is None else job_id(body["batch"])
        listed = ListJobs.parse({name: value for name, value in body.items() if name != "batch"})
        if listed.after is not None and (model or batch is not None):
            raise BadRequest("after goes with neither model nor batch")
        return owner, replace(listed, owner=owner or None, model=model, batch_id=batch)
    if kind == BATCHES:
        behind = None if body.get("behind") is None else BatchPlace.parse(body["behind"])
        limit = integer(body, "limit", 1, batch_messages.MAX_BATCHES)
        return owner, ListAllBatches(owner or None, behind, limit or batch_messages.MAX_BATCHES)
    if kind == NOTICES:
        limit = integer(body, "limit", 1, MAX_LISTED) or DEFAULT_LISTED
        return owner, ListNotices(owner or None, _number(body, "after"), limit)
    if kind == EXPORT:
        states = () if not body.get("state") else (messages.job_state(body["state"]),)
        seq, gen, part, pos = (_number(body, name) for name in ("seq", "gen", "part", "pos"))
        return owner, ExportJobs(seq, gen, part, pos, states)
    if kind == VERIFY:
        return owner, VerifyJobs(_number(body, "after"))
    return owner, AboutJob(messages.CANCEL if kind == CANCEL_JOB else kind, JobName.parse(body))


def _number(body: Mapping[str, Any], name: str) -> int:
    return integer(body, name, 0, MAX_NUMBER) or 0


class Told(Content, Struct, frozen=True):
    """The answer to a request of an operator, as a map of any content."""

    kind: ClassVar[str] = "told"
    told: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        return dict(self.told)


class Exported(Content, Struct, frozen=True):
    """Answer to `export_jobs`: items of the export in order, and the position of the next item.

    `next` is {seq, gen, part, pos} for the next request; None in the last answer. An item is
    {"job": …}, {"blob": …}, {"answer": …}, {"output": …} or {"damaged": …}, see docs/jobs.md.
    """

    kind: ClassVar[str] = EXPORT
    items: Sequence[Mapping[str, Any]]
    next: Mapping[str, int] | None

    def body(self) -> dict[str, Any]:
        return {"items": list(map(dict, self.items)), "next": self.next}


# ---- answers as JSON -----------------------------------------------------------------------------


IDS = ("job", "batch")  # keys whose values are ids in bytes


def as_json(value: Any, name: str = "") -> Any:
    """Returns a value of an answer for JSON: ids in hexadecimal digits, other bytes in base64.

    `name` is the value's key in the map that contains it.
    """
    if isinstance(value, Mapping):
        return {key: as_json(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return value.hex() if name in IDS else base64.b64encode(value).decode()
    return value
