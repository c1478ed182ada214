"""Results of the store's operations: views of jobs, and pages of output.

Times are seconds since 1970 on the store's clock (writer.StoreClock), which never goes back.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from mlxpool.common.protocol.token_ids import count_of


class StoreError(OSError):
    """Base of the store's errors. The message names the remedy."""


class StoreUnusable(StoreError):
    """Raised if the store cannot be opened; nothing was changed."""


class StoreUnwritable(StoreUnusable):
    """Raised if the store's folder cannot be made, or this user cannot write into it."""


class StoreInUse(StoreUnusable):
    """Raised if another broker uses the store."""


class StoreFenced(StoreError):
    """Raised if another broker has taken the store over: this broker must end."""


class StoreFailed(StoreError):
    """Raised if the disk or the connection failed. The last transaction may be durable or not."""


class OutOfSpace(StoreError):
    """Raised if a transaction found no space and was undone; the store is unchanged."""


class Damaged(Exception):
    """Raised if a stored part does not match its checksum; the message names job and range."""


MAX_CHUNK = 64 * 1024  # most bytes of ids, text and log-probabilities in a chunk
MAX_END = 4 * 1024 * 1024  # most bytes of the end of a job, without the blobs of its answer
MAX_ANSWER = 4 * 1024 * 1024  # most bytes of the blobs of a job's answer
MAX_FAILURES = 16  # most failures that a job keeps, the newest
MAX_RETRIES = 1000  # most retries of one generation of a job
MAX_STACKS = 16 * 1024  # most characters of a worker's stacks in a failure


class JobState(StrEnum):
    """The states of a job on disk. A running job is stored as `waiting`."""

    WAITING = "waiting"
    DONE = "done"
    CANCELLED = "cancelled"
    DEAD = "dead"
    EXPIRED = "expired"
    GONE = "gone"  # the result is deleted; the key is kept until `key_life` has passed


ENDED = frozenset({JobState.DONE, JobState.CANCELLED, JobState.DEAD, JobState.EXPIRED})
RETRYABLE = frozenset({JobState.DEAD, JobState.EXPIRED})


class Scope(Struct, frozen=True):
    """The name of a job for its client. Equal keys of two owners or tenants name two jobs.

    `owner` is the public key or the uid of the connection. `tenant` is the client of a gateway, ""
    without a gateway.
    """

    owner: str
    tenant: str
    key: str


# A client names a job by its scope, the broker and its operators by the job's 16 bytes of id.
Name = Scope | bytes


class Chunk(Struct, frozen=True):
    """Output of a job from the position `pos` on, in whole decode steps.

    `ids` are packed ids. `borders` has a pair for each step: the numbers of ids and of characters
    in this chunk up to the end of the step. So the last pair is (count, len(text)). Each step has
    ids: text without ids goes into the next step, or into the end of the job. `logprobs` is a
    packed list with one entry for each id; b"" if the request has none.
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
        """The position after the last id of the chunk."""
        return self.pos + self.count

    @property
    def size(self) -> int:
        """A bound on the bytes that the chunk takes in the store."""
        return len(self.ids) + 4 * len(self.text) + 8 * len(self.borders) + len(self.logprobs)


class JobView(Struct, frozen=True):
    """A stored job, without its request and its output. `seq`: its number in the order of arrival.

    `gen`: the generation of its output. `pos`: the number of durable ids of this generation.
    `starts`: how often the job was given to the core since its last durable id. `charge`: the job's
    blame for lost workers. `retried` has pairs: a number of ids, and how often the job was retried
    when it had this many ids. `end`: the packed terminal message; None while the job waits.
    `end_seq` orders the ends of all jobs; 0 while the job waits. `batch` and `line` are set if the
    job is a line of a batch. `due`: the time before which the job does not run. `notice`: `waiting`
    or `given_up` if the notice of its end was not delivered, else "".

    `damaged` names the stored parts with wrong checksums. If the end is damaged, `end` is None. If
    the record is damaged, `facts`, `ended`, `cause`, `attempts`, `charge` and `retried` have the
    values of a new job.
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
    """A failure of a job. `cause` is a text, `at` the time.

    `stacks` are the stacks of the threads of a worker that hung or crashed, else "".
    """

    number: int
    at: float
    cause: str
    stacks: str


class FedJob(Struct, frozen=True):
    """A job that the broker has read to run it, with its `request` and the `blobs` of the request.

    `ids` are the packed durable ids, `job.pos` of them, without a gap. `deadline_left`: in seconds.
    `damaged`: the error if the disk has changed the request, so that the job cannot run; else "".
    """

    job: JobView
    request: bytes
    blobs: tuple[bytes, ...]
    ids: bytes
    deadline_left: float | None
    damaged: str = ""


# ---- results of single operations ----------------------------------------------------------------


class Result:
    """The base class of the results of all operations of the store."""

    __slots__ = ()


class Refused(Result, Struct, frozen=True):
    """The operation was not performed and nothing was changed; a retry is possible.

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
    """The job is durable. `new` is false if an equal job was already stored."""

    job: JobView
    new: bool


class DuplicateKey(Result, Struct, frozen=True):
    """The key names a job or batch with another digest. `id` is its id."""

    id: bytes


class KeyGone(Result, Struct, frozen=True):
    """The key named a deleted job or batch. The key can be used again from `until` on."""

    id: bytes
    until: float
    scope: Scope | None = None  # scope of the deleted job; only FetchPage and ReadRequest set it


class UnknownName(Result, Struct, frozen=True):
    """No job, batch or file of this scope has the name.

    `created`: the time of creation of a recently deleted file.
    """

    created: float | None = None


class Fate(Result, Struct, frozen=True):
    """The operation does not match the state of the stored `job`; nothing was changed."""

    job: JobView


class Fed(Result, Struct, frozen=True):
    """Jobs to be run, in the order of the owners' turns. The `starts` of each job include this run.

    `last_owner` is the `after_owner` of the next `FeedNext`. `next_due` is the earliest due time of
    further jobs; None without further jobs, or after a bound was reached. `more`: further jobs are
    due, but a bound left them out.
    """

    jobs: tuple[FedJob, ...]
    last_owner: str
    next_due: float | None
    now: float
    more: bool = False


class Durable(Result, Struct, frozen=True):
    """Ids of a generation below `pos` are on disk: readers may receive them."""

    id: bytes
    gen: int
    pos: int


class Changed(Result, Struct, frozen=True):
    """The operation was performed. `job` is the new view; after an end it has an `end_seq`."""

    job: JobView


class Found(Result, Struct, frozen=True):
    """The present view of a job that was looked up."""

    job: JobView


class History(Result, Struct, frozen=True):
    """A job and its failures, the oldest first; at most MAX_FAILURES are kept."""

    job: JobView
    failures: tuple[Failure, ...]


class StoredRequest(Result, Struct, frozen=True):
    """The submission of a job: its packed request, and the blobs of the request."""

    job: JobView
    request: bytes
    blobs: tuple[bytes, ...]


class Page(Result, Struct, frozen=True):
    """Output of a job, in whole decode steps.

    The first chunk begins at or before the requested position. The output ends at `job.pos`, and
    can grow while `job.state` is waiting. Without chunks there is no output after the requested
    position yet. `answer`: the blobs of the answer of an ended job, on the page that has its last
    id.
    """

    job: JobView
    chunks: tuple[Chunk, ...]
    answer: tuple[bytes, ...] = ()


class JobRestarted(Result, Struct, frozen=True):
    """The requested generation of the output is not the present one, which begins at position 0."""

    job: JobView


class JobList(Result, Struct, frozen=True):
    """Jobs in order. `next` is the `after` of the next operation; 0 after the last jobs."""

    jobs: tuple[JobView, ...]
    next: int


class Swept(Result, Struct, frozen=True):
    """The result of a sweep: the jobs that expired, and how many results or jobs were deleted.

    `more`: more jobs may be due, so the next sweep is due now. `next` is the earliest time at which
    a sweep has something to do; None if unknown.
    """

    expired: tuple[JobView, ...]
    forgotten: int
    more: bool
    next: float | None


class Backlog(Result, Struct, frozen=True):
    """The numbers of waiting jobs at the time `now`, by model and priority.

    The store counts running jobs as waiting. An entry of `waiting` is (model, priority, number of
    jobs, earliest due time, greatest `JobView.starts` of these jobs).
    """

    waiting: tuple[tuple[str, int, int, float, int], ...]
    now: float


class Notice(Result, Struct, frozen=True):
    """The notice of the end of a job or batch (`kind`). Its `body` is posted to `url`.

    `subject` is the id of the job or batch, `origin` the scheme, host and port of the URL. `since`
    is the time of the first attempt, moved forward by the time in which no broker ran. `tries` is
    the number of failed attempts, `cause` the cause of the last failure. `given_up` is the time at
    which the broker stopped its attempts, else None.
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
    """The notices that an operation has read.

    After ReadNotices, `next` is the earliest due time of the notices that are not due yet; None if
    there is no such notice. After ListNotices it is None.
    """

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
    """Figures of the store. `used` and `bound` are bytes.

    New jobs are refused while `used` is above `admit` (bytes). `room`: bytes that the bound and the
    disk leave for new jobs; if it is 0, new jobs are refused. `notices` counts the notices to be
    delivered, `given_up` the notices without further tries.
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
    """The position at which an export continues: the job `seq`, or the first job after it.

    If `part` is 0, the export continues at the start of the job. Otherwise it continues at the blob
    `part` - 1; the blobs of the job's request are counted first, then those of its answer. After
    the blobs comes the output of generation `gen`, from `pos` on.
    """

    seq: int = 0
    gen: int = 0
    part: int = 0
    pos: int = 0


class ExportedJob(Struct, frozen=True):
    """A part of an exported job. `request` is None on all pages after the job's first page.

    `blobs` has pairs (number, data): numbers from 0 are blobs of the request, numbers below 0 blobs
    of the answer. `damaged` names the parts that the disk has changed; they are left out.
    """

    job: JobView
    request: bytes | None
    blobs: tuple[tuple[int, bytes], ...]
    chunks: tuple[Chunk, ...]
    damaged: tuple[str, ...] = ()
    answer: tuple[tuple[int, bytes], ...] = ()


class Export(Result, Struct, frozen=True):
    """Jobs in order of `seq`. `next` is the cursor of the next export; None after the last jobs.

    The output of the last job may continue in the next export.
    """

    jobs: tuple[ExportedJob, ...]
    next: Cursor | None


class Verified(Result, Struct, frozen=True):
    """The result of a comparison of jobs with their checksums.

    `checked` jobs of `bytes` bytes were compared. `damaged` has pairs: a job, and its damaged part.
    `next` is the `after` of the next operation; 0 after the last jobs.
    """

    checked: int
    bytes: int
    damaged: tuple[tuple[JobView, str], ...]
    next: int
