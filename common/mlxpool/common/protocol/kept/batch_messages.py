"""Messages about batches: files whose lines become jobs.

A batch is named by its key, and belongs to the owner and the tenant that submitted it. A file, a
batch and a job may have the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from mlxpool.common.checks import is_integer, shown, text
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.options import MAX_DEADLINE_MS
from mlxpool.common.protocol.frames import Content, pack
from mlxpool.common.protocol.from_client import MAX_PRIORITY
from mlxpool.common.protocol.kept.batch_lines import check_defaults
from mlxpool.common.protocol.kept.file_messages import KeyName, is_time
from mlxpool.common.protocol.kept.job_messages import (
    IDLE,
    MAX_KEEP_MS,
    Notify,
    job_key,
    tenant_of,
)
from mlxpool.common.records import ShortText, read

MAX_LINES = 10_000_000  # the most lines of a file that a client may count
MAX_BATCHES = 100  # the most batches of one answer
MAX_OUTCOMES = 1000  # the most outcomes of one answer
DEFAULT_OUTCOMES = 200
MAX_WAIT_MS = 30_000  # the longest `wait_ms` of a `batch_progress`
MAX_METADATA = 16 * 1024  # packed bytes
MAX_DIGEST = 64  # bytes

DONE, OTHERS = "done", "others"  # the results of lines that are done, and of all other lines
READ, CANCEL, RETRY, RELEASE = "batch", "batch_cancel", "batch_retry", "batch_release"
# A separate message kind. An old broker would ignore an extra key of `batch_release` and delete all
# results.
RELEASE_RESULTS = "batch_release_results"


class SubmitBatch(Content, Struct, frozen=True):
    """Submits a batch: each line of a completely sent file becomes a job.

    `file` is the key of the file. `digest` identifies its content: a batch is refused if an earlier
    batch with the same key has another file. `lines` is the number of lines that the client
    counted, or 0. `defaults` are keys for lines that lack them, see batch_lines. `deadline_ms` is
    the deadline of the whole batch. `keep_ms` is the time that the results are kept after the
    batch's end. The pool does not read `metadata`. `notify` has the URL for a notice of the batch's
    end. The notice names the files that the client will make: `output_file` for the lines that are
    done, and `error_file` for the other lines, if there are any.
    """

    kind: ClassVar[str] = "batch_submit"
    name: KeyName
    file: str
    digest: bytes = b""
    lines: Annotated[int, Meta(ge=0, le=MAX_LINES)] = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    priority: Annotated[int, Meta(ge=IDLE, le=MAX_PRIORITY)] = 0
    keep_ms: Annotated[int, Meta(ge=0, le=MAX_KEEP_MS)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notify: Notify | None = None
    output_file: str = ""
    error_file: str = ""

    def body(self) -> dict[str, Any]:
        body = {**self.name.body(), "file": self.file, "lines": self.lines}
        body |= {} if self.notify is None else {"notify": self.notify.body()}
        body |= {"output_file": self.output_file} if self.output_file else {}
        body |= {"error_file": self.error_file} if self.error_file else {}
        body |= {"digest": self.digest, "priority": self.priority}
        body |= {"defaults": dict(self.defaults), "metadata": dict(self.metadata)}
        body |= {} if self.keep_ms is None else {"keep_ms": self.keep_ms}
        return body if self.deadline_ms is None else {**body, "deadline_ms": self.deadline_ms}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> SubmitBatch:
        """Reads a body. Raises BadRequest and TooLarge naming the key, its value and its bound."""
        digest = body.get("digest") or b""
        if not isinstance(digest, bytes) or len(digest) > MAX_DIGEST:
            raise BadRequest(f"digest must be at most {MAX_DIGEST} bytes, got {shown(digest)}")
        metadata = body.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise BadRequest(f"metadata must be a map, got {shown(metadata)}")
        if (size := len(pack(metadata))) > MAX_METADATA:
            raise TooLarge(f"metadata has {size} bytes, at most {MAX_METADATA}")
        return read(
            body,
            cls,
            name=KeyName.parse(body),
            file=_file_key(body.get("file")),
            digest=digest,
            defaults=check_defaults(body.get("defaults") or {}),
            metadata=metadata,
            notify=None if body.get("notify") is None else Notify.parse(body["notify"]),
            output_file=_result_key(body, "output_file"),
            error_file=_result_key(body, "error_file"),
        )


def _result_key(body: Mapping[str, Any], name: str) -> str:
    return _file_key(body[name], name) if body.get(name) else ""


def _file_key(value: object, name: str = "file") -> str:
    try:
        return job_key(value)
    except BadRequest as error:
        raise BadRequest(f"{name} must be the key of a file: {error.message}") from None


class WaitForProgress(Content, Struct, frozen=True):
    """Asks for a batch: the answer comes when the batch has changed or ended, or after `wait_ms`.

    Each answer has a text `mark`, which changes with the batch. `seen` is the `mark` of the newest
    answer that the client has. With "" the answer comes immediately.
    """

    kind: ClassVar[str] = "batch_progress"
    name: KeyName
    seen: ShortText = ""
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = MAX_WAIT_MS

    def body(self) -> dict[str, Any]:
        return {**self.name.body(), "seen": self.seen, "wait_ms": self.wait_ms}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> WaitForProgress:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        return read(body, cls, name=KeyName.parse(body))


class ReadOutcomes(Content, Struct, frozen=True):
    """Asks for the outcomes of the lines after the line with the number `after`, in line order.

    The answer leaves out lines that have not ended.
    """

    kind: ClassVar[str] = "batch_results"
    name: KeyName
    after: int = -1
    limit: Annotated[int, Meta(ge=1, le=MAX_OUTCOMES)] = DEFAULT_OUTCOMES

    def body(self) -> dict[str, Any]:
        return {**self.name.body(), "after": self.after, "limit": self.limit}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ReadOutcomes:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        after = body.get("after", -1)
        if not is_integer(after) or not -1 <= after <= MAX_LINES:
            raise BadRequest(
                f"after must be the number of a line, or -1 for all; got {shown(after)}"
            )
        return read(body, cls, name=KeyName.parse(body), after=after)


class ListBatches(Content, Struct, frozen=True):
    """Asks for the batches of a tenant, the newest first.

    `before` is the key of a batch: the list begins with the next batch in this order. `older` is a
    time: only batches that were created before this time are listed.
    """

    kind: ClassVar[str] = "batches"
    tenant: str = ""
    before: str = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCHES)] = MAX_BATCHES
    older: float | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"limit": self.limit}
        body |= {"before": self.before} if self.before else {}
        body |= {} if self.older is None else {"older": self.older}
        return {**body, "tenant": self.tenant} if self.tenant else body

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ListBatches:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        before, older = body.get("before"), body.get("older")
        if older is not None and not is_time(older):
            raise BadRequest(f"older must be seconds since 1970, got {shown(older)}")
        if older is not None and before not in (None, ""):
            raise BadRequest("give one of before and older, not both")
        key = "" if before in (None, "") else job_key(before)
        return read(body, cls, tenant=tenant_of(body), before=key, older=older)


class AboutBatch(Content, Struct, frozen=True):
    """Asks for one batch, or changes it; `kind` is one of the message kinds in CALLS.

    `only` selects the results that the kind RELEASE_RESULTS deletes: those of lines that are done
    (DONE), or of all other lines (OTHERS).
    """

    kind: str  # type: ignore[misc]  # one record for several kinds
    name: KeyName
    only: str = ""

    def body(self) -> dict[str, Any]:
        return {**self.name.body(), "only": self.only} if self.only else self.name.body()

    @classmethod
    def parse(cls, kind: str, body: Mapping[str, Any]) -> AboutBatch:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        only = text(body, "only") if kind == RELEASE_RESULTS else ""
        if kind == RELEASE_RESULTS and only not in (DONE, OTHERS):
            raise BadRequest(f"only must be {DONE} or {OTHERS}, got {shown(only)}")
        return cls(kind, KeyName.parse(body), only)


CALLS = frozenset({READ, CANCEL, RETRY, RELEASE, RELEASE_RESULTS})
KINDS = frozenset(
    {SubmitBatch.kind, WaitForProgress.kind, ReadOutcomes.kind, ListBatches.kind, *CALLS}
)
Question = SubmitBatch | WaitForProgress | ReadOutcomes | ListBatches | AboutBatch


def parse_question(kind: str, body: Mapping[str, Any]) -> Question:
    """Checks a message of one of KINDS. Raises BadRequest and TooLarge."""
    if kind == SubmitBatch.kind:
        return SubmitBatch.parse(body)
    if kind == WaitForProgress.kind:
        return WaitForProgress.parse(body)
    if kind == ReadOutcomes.kind:
        return ReadOutcomes.parse(body)
    if kind == ListBatches.kind:
        return ListBatches.parse(body)
    return AboutBatch.parse(kind, body)


# ---- broker ------------------------------------------------------------------------------------


class BatchRow(Content, Struct, frozen=True):
    """The map of one batch, see docs/protocol.md, `batch`."""

    kind: ClassVar[str] = "batch"
    row: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        return dict(self.row)


class BatchList(Content, Struct, frozen=True):
    """Answer to `batches`. `next` is the next request's `before`; "" in the last answer."""

    kind: ClassVar[str] = "batches"
    batches: Sequence[Mapping[str, Any]]
    next: str = ""

    def body(self) -> dict[str, Any]:
        return {"batches": list(map(dict, self.batches)), "next": self.next}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> BatchList:
        return cls(list(body["batches"]), str(body["next"]))


class Outcomes(Content, Struct, frozen=True):
    """Answer to `batch_results`. `packed` is a blob: the packed list with the map of each line.

    `next` is the value of `after` for the next request; -1 in the last answer.
    """

    kind: ClassVar[str] = "batch_results"
    next: int
    packed: bytes

    def body(self) -> dict[str, Any]:
        return {"next": self.next}

    def blobs(self) -> tuple[bytes, ...]:
        return (self.packed,)
