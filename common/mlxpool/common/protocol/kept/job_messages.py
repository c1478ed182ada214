"""Messages about jobs: the requests of clients, and the broker's answers.

A job is named by its key, or by its id of 16 bytes. A job belongs to the owner and the tenant that
submitted it; to all others it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from mlxpool.common.checks import integer, is_number, shown, text
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import ID_BYTES, Content, Message
from mlxpool.common.protocol.from_client import (
    DEFAULT_WINDOW,
    MAX_PRIORITY,
    MAX_WINDOW,
    Generate,
    GenerateDraft,
)
from mlxpool.common.protocol.kept.job_work import Work, parse_work
from mlxpool.common.protocol.resume import MAX_TIME
from mlxpool.common.protocol.to_client import Accepted
from mlxpool.common.records import read
from mlxpool.common.web_targets import Target

IDLE = -1  # priority of a job that starts only if no other request waits for the job's model
MAX_KEEP_MS = 366 * 24 * 3600 * 1000  # a year
MAX_LISTED = 1000  # the most jobs of one answer
DEFAULT_LISTED = 100
JOB_STATES = ("waiting", "running", "done", "cancelled", "dead", "expired")
JOB_KEYS = frozenset({"key", "tenant", "keep_ms", "not_before", "priority", "notify", "note"})
MAX_NOTE = 64 * 1024  # the most bytes that a client stores with a job
# Keys of a `generate` that concern its stream; a job has no stream.
NOT_OF_JOBS = ("resume", "queue_ms", "first_token_ms", "window", "batch", "durable", "choice")
JOBS_OFF = (
    'this pool keeps no jobs, for its state_dir is "": leave it out of [pool], or start its broker'
    " with `mlxpool serve --state-dir DIR`"
)
MAX_NUMBER = 2**62  # the greatest end_seq
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0, le=2**31)]  # a number of token ids, or of generations


def job_key(value: object) -> str:
    """Returns the key of a job. Raises BadRequest unless it has 1 to 256 printable characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= 256 or not value.isprintable():
        raise BadRequest(f"key must be 1 to 256 printable characters, got {shown(value)}")
    return value


def tenant_of(body: Mapping[str, Any]) -> str:
    """Returns the tenant of a body; "" if it has none. Raises BadRequest if it is not printable."""
    tenant = text(body, "tenant")
    if not tenant.isprintable():
        raise BadRequest(f"tenant must be printable characters, got {shown(tenant)}")
    return tenant


def job_id(value: object) -> bytes:
    """Returns the id of a job. Raises BadRequest unless it is 16 bytes."""
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise BadRequest(f"job must be an id of {ID_BYTES} bytes, got {shown(value)}")
    return value


def job_state(value: object) -> str:
    """Returns a state of jobs. Raises BadRequest unless the value is one of JOB_STATES."""
    if value not in JOB_STATES:
        raise BadRequest(f"state must be one of {', '.join(JOB_STATES)}, got {shown(value)}")
    return str(value)


class JobName(Struct, frozen=True):
    """The name of a job: its `id`, or its `key` if the id is empty."""

    key: str = ""
    id: bytes = b""
    tenant: str = ""

    def body(self) -> dict[str, Any]:
        name: dict[str, Any] = {"job": self.id} if self.id else {"key": self.key}
        return {**name, "tenant": self.tenant} if self.tenant else name

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> JobName:
        """Reads a body. Raises BadRequest unless exactly one of `key` and `job` is given."""
        key, id = body.get("key"), body.get("job")
        if (key is None) == (id is None):
            raise BadRequest("give one of key and job")
        tenant = tenant_of(body)
        return cls(id=job_id(id), tenant=tenant) if key is None else cls(job_key(key), b"", tenant)

    def __str__(self) -> str:
        return self.id.hex() if self.id else repr(self.key)


class Notify(Struct, frozen=True):
    """The URL that gets the notice of the end of a job or a batch."""

    url: str
    target: Target

    def body(self) -> dict[str, Any]:
        return {"url": self.url}

    @classmethod
    def parse(cls, value: object) -> Notify:
        """Reads a value. Raises BadRequest unless it is a map whose only key is `url`."""
        if not isinstance(value, Mapping) or set(value) != {"url"}:
            raise BadRequest(f'notify must be {{"url": …}}, got {shown(value)}')
        url = value["url"]
        if not isinstance(url, str):
            raise BadRequest(f"notify.url must be a text, got {shown(url)}")
        try:
            return cls(url, Target.parse(url))
        except ValueError as error:
            raise BadRequest(f"notify.url: {error}") from None


# ---- clients -----------------------------------------------------------------------------------


class Submit(Struct, frozen=True):
    """A checked `submit`: a request that is computed even if no client waits for its result.

    `request` and `blobs` are the body and blobs of its `generate` or call, unchanged; `work` is the
    checked request. `keep_ms` is the time that the result is kept after the job's end; if it is
    None, the pool's settings decide. `not_before` is the earliest start in seconds since 1970; 0
    means immediately. `priority` is IDLE to MAX_PRIORITY. `note` is a value that the client stores
    with the job, see JobRequest.
    """

    kind: ClassVar[str] = "submit"
    key: str
    work: Work
    request: Mapping[str, Any]
    blobs: tuple[bytes, ...] = ()
    tenant: str = ""
    keep_ms: int | None = None
    not_before: float = 0.0
    priority: int = 0
    notify: Notify | None = None
    note: bytes = b""

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Submit:
        """Checks a `submit`. Raises BadRequest naming the key, its value and its bound."""
        key = job_key(body.get("key"))
        for name in NOT_OF_JOBS:
            if body.get(name) is not None:
                raise BadRequest(f"{name} is of streams: send the job without it")
        request = {name: value for name, value in body.items() if name not in JOB_KEYS}
        work = parse_work(request, blobs)
        if isinstance(work, Generate) and work.options.reports_prompt:
            raise BadRequest("echo and prompt_logprobs are of streams: send the job without them")
        not_before = body.get("not_before")
        if not_before is not None and not (is_number(not_before) and 0 <= not_before <= MAX_TIME):
            raise BadRequest(
                f"not_before must be a time in seconds since 1970, got {shown(not_before)}"
            )
        return cls(
            key,
            work,
            request,
            tuple(blobs),
            tenant_of(body),
            integer(body, "keep_ms", 0, MAX_KEEP_MS),
            float(not_before or 0),
            integer(body, "priority", IDLE, MAX_PRIORITY) or 0,
            None if body.get("notify") is None else Notify.parse(body["notify"]),
            _note(body),
        )


def _note(body: Mapping[str, Any]) -> bytes:
    note = body.get("note") or b""
    if not isinstance(note, bytes) or len(note) > MAX_NOTE:
        got = f"{len(note)} bytes" if isinstance(note, bytes) else shown(note)
        raise BadRequest(f"note must be at most {MAX_NOTE} bytes, got {got}")
    return note


class SubmitDraft(GenerateDraft, frozen=True):
    """A `submit` with the values of a Python caller, which the broker checks.

    `settings` may also have keep_ms, not_before, priority, notify and note.
    """

    kind: ClassVar[str] = Submit.kind
    key: str = ""

    def body(self) -> dict[str, Any]:
        return {**GenerateDraft.body(self), "key": self.key}


class SubmitCall(Content, Struct, frozen=True):
    """A `submit` of a call by a Python caller.

    `request` is the body of the call, with its kind and model. `settings` are as in SubmitDraft.
    """

    kind: ClassVar[str] = Submit.kind
    key: str
    request: Mapping[str, Any]
    attached: tuple[bytes, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        return {**self.settings, **self.request, "key": self.key}

    def blobs(self) -> tuple[bytes, ...]:
        return self.attached


class Fetch(Content, Struct, frozen=True):
    """Reads a job's token ids from index `start` on, and also the ids that the job makes later.

    The header's id identifies this reading. The reading has a `window` as a stream has, and the
    client acknowledges the ids that it gets. A job whose model has changed starts a new generation,
    which computes all ids again. `gen` is the number, from 0, of the generation to which the ids
    before `start` belong; None means the newest generation.
    """

    kind: ClassVar[str] = "fetch"
    name: JobName
    start: Count = field(default=0, name="from")
    gen: Count | None = None
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)] = DEFAULT_WINDOW
    steps: bool = False  # True: send the end of each step of the output

    def body(self) -> dict[str, Any]:
        body = {**self.name.body(), "from": self.start, "window": self.window}
        body |= {"steps": True} if self.steps else {}
        return body if self.gen is None else {**body, "gen": self.gen}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Fetch:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        return read(body, cls, name=JobName.parse(body))


class ListJobs(Content, Struct, frozen=True):
    """Asks for jobs. With `after`: the jobs that ended later than the job with this `end_seq`.

    `end_seq` is a job's number in the order of ends; the answer has this order. Without `after`:
    all jobs, or all jobs in one `state`, the newest first. With `before`: only jobs that were
    submitted before the job with this number. With `batch`: the jobs of the batch with this key.
    Without `batch` and `after` the jobs of batches are left out. Only operators use `owner`,
    `model` and `batch_id`, see job_operations.
    """

    kind: ClassVar[str] = "jobs"
    after: Number | None = None
    before: Number = 0
    state: str = ""
    tenant: str | None = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = DEFAULT_LISTED
    batch: str = ""
    owner: str | None = None
    model: str = ""
    batch_id: bytes | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"limit": self.limit}
        body |= {"batch": self.batch} if self.batch else {}
        body |= {} if self.after is None else {"after": self.after}
        body |= {"before": self.before} if self.before else {}
        body |= {"state": self.state} if self.state else {}
        return {**body, "tenant": self.tenant} if self.tenant else body

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ListJobs:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        state = "" if not body.get("state") else job_state(body["state"])
        question = read({name: body.get(name) for name in ("after", "before", "limit")}, cls)
        batch = "" if body.get("batch") is None else job_key(body["batch"])
        for name, value in (("state", state), ("batch", batch)):
            if value and question.after is not None:
                raise BadRequest(f"give one of after and {name}")
        return replace(question, state=state, tenant=tenant_of(body), batch=batch)


class AboutJob(Content, Struct, frozen=True):
    """A message about one job, with only the job's name: `cancel` or a kind in JOB_CALLS."""

    kind: str  # type: ignore[misc]  # one record for several kinds
    name: JobName

    def body(self) -> dict[str, Any]:
        return self.name.body()


READ, CANCEL, RETRY, RELEASE = "job", "cancel", "retry", "release"
REQUEST = "job_request"  # kind that asks for the submitted request
JOB_CALLS = frozenset({READ, REQUEST, RETRY, RELEASE})  # without CANCEL, which streams also have
KINDS = frozenset({Submit.kind, Fetch.kind, ListJobs.kind, *JOB_CALLS})

Question = Submit | Fetch | ListJobs | AboutJob


def names_a_job(message: Message) -> bool:
    """Returns whether a message is a `cancel` of a job. A stream's `cancel` has an empty body."""
    body = message.body
    return message.kind == CANCEL and (body.get("key") is not None or body.get("job") is not None)


def parse_question(kind: str, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Question:
    """Checks a message of one of KINDS, or a `cancel` of a job. Raises BadRequest."""
    if kind == Submit.kind:
        return Submit.parse(body, blobs)
    if kind == Fetch.kind:
        return Fetch.parse(body)
    if kind == ListJobs.kind:
        return ListJobs.parse(body)
    return AboutJob(kind, JobName.parse(body))


# ---- broker ------------------------------------------------------------------------------------


class JobAccepted(Content, Struct, frozen=True):
    """A job is on the disk, or the reading of a job begins: an `accepted` with data of the job.

    `state` is the job's state at the time of the answer.
    """

    kind: ClassVar[str] = Accepted.kind
    boot: int
    link: int
    job: bytes
    key: str
    gen: int
    seed: int
    state: str
    warnings: tuple[str, ...] = ()

    def body(self) -> dict[str, Any]:
        accepted = Accepted(self.boot, self.link, 0, self.seed, self.warnings)
        about = {"job": self.job, "key": self.key, "gen": self.gen, "state": self.state}
        return {**accepted.body(), **about}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> JobAccepted:
        accepted = Accepted.parse(body)
        return cls(
            accepted.boot,
            accepted.link,
            bytes(body["job"]),
            str(body["key"]),
            int(body["gen"]),
            accepted.seed,
            str(body["state"]),
            accepted.warnings,
        )


class JobRow(Content, Struct, frozen=True):
    """Answer to `job`, `retry` and `release`: the map of one job, see docs/protocol.md, `jobs`."""

    kind: ClassVar[str] = "job"
    row: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        return dict(self.row)


class JobRequest(Content, Struct, frozen=True):
    """Answer to `job_request`: the map of a job and its submitted request.

    `packed` is the body of the job's `submit`, with the note and without the keys that the map has.
    `attached` are the blobs of the request.
    """

    kind: ClassVar[str] = REQUEST
    row: Mapping[str, Any]
    packed: bytes
    attached: tuple[bytes, ...] = ()

    def body(self) -> dict[str, Any]:
        return dict(self.row)

    def blobs(self) -> tuple[bytes, ...]:
        return (self.packed, *self.attached)


class JobList(Content, Struct, frozen=True):
    """Answer to `jobs`: the map of each job.

    `next` is the value of `after` or `before` for the next request; 0 in the last answer.
    """

    kind: ClassVar[str] = "jobs"
    jobs: Sequence[Mapping[str, Any]]
    next: int = 0

    def body(self) -> dict[str, Any]:
        return {"jobs": list(map(dict, self.jobs)), "next": self.next}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> JobList:
        return cls(list(body["jobs"]), int(body["next"]))
