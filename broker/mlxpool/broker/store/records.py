"""What the store answers: views of jobs, pages of output, and the results of operations.

Times are seconds since 1970 on the store's clock (see clock.py), which never goes back.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from mlxpool.common.protocol.token_ids import count_of


class StoreError(OSError):
    """Base of these errors; the message says what to do."""


class StoreUnusable(StoreError):
    """The store cannot be opened as it is: nothing was changed."""


class StoreUnwritable(StoreUnusable):
    """The folder of the store cannot be made, or this user cannot write in it."""


class StoreInUse(StoreUnusable):
    """Another broker has the store."""


class StoreFenced(StoreError):
    """Another broker has written into the store since this one opened it: this one must end."""


class StoreFailed(StoreError):
    """The disk or the connection failed. Whether the last transaction is durable is unknown."""


class OutOfSpace(StoreError):
    """No room for the transaction, which was undone; the store is as it was."""


class Damaged(Exception):
    """What is stored does not match its checksum; the message names the job and the range."""


MAX_CHUNK = 64 * 1024  # bytes of ids, text and log-probabilities in one chunk
MAX_END = 4 * 1024 * 1024  # bytes of the end of a job without the blobs of its answer
MAX_ANSWER = 4 * 1024 * 1024  # bytes of the blobs of a job's answer
MAX_FAILURES = 16  # that are kept of a job, the newest
MAX_RETRIES = 1000  # of one generation of a job
MAX_STACKS = 16 * 1024  # characters of a worker's stacks that are kept with a failure


class JobState(StrEnum):
    """The states of a job on disk. A running job is `waiting` there: that it runs is memory."""

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

    `owner` is the key or the uid of the connection; `tenant` is whom a gateway speaks for, "" else.
    """

    owner: str
    tenant: str
    key: str


# A client names a job by its scope, the broker and its operators by the job's 16 bytes of id.
Name = Scope | bytes


class Chunk(Struct, frozen=True):
    """Output of a job from `pos` on, in whole steps.

    `ids` are packed ids. `borders` has for each step (ids, characters): how many there are in this
    chunk up to the step's end, so that the last entry is (count, len(text)). Each step has ids:
    text without ids goes with the step behind it, or into the end of the job. `logprobs` is a
    packed list with one entry for each id; b"" if none were asked for.
    """

    pos: int
    ids: bytes
    text: str
    borders: tuple[tuple[int, int], ...]
    logprobs: bytes = b""

    @property
    def count(self) -> int:
        """How many ids it has."""
        return count_of(self.ids)

    @property
    def end(self) -> int:
        """The position behind its last id."""
        return self.pos + self.count

    @property
    def size(self) -> int:
        """Bytes that it takes at most."""
        return len(self.ids) + 4 * len(self.text) + 8 * len(self.borders) + len(self.logprobs)


class JobView(Struct, frozen=True):
    """A job without its request and its output. `seq` is its number in the order of arrival.

    `gen` counts the generations of its output, `pos` the durable ids of this generation, in which
    `retried` has (pos, times) of its retries. `starts` counts how often it was given to a worker
    since its last durable id. `end` is what `Finish` stored, None while it waits. `end_seq` orders
    the ends of all jobs, 0 while it waits. `batch` and `line` say of which batch it is a line.
    `due`: not before this time. `notice` is `waiting` or `given_up` if that of its end was not
    delivered. `damaged` says what the disk has changed: `end` is None then, or `facts`, `ended`,
    `cause`, `attempts`, `charge` and `retried` are those of a job that nothing was noted of.
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
    """What went wrong with a job once: `cause` in words, `at` seconds since 1970.

    `stacks` are those of the threads of a worker that hung or crashed, "" if there are none.
    """

    number: int
    at: float
    cause: str
    stacks: str


class FedJob(Struct, frozen=True):
    """A job as it is given to a worker. `request` and `blobs` are those of `Submit`.

    `ids` are the packed durable ids, job.pos of them, without a gap. `deadline_left`: seconds.
    `damaged`: why it cannot be run, since the disk has changed its request; "" if it has not.
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

    `code`: `store_full` (the bound in bytes, or the disk), `over_quota` (of the owner),
    `store_busy` (the inbox is full), `store_closed` (the disk failed, or the broker ends),
    `store_error` (the operation itself could not be performed), `damaged` (the disk has changed
    what it asks for; sending it again does not help). `message` says it in a sentence. `value` and
    `bound` are the figures of a quota, 0 of others.
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
    """The key names a job or batch with another digest; `id` is that one's."""

    id: bytes


class KeyGone(Result, Struct, frozen=True):
    """The key named a job or batch that is deleted; it is free again at `until`."""

    id: bytes
    until: float
    scope: Scope | None = None  # whose job it was, of FetchPage


class UnknownName(Result, Struct, frozen=True):
    """There is no such job, batch or file, or not one of this scope.

    `created`: of a file that was deleted lately, when it was made.
    """

    created: float | None = None


class Fate(Result, Struct, frozen=True):
    """The operation does not fit what is stored, which is `job`; nothing was changed."""

    job: JobView


class Fed(Result, Struct, frozen=True):
    """Jobs to be run, in the order of the round over owners. Their `starts` is one higher.

    `last_owner` goes into the next `FeedNext`. `next_due` is when the earliest job that waits for
    a time is due; None if there is none, and if as many were fed as were asked for. `more`: others
    are due, and were not fed for the bounds.
    """

    jobs: tuple[FedJob, ...]
    last_owner: str
    next_due: float | None
    now: float
    more: bool = False


class Durable(Result, Struct, frozen=True):
    """The ids of a generation below `pos` are on disk: readers may have them."""

    id: bytes
    gen: int
    pos: int


class Changed(Result, Struct, frozen=True):
    """The operation was performed: this is the job now. Of an end, `job.end_seq` is set."""

    job: JobView


class Found(Result, Struct, frozen=True):
    """The job as it is."""

    job: JobView


class History(Result, Struct, frozen=True):
    """A job and what went wrong with it, the oldest first; at most MAX_FAILURES are kept."""

    job: JobView
    failures: tuple[Failure, ...]


class StoredRequest(Result, Struct, frozen=True):
    """What was submitted: `request` and `blobs` are those of `Submit`."""

    job: JobView
    request: bytes
    blobs: tuple[bytes, ...]


class Page(Result, Struct, frozen=True):
    """Output of a job from a step border on, in whole steps.

    `chunks` begin at or before the position asked for. `job.pos` says how far the output goes, and
    `job.state` whether it can go on. No chunks: there is nothing behind the position yet. `answer`:
    the blobs of the answer of an ended job, on the page that has its last id.
    """

    job: JobView
    chunks: tuple[Chunk, ...]
    answer: tuple[bytes, ...] = ()


class JobRestarted(Result, Struct, frozen=True):
    """The generation asked for is not the present one, which begins at 0."""

    job: JobView


class JobList(Result, Struct, frozen=True):
    """Jobs in order. `next` goes into the following operation's `after`; 0: these are the last."""

    jobs: tuple[JobView, ...]
    next: int


class Swept(Result, Struct, frozen=True):
    """What time has ended. `more`: at least as much is left, so sweep again at once.

    `next` is the earliest time at which a further sweep has something to do, None if none is known.
    """

    expired: tuple[JobView, ...]
    forgotten: int
    more: bool
    next: float | None


class Backlog(Result, Struct, frozen=True):
    """For each (model, priority) how many jobs wait or run, the earliest due time, most starts."""

    waiting: tuple[tuple[str, int, int, float, int], ...]
    now: float


class Notice(Result, Struct, frozen=True):
    """A job or a batch (`kind`) ended with `end_seq`, and `url` is to be told by posting `body`.

    `subject` is the id of the job or batch, `origin` the scheme, host and port of the URL. From
    `since` on it is tried; that counts no time in which there was no broker. `tries` were in vain,
    `cause` is why the last one failed. `given_up`: when that was the last one, None before.
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
    """Notices whose time has come; `next` is when the following one is due."""

    notices: tuple[Notice, ...]
    next: float | None
    now: float = 0.0


class Poisons(Result, Struct, frozen=True):
    """Digests of requests in quarantine, with the seconds that are left."""

    left: tuple[tuple[bytes, float], ...]


class Done(Result, Struct, frozen=True):
    """The operation was performed and has nothing to tell."""


# ---- operators -----------------------------------------------------------------------------------


class StoreFigures(Result, Struct, frozen=True):
    """What the store holds. `used` and `bound` are bytes; new jobs are refused above `admit`.

    `room`: bytes that new jobs may take, as the bound and the disk allow; 0: they are refused.
    `notices` were not delivered yet; `given_up` will not be tried again.
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
    """Where an export goes on: at the job `seq` or the first behind it.

    `part` 0: with the job itself; else with the blob `part` - 1 of its request and of its answer,
    those behind it and the output, of generation `gen`, from `pos` on.
    """

    seq: int = 0
    gen: int = 0
    part: int = 0
    pos: int = 0


class ExportedJob(Struct, frozen=True):
    """A job, or only further blobs and output of it if `request` is None.

    `blobs` of its request and of its `answer` are (place, data). `damaged` says what of it the disk
    has changed; that is left out.
    """

    job: JobView
    request: bytes | None
    blobs: tuple[tuple[int, bytes], ...]
    chunks: tuple[Chunk, ...]
    damaged: tuple[str, ...] = ()
    answer: tuple[tuple[int, bytes], ...] = ()


class Export(Result, Struct, frozen=True):
    """Jobs in order of `seq`. `next` goes into the following operation; None: these are the last.

    Of the last job the output may go on in the next one.
    """

    jobs: tuple[ExportedJob, ...]
    next: Cursor | None


class Verified(Result, Struct, frozen=True):
    """Jobs of `checked` were compared with their checksums: `damaged` are (job, what).

    `next` goes into the following operation's `after`; 0: these were the last.
    """

    checked: int
    bytes: int
    damaged: tuple[tuple[JobView, str], ...]
    next: int
