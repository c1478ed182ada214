"""The client's view of jobs, and its calls about jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

from msgspec import Struct

from mlxpool.client.request import Image, Question, cancel, generate
from mlxpool.common import errors
from mlxpool.common.checks import is_integer, is_number, shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import GenerateOptions
from mlxpool.common.protocol.frames import ID_BYTES, unpack
from mlxpool.common.protocol.kept import job_messages as messages
from mlxpool.common.protocol.kept.job_messages import (
    IDLE,
    AboutJob,
    Fetch,
    JobAccepted,
    JobList,
    JobName,
    ListJobs,
    SubmitCall,
    SubmitDraft,
    job_key,
)
from mlxpool.common.protocol.kept.job_work import CALLS, KIND, kind_of
from mlxpool.common.protocol.kept.packed_requests import packed_request

OnSent = Callable[[int], None]  # a function that gets the number of bytes sent so far
KEY_BYTES = 8  # bytes of a random key
IDLE_NAME = "idle"  # name of the priority IDLE in Python
# Codes of errors that end the read of a job but not the job: a new read can continue.
READING_CODES = frozenset(
    kind.code
    for kind in (
        errors.BrokerLost,
        errors.Draining,
        errors.OverQuota,
        errors.QueueFull,
        errors.SlowConsumer,
        errors.StoreUnavailable,
    )
)


class JobOptions(TypedDict, total=False):
    """The options of a job of any kind."""

    key: str | None  # the job's name; default: a random key
    keep: float | None  # seconds that the result is kept after the job's end; default: `job_keep`
    not_before: float | None  # the earliest time of the job's start, as of `time.time()`
    notify: str | None  # the URL that gets a notice of the job's end
    note: bytes | None  # up to 64 KiB of your own data; `submitted` returns them


class SubmitOptions(GenerateOptions, JobOptions, total=False):
    """Keyword arguments of `submit`."""


class CallOptions(JobOptions, total=False):
    """Keyword arguments of `submit_call`: options of the job, then the keys of a call."""

    priority: int | str | None  # 0 to 2, 2 is most urgent; -1 or "idle" waits for all others
    deadline_ms: int | None  # milliseconds from acceptance to the end of the job
    inputs: Sequence[str] | Sequence[Sequence[str]] | None  # texts, or pairs of texts
    tokens: Sequence[int] | Sequence[Sequence[int]] | None  # token ids in place of `inputs`
    query: str | None  # for `rerank`: the text with which documents are compared
    documents: Sequence[str] | None  # for `rerank`: the texts to rank
    prompt: str | None  # for `embed`, `rerank`: put before each text; for `decide`: the text itself
    prompt_name: str | None  # for `embed`: the name of a prompt of the model
    dimensions: int | None  # for `embed`: dimensions to which a vector is cut; 0 keeps all
    normalise: bool | None  # for `embed`: True scales vectors to the length 1
    truncate: bool | None  # True cuts a too long input; False refuses it
    questions: Sequence[Mapping[str, Any]] | None  # for `decide`: the questions, as maps
    temperature: float | None  # for `decide`: the number that divides log-probabilities


class BatchOptions(GenerateOptions, total=False):
    """Keyword arguments of `submit_batch`: options of the batch, and options for its lines."""

    key: str | None  # the batch's name; default: a random key
    keep: float | None  # seconds that the results are kept after the end of the batch
    deadline: float | None  # seconds after the submission until unfinished lines expire
    metadata: Mapping[str, Any] | None  # a map of your own data
    notify: str | None  # the URL that gets a notice of the end of the batch
    check: bool | None  # False accepts the batch, and marks invalid lines as failed
    on_sent: OnSent | None  # a function that gets the number of bytes sent so far


OF_JOBS = frozenset(JobOptions.__annotations__)
OF_BATCHES = frozenset(BatchOptions.__annotations__) - frozenset(GenerateOptions.__annotations__)


class Job(Struct, frozen=True):
    """A job in the pool: it is on the disk, and continues after the end of this program."""

    key: str  # the job's name, for clients of the same user or with the same CURVE key
    id: bytes  # the id, 16 bytes, which also names the job
    gen: int  # the number of times that the job restarted because its model had changed
    seed: int  # the seed of the random choices
    state: str  # state at submission: waiting, or the state of the earlier job with this key
    warnings: tuple[str, ...] = ()  # the broker's warnings about ignored keys of the request


JobRef = Job | str | bytes  # a job, its key, or its id


def submit(
    model: str,
    prompt: str | None,
    messages_of_chat: Sequence[Mapping[str, object]] | None,
    tokens: Sequence[int] | None,
    images: Sequence[Image],
    options: SubmitOptions,
) -> Question[Job]:
    """Returns the call that submits a job. Raises BadRequest if it cannot be sent."""
    of_job, rest = _divided(options)
    if rest.get("priority") == IDLE_NAME:
        rest["priority"] = IDLE
    draft = generate(model, prompt, messages_of_chat, tokens, cast(GenerateOptions, rest), images)
    settings = {name: value for name, value in draft.settings.items() if name != "batch"}
    settings |= _settings(of_job)
    content = SubmitDraft(draft.model, draft.prompt, draft.options, settings, key=_named(of_job))
    return Question(os.urandom(ID_BYTES), content, lambda answer: _job(answer.body))


def submit_call(kind: str, model: str, options: CallOptions) -> Question[Job]:
    """Returns the call that submits another call, such as `embed`, as a job.

    Raises BadRequest and TooLarge if it cannot be sent.
    """
    of_job, rest = _divided(options)
    priority, deadline_ms = rest.pop("priority", None), rest.pop("deadline_ms", None)
    fields = {name: value for name, value in rest.items() if value is not None}
    request, blobs = packed_request({KIND: kind, "model": model, **fields})
    if kind_of(request) not in CALLS:
        raise BadRequest(f"kind must be one of {', '.join(CALLS)}, got {shown(kind)}")
    settings = _settings(of_job)
    settings["priority"] = IDLE if priority == IDLE_NAME else priority or 0
    if deadline_ms is not None:
        settings["deadline_ms"] = deadline_ms
    content = SubmitCall(_named(of_job), request, blobs, settings)
    return Question(os.urandom(ID_BYTES), content, lambda answer: _job(answer.body))


def _divided(options: Mapping[str, Any]) -> tuple[JobOptions, dict[str, Any]]:
    """Returns the options of the job itself, and the options of the job's request."""
    of_job = {name: value for name, value in options.items() if name in OF_JOBS}
    rest = {name: value for name, value in options.items() if name not in OF_JOBS}
    return cast(JobOptions, of_job), rest


def _named(options: JobOptions) -> str:
    key = options.get("key")
    return os.urandom(KEY_BYTES).hex() if key is None else job_key(key)


def _settings(options: JobOptions) -> dict[str, Any]:
    """Returns the given options of a job, as keys of the `submit` message."""
    settings: dict[str, Any] = {}
    if (keep := options.get("keep")) is not None:
        settings["keep_ms"] = milliseconds("keep", keep)
    if (not_before := options.get("not_before")) is not None:
        settings["not_before"] = not_before
    if (notify := options.get("notify")) is not None:
        settings["notify"] = {"url": notify}
    if note := options.get("note"):
        settings["note"] = note
    return settings


def _job(body: Mapping[str, Any]) -> Job:
    answer = JobAccepted.parse(body)
    return Job(answer.key, answer.job, answer.gen, answer.seed, answer.state, answer.warnings)


def milliseconds(name: str, seconds: object, most: int = messages.MAX_KEEP_MS) -> int:
    """Returns seconds as milliseconds. Raises BadRequest unless the result is from 0 to `most`."""
    if not is_number(seconds) or not 0 <= seconds <= most / 1000:
        raise BadRequest(f"{name} is {shown(seconds)}, must be seconds from 0 to {most // 1000}")
    return round(seconds * 1000)


def name_of(job: JobRef) -> JobName:
    """Returns a job's name in the protocol. Raises BadRequest if `job` is malformed."""
    if isinstance(job, Job):
        return JobName(id=job.id)
    return JobName(id=messages.job_id(job)) if isinstance(job, bytes) else JobName(job_key(job))


def fetch(job: JobRef, start: int, gen: int | None, steps: bool = False) -> Fetch:
    """Returns the message that starts to read a job. Raises BadRequest if `start` is below 0."""
    if not is_integer(start) or start < 0:
        raise BadRequest(f"start is {shown(start)}, must be the index of an id, 0 or more")
    return Fetch(name_of(job), start, gen, steps=steps)


def about(kind: str, job: JobRef) -> Question[dict[str, Any]]:
    """Returns a call about a job; `kind` is `job`, `retry`, `release`, or `cancel`."""
    return Question(
        os.urandom(ID_BYTES), AboutJob(kind, name_of(job)), lambda answer: dict(answer.body)
    )


class SubmittedJob(Struct, frozen=True):
    """A job with its submitted request. `row` is the map of the job.

    `request` is the body of the job's `submit`, and `blobs` are the blobs of this message.
    """

    row: Mapping[str, Any]
    request: Mapping[str, Any]
    blobs: tuple[bytes, ...]

    @property
    def note(self) -> bytes:
        """The bytes that the client stored with the job; b"" if there are none."""
        return bytes(self.request.get("note", b""))


def submitted(job: JobRef) -> Question[SubmittedJob]:
    """Returns the call that reads a job together with its submitted request."""
    return Question(
        os.urandom(ID_BYTES),
        AboutJob(messages.REQUEST, name_of(job)),
        lambda answer: SubmittedJob(answer.body, unpack(answer.blobs[0]), answer.blobs[1:]),
    )


def cancel_request(request: bytes | Job | None, key: str | None) -> Question[dict[str, Any]]:
    """Returns the call that cancels a stream by its id, or a job.

    Raises BadRequest unless exactly one of `request` and `key` is given.
    """
    if key is not None:
        if request is not None:
            raise BadRequest("give an id or a key, not both")
        return about(messages.CANCEL, key)
    if isinstance(request, Job):
        return about(messages.CANCEL, request)
    return cancel(request)


class Pages:
    """A list of jobs, collected from several answers; see `Client.jobs`."""

    def __init__(
        self, after: int | None, state: str, limit: int, batch: str = "", before: int = 0
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.complete = False
        self._after, self._state, self._limit, self._batch = after, state, limit, batch
        self._before = before

    def question(self) -> Question[JobList]:
        """Returns the call that asks for the next jobs."""
        left = self._limit - len(self.rows) if self._limit else messages.MAX_LISTED
        count = min(left, messages.MAX_LISTED)
        content = ListJobs(self._after, self._before, self._state, limit=count, batch=self._batch)
        return Question(os.urandom(ID_BYTES), content, lambda answer: JobList.parse(answer.body))

    def add(self, answer: JobList) -> None:
        """Adds the jobs of an answer."""
        self.rows += map(dict, answer.jobs)
        enough = 0 < self._limit <= len(self.rows)
        self.complete = enough or not answer.next
        if self._after is None:
            self._before = answer.next
        else:
            self._after = answer.next
