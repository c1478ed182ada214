"""Results of the store's operations, with their views of jobs and pages of output.

Times are seconds since 1970 on the store's clock (see clock.py), which never goes back.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from mlxpool.common.protocol.token_ids import count_of


class StoreError(OSError):
    """Base of the store's errors; the message has the remedy."""


class StoreUnusable(StoreError):
    """The store cannot be opened; nothing was changed."""


class StoreUnwritable(StoreUnusable):
    """The folder of the store cannot be made, or this user cannot write into it."""


class StoreInUse(StoreUnusable):
    """Another broker uses the store."""


class StoreFenced(StoreError):
    """Another broker has taken the store over since this one opened it: this one must end."""


class StoreFailed(StoreError):
    """The disk or the connection failed. The last transaction may or may not be durable."""


class OutOfSpace(StoreError):
    """The transaction found no room and was undone; the store is unchanged."""


class Damaged(Exception):
    """A stored part does not match its checksum; the message names the job and the range."""


MAX_CHUNK = 64 * 1024  # bytes of ids, text and log-probabilities in one chunk
MAX_END = 4 * 1024 * 1024  # bytes of the end of a job, without the blobs of its answer
MAX_ANSWER = 4 * 1024 * 1024  # bytes of the blobs of a job's answer
MAX_FAILURES = 16  # failures that are kept of a job, the newest
MAX_RETRIES = 1000  # retries of one generation of a job
MAX_STACKS = 16 * 1024  # characters of a worker's stacks, kept with a failure


class JobState(StrEnum):
    """The states of a job on disk. A running job is `waiting` there."""

    WAITING = "waiting"
    DONE = "done"
    CANCELLED = "cancelled"
    DEAD = "dead"
    EXPIRED = "expired"
    GONE = "gone"  # its result is deleted; the key is remembered until `key_life` has passed


ENDED = frozenset({JobState.DONE, JobState.CANCELLED, JobState.DEAD, JobState.EXPIRED})
RETRYABLE = frozenset({JobState.DEAD, JobState.EXPIRED})


class Scope(Struct, frozen=True):
    """The name of a job as its client knows it. Equal keys of two owners or tenants are two jobs.

    `owner` is the key or the uid of the connection. `tenant` is a gateway's client, "" without a
    gateway.
    """

    owner: str
    tenant: str
    key: str


# A client names a job by its scope, the broker and its operators by the job's 16 bytes of id.
Name = Scope | bytes


class Chunk(Struct, frozen=True):
    """Output of a job from `pos` on, in whole steps.

    `ids` are packed ids. `borders` has (ids, characters) for each step: their numbers in this chunk
    up to the step's end, so the last entry is (count, len(text)). Each step has ids: text without
    ids goes into the next step, or into the end of the job. `logprobs` is a packed list with one
    entry for each id; b"" if the request has none.
    """

    pos: int
    ids: bytes
    text: str
    borders: tuple[tuple[int, int], ...]
    logprobs: bytes = b""

    @property
    def count(self) -> int:
        """The number of ids."""
        return count_of(self.ids)

    @property
    def end(self) -> int:
        """The position after the last id."""
        return self.pos + self.count

    @property
    def size(self) -> int:
        """The most bytes that it takes."""
        return len(self.ids) + 4 * len(self.text) + 8 * len(self.borders) + len(self.logprobs)


class JobView(Struct, frozen=True):
    """A job without its request and its output. `seq` is its number in the order of arrival.

    `gen` is the generation of its output, `pos` the number of durable ids in it, `retried` the
    (pos, times) of its retries. `starts` counts the times that it was given to a worker since its
    last durable id. `end` comes from `Finish`, None while the job waits. `end_seq` orders the ends
    of all jobs, 0 while it waits. A line of a batch has `batch` and `line`. `due`: the time before
    which it is not fed. `notice` is `waiting` or `given_up` if the notice of its end was not
    delivered. `damaged` names the parts that the disk has changed: then `end` is None, or `facts`,
    `ended`, `cause`, `attempts`, `charge` and `retried` have the values of a new job.
    """

    seq: int
    id: bytes
    scope: Scope
    digest: bytes
    gen: int
    kind: str
    model: str
    priority: int
    seed: int
    facts: bytes | None
    state: JobState
    pos: int
    starts: int
    attempts: int
    charge: float
    submitted: float
    due: float
    deadline: float | None
    keep: float | None
    forget: float | None
    ended: float | None
    end_seq: int
    end: bytes | None
    cause: str
    size: int
    batch: bytes | None
    line: int
    label: str
    notify: str
    notice: str = ""
    damaged: str = ""
    retried: tuple[tuple[int, int], ...] = ()

    def retries_at(self, pos: int) -> int:
        return dict(self.retried).get(pos, 0)


class Failure(Struct, frozen=True):
    """A failure of a job: `cause` in words, `at` seconds since 1970.

    `stacks` are the stacks of the threads of a worker that hung or crashed, else "".
    """

    number: int
    at: float
    cause: str
    stacks: str


class FedJob(Struct, frozen=True):
    """A job as it is given to a worker. `request` and `blobs` are those of `Submit`.

    `ids` are the packed durable ids, job.pos of them, without a gap. `deadline_left`: seconds.
    `damaged`: the error if the disk has changed its request, so that it cannot be run; else "".
    """

    job: JobView
    request: bytes
    blobs: tuple[bytes, ...]
    ids: bytes
    deadline_left: float | None
    damaged: str = ""


# ---- results of single operations ----------------------------------------------------------------


class Result:
    """Base of all results."""

    __slots__ = ()


class Refused(Result, Struct, frozen=True):
    """Nothing was changed, and the operation can be sent again later.

    `code`: `store_full` (the bound in bytes, or the disk), `over_quota` (the owner's quota),
    `store_busy` (the inbox is full), `store_closed` (the disk failed, or the broker ends),
    `store_error` (the operation itself failed), `damaged` (the disk has changed the requested data;
    a retry does not help). `message` is a sentence. `value` and `bound` are the figures of a quota,
    else 0.
    """

    code: str
    message: str
    value: int = 0
    bound: int = 0


class Submitted(Result, Struct, frozen=True):
    """The job is durable. `new` is false if the same job was there before."""

    job: JobView
    new: bool


class DuplicateKey(Result, Struct, frozen=True):
    """The key names a job or batch with another digest; `id` is the id of it."""

    id: bytes


class KeyGone(Result, Struct, frozen=True):
    """The key named a job or batch that is deleted; the key is free again at `until`."""

    id: bytes
    until: float
    scope: Scope | None = None  # of the deleted job; only FetchPage and ReadRequest set it


class UnknownName(Result, Struct, frozen=True):
    """No job, batch or file of this scope has the name.

    `created`: the time of creation of a lately deleted file.
    """

    created: float | None = None


class Fate(Result, Struct, frozen=True):
    """The operation does not fit the stored job, which is `job`; nothing was changed."""

    job: JobView


class Fed(Result, Struct, frozen=True):
    """Jobs to be run, in the order of the owners' turns. Their `starts` is one higher.

    `last_owner` goes into the next `FeedNext`. `next_due` is the earliest due time of further jobs;
    None without such a job, and after a bound was reached. `more`: further jobs are due, and were
    not fed because of the bounds.
    """

    jobs: tuple[FedJob, ...]
    last_owner: str
    next_due: float | None
    now: float
    more: bool = False


class Durable(Result, Struct, frozen=True):
    """The ids of a generation below `pos` are on disk: readers may receive them."""

    id: bytes
    gen: int
    pos: int


class Changed(Result, Struct, frozen=True):
    """The operation was performed: `job` is its new view. After an end, `job.end_seq` is set."""

    job: JobView


class Found(Result, Struct, frozen=True):
    """The present view of a job that was looked up."""

    job: JobView


class History(Result, Struct, frozen=True):
    """A job and its failures, the oldest first; at most MAX_FAILURES are kept."""

    job: JobView
    failures: tuple[Failure, ...]


class StoredRequest(Result, Struct, frozen=True):
    """The submission of a job: `request` and `blobs` are those of `Submit`."""

    job: JobView
    request: bytes
    blobs: tuple[bytes, ...]


class Page(Result, Struct, frozen=True):
    """Output of a job from a step border on, in whole steps.

    `chunks` begin at or before the requested position. Output ends at `job.pos`, and can grow while
    `job.state` is waiting. No chunks: there is no output after the position yet. `answer`: the
    blobs of the answer of an ended job, on the page that has its last id.
    """

    job: JobView
    chunks: tuple[Chunk, ...]
    answer: tuple[bytes, ...] = ()


class JobRestarted(Result, Struct, frozen=True):
    """The requested generation is not the present generation, which begins at 0."""

    job: JobView


class JobList(Result, Struct, frozen=True):
    """Jobs in order. `next` is the `after` of the next operation; 0: these are the last."""

    jobs: tuple[JobView, ...]
    next: int


class Swept(Result, Struct, frozen=True):
    """Jobs that a sweep ended. `more`: others may be left, so sweep again at once.

    `next` is the earliest time at which a further sweep has something to do, None if not known.
    """

    expired: tuple[JobView, ...]
    forgotten: int
    more: bool
    next: float | None


class Backlog(Result, Struct, frozen=True):
    """(model, priority, number of waiting and running jobs, earliest due time, most starts)."""

    waiting: tuple[tuple[str, int, int, float, int], ...]
    now: float


class Notice(Result, Struct, frozen=True):
    """The notice of the end of a job or batch (`kind`): `body` is posted to `url`.

    `subject` is the id of the job or batch, `origin` the scheme, host and port of the URL. `since`
    is the time from which on it is tried; times without a broker are added to it. `tries` is the
    number of failed tries, `cause` the cause of the last. `given_up` is the time at which the
    broker gave it up, else None.
    """

    end_seq: int
    kind: str
    subject: bytes
    scope: Scope
    url: str
    origin: str
    since: float
    tries: int
    due: float
    cause: str
    given_up: float | None
    body: bytes


class Notices(Result, Struct, frozen=True):
    """Due notices; `next` is the due time of the next notice."""

    notices: tuple[Notice, ...]
    next: float | None
    now: float = 0.0


class Poisons(Result, Struct, frozen=True):
    """Digests of requests in quarantine, with the seconds until their release."""

    left: tuple[tuple[bytes, float], ...]


class Done(Result, Struct, frozen=True):
    """The operation was performed and has no other result."""


# ---- operators -----------------------------------------------------------------------------------


class StoreFigures(Result, Struct, frozen=True):
    """Figures of the store. `used` and `bound` are bytes; new jobs are refused above `admit`.

    `room`: bytes that new jobs may take, as the bound and the disk allow; 0: new jobs are refused.
    `notices` are still to be delivered; `given_up` notices will not be tried again.
    """

    states: tuple[tuple[JobState, int], ...]
    batches: int
    notices: int
    used: int
    admit: int
    bound: int
    given_up: int = 0
    room: int = 0


class Cursor(Struct, frozen=True):
    """The place at which an export goes on: the job `seq` or the first after it.

    `part` 0: at the job itself. Otherwise: at blob `part` - 1, counting the blobs of its request,
    then of its answer. The further blobs follow, then the output of generation `gen` from `pos` on.
    """

    seq: int = 0
    gen: int = 0
    part: int = 0
    pos: int = 0


class ExportedJob(Struct, frozen=True):
    """A job, or only further blobs and output of it if `request` is None.

    `blobs` of its request and blobs of its `answer` are (place, data). `damaged` names the parts
    that the disk has changed; they are left out.
    """

    job: JobView
    request: bytes | None
    blobs: tuple[tuple[int, bytes], ...]
    chunks: tuple[Chunk, ...]
    damaged: tuple[str, ...] = ()
    answer: tuple[tuple[int, bytes], ...] = ()


class Export(Result, Struct, frozen=True):
    """Jobs in order of `seq`. `next` goes into the following operation; None: these are the last.

    The output of the last job may go on in the next export.
    """

    jobs: tuple[ExportedJob, ...]
    next: Cursor | None


class Verified(Result, Struct, frozen=True):
    """`checked` jobs were compared with their checksums: `damaged` are (job, damaged part).

    `next` is the `after` of the next operation; 0: these were the last.
    """

    checked: int
    bytes: int
    damaged: tuple[tuple[JobView, str], ...]
    next: int
