"""The store's operations on jobs: one frozen record for each write and each read.

Files and batches are in batch_operations.py, results in records.py. Each docstring names the
possible results of its operation; `Refused` is always possible. The result of a write comes only
after its commit. A write has changed nothing if its result is `Fate`, `UnknownName`,
`DuplicateKey`, `KeyGone` or `Refused`. Durations are in seconds; they begin at the present time of
the store's clock. `held` has the ids of the jobs that the broker runs: on disk these jobs are
waiting.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from mlxpool.broker.store.records import Chunk, Cursor, JobState, Name, Scope


class Operation:
    """Base of all operations.

    `urgent`: its commit is not delayed to gather more operations. `admits`: it adds new work; such
    operations are refused first when the inbox fills or the store nears its bound in bytes.
    `writes`: it can change the store. `frees`: it deletes data and concerns no running job; when
    the disk is full, such operations are performed before all other writes.
    """

    __slots__ = ()
    admits: ClassVar[bool] = False
    writes: ClassVar[bool] = True
    frees: ClassVar[bool] = False

    @property
    def urgent(self) -> bool:
        return True

    @property
    def size(self) -> int:
        """Bytes that the operation takes in memory while it waits, apart from a small constant."""
        return 0


# ---- the life of a job ---------------------------------------------------------------------------


class Submit(Operation, Struct, frozen=True):
    """Stores a job. Results: Submitted, DuplicateKey, KeyGone.

    `request`: the packed request, which the store does not read. `blobs`: the blobs of the request;
    a blob that several jobs have is stored once. A submission with the key and the digest of a
    stored job returns that job. The job waits for at least `delay` seconds, and until the time of
    day `not_before`. `deadline`: seconds from now, or None for no deadline. `keep`: seconds between
    the job's end and the deletion of its result; if it is None, the result is kept until it is
    released. `label`: for a line of a batch, the client's name of the line. `max_jobs`,
    `max_bytes`: bounds of the owner's stored jobs and bytes, or 0 for no bound.
    """

    admits: ClassVar[bool] = True
    id: bytes
    scope: Scope
    digest: bytes
    kind: str
    model: str
    request: bytes
    seed: int
    blobs: tuple[bytes, ...] = ()
    priority: int = 0
    delay: float = 0.0
    not_before: float = 0.0
    deadline: float | None = None
    keep: float | None = None
    notify: str = ""
    batch: bytes | None = None
    line: int = -1
    label: str = ""
    max_jobs: int = 0
    max_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.request) + sum(map(len, self.blobs))


class FeedNext(Operation, Struct, frozen=True):
    """Reads waiting jobs that are due, so that they run. Result: Fed.

    Owners take turns, with one job in each turn, in the order of their names. The first turn has
    the owner whose name follows `after_owner`. The earliest due job of an owner comes first. The
    read ends at `count` jobs, or at `max_bytes` of requests. It skips the jobs in `held`, all jobs
    of the owners in `but_owners`, and jobs with fewer than `min_starts` or at least `below_starts`
    starts. The same commit adds 1 to `starts` of each job that was read.
    """

    model: str
    priority: int
    count: int
    after_owner: str = ""
    held: frozenset[bytes] = frozenset()
    min_starts: int = 0
    below_starts: int = 1 << 30
    max_bytes: int = 64 * 1024 * 1024
    but_owners: frozenset[str] = frozenset()


class Progress(Operation, Struct, frozen=True):
    """Appends output to a running job. Results: Durable, Fate, UnknownName.

    The result is `Fate` if `chunk.pos` is not the number of stored ids. The operation with the
    first ids of a generation also has their `facts`. The job's `starts` becomes 0.
    """

    id: bytes
    gen: int
    chunk: Chunk
    facts: bytes | None = None

    @property
    def urgent(self) -> bool:
        return False

    @property
    def size(self) -> int:
        return self.chunk.size


class Finish(Operation, Struct, frozen=True):
    """Ends a waiting or running job, with its last output. Results: Changed, Fate, UnknownName.

    `state` is one of `ENDED`. `end` is the packed terminal message, of at most MAX_END bytes.
    `answer`: the blobs of a call's answer, of at most MAX_ANSWER bytes together. A job with
    `notify` gets a notice of its end. If there is a `cause`, it is kept as a failure of the job,
    with a worker's thread `stacks`. `attempts` is the number of consecutive failed attempts, this
    one included; None keeps the stored number. `patient`: the operation is not urgent.
    """

    id: bytes
    gen: int
    state: JobState
    end: bytes
    cause: str = ""
    chunk: Chunk | None = None
    facts: bytes | None = None
    stacks: str = ""
    attempts: int | None = None
    answer: tuple[bytes, ...] = ()
    patient: bool = False

    @property
    def urgent(self) -> bool:
        return not self.patient

    @property
    def size(self) -> int:
        output = 0 if self.chunk is None else self.chunk.size
        return len(self.end) + output + sum(map(len, self.answer))


class Defer(Operation, Struct, frozen=True):
    """Lets a running job wait again; it is due in `delay` seconds.

    Results: Changed, Fate, UnknownName. `attempts` and `charge` replace the stored values; `starts`
    too, unless it is None. If there is a `cause`, it is kept as a failure of the job, with a
    worker's thread `stacks`.
    """

    id: bytes
    gen: int
    delay: float
    attempts: int
    charge: float
    starts: int | None = None
    cause: str = ""
    stacks: str = ""


class SetBack(Operation, Struct, frozen=True):
    """Stores the loss of a job's worker; the job continues. Results: Done, Fate, UnknownName.

    `charge` replaces the stored value, so that a restart of the broker keeps it. `cause` is kept as
    a failure of the job, with the worker's thread `stacks`.
    """

    id: bytes
    gen: int
    charge: float
    cause: str
    stacks: str = ""

    @property
    def size(self) -> int:
        return len(self.stacks)


class NewGeneration(Operation, Struct, frozen=True):
    """Restarts the output of a job at position 0, as generation `gen` + 1.

    Results: Changed, Fate, UnknownName. The broker does this if the worker's model has a digest
    that differs from the digest with which the output began. The stored ids and facts are deleted.
    """

    id: bytes
    gen: int


class Cancel(Operation, Struct, frozen=True):
    """Ends a waiting or running job as `cancelled`. Results: Changed, Fate, UnknownName."""

    name: Name
    end: bytes = b""
    cause: str = ""


class Retry(Operation, Struct, frozen=True):
    """Lets a dead or expired job wait again. Results: Changed, Fate, UnknownName.

    Its attempts, starts and charge become 0 and its quarantine ends. `new_generation`: the output
    restarts at position 0. `deadline`: seconds from now, or None for no deadline.
    """

    name: Name
    new_generation: bool = False
    deadline: float | None = None


class Release(Operation, Struct, frozen=True):
    """Deletes the result of an ended job, which becomes `gone`.

    Results: Changed, Fate, UnknownName.
    """

    frees: ClassVar[bool] = True
    name: Name


class Sweep(Operation, Struct, frozen=True):
    """Expires and deletes jobs, files and batches whose time is over. Result: Swept.

    Waiting jobs expire after their deadline. Jobs in `held` do not, because the broker itself ends
    the jobs that it runs. Ended jobs become gone at their time `forget`; gone jobs are deleted
    `key_life` seconds later. One sweep expires at most `count` jobs, and lets at most `count` jobs
    become gone or be deleted. `expired_end` is the packed terminal message of expired jobs.
    """

    frees: ClassVar[bool] = True
    held: frozenset[bytes] = frozenset()
    count: int = 200
    expired_end: bytes = b""


# ---- reading jobs --------------------------------------------------------------------------------


class ReadJob(Operation, Struct, frozen=True):
    """Reads the view of a job. Results: Found, UnknownName."""

    writes: ClassVar[bool] = False
    name: Name


class ReadHistory(Operation, Struct, frozen=True):
    """Reads the view of a job, and its failures. Results: History, UnknownName."""

    writes: ClassVar[bool] = False
    name: Name


class ReadRequest(Operation, Struct, frozen=True):
    """Reads the submission of a job. Results: StoredRequest, KeyGone, UnknownName."""

    writes: ClassVar[bool] = False
    id: bytes


class FetchPage(Operation, Struct, frozen=True):
    """Reads a page of a job's output. Results: Page, JobRestarted, KeyGone, UnknownName.

    Output or an end that does not match its checksum is refused as `damaged`.

    The page begins at `pos`, rounded down to the start of a decode step. If `gen` is given and is
    not the present generation, the result is JobRestarted. The page has at most `max_bytes`, but at
    least one step.
    """

    writes: ClassVar[bool] = False
    name: Name
    pos: int = 0
    gen: int | None = None
    max_bytes: int = 64 * 1024


class ListJobs(Operation, Struct, frozen=True):
    """Lists jobs in order of arrival. Result: JobList, whose `next` is a `seq`.

    The list begins after the job with the number `after`. `reverse`: the newest jobs come first,
    and the list begins before the job `after`, or with the newest job if `after` is 0. `owner`,
    `tenant` and `model` select jobs; None, or "" for `model`, selects all. `states` selects jobs in
    these states; if it is empty, jobs in all states but gone. `batch` selects the jobs of that
    batch; None selects the jobs without a batch.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    tenant: str | None = None
    states: tuple[JobState, ...] = ()
    after: int = 0
    count: int = 100
    batch: bytes | None = None
    reverse: bool = False
    model: str = ""


class ListEnded(Operation, Struct, frozen=True):
    """Lists ended jobs after the end number `after`. Result: JobList, whose `next` is an `end_seq`.

    End numbers rise in the order of the commits, so every later end has a higher number. Jobs whose
    result was deleted are listed as `gone`, until their key is deleted.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    tenant: str | None = None
    after: int = 0
    count: int = 100


class ReadBacklog(Operation, Struct, frozen=True):
    """Reads the models with waiting jobs. Result: Backlog."""

    writes: ClassVar[bool] = False


# ---- poison and notices --------------------------------------------------------------------------


class SetPoison(Operation, Struct, frozen=True):
    """Quarantines a request's digest for `life` seconds; 0 ends the quarantine. Result: Done."""

    digest: bytes
    life: float


class ReadPoisons(Operation, Struct, frozen=True):
    """Reads all digests in quarantine, when the broker starts. Result: Poisons."""

    writes: ClassVar[bool] = False


class OriginLoad(Struct, frozen=True):
    """An origin, the number of its notices under way, and how many more may be posted now."""

    origin: str
    under_way: int
    room: int


class ReadNotices(Operation, Struct, frozen=True):
    """Reads due notices that are not given up and not in `held`. Result: Notices.

    `held` has the numbers of the notices under way. At most `count` notices are read. At most
    `per_origin` are read of an origin; for an origin in `loads`, its `room` is the bound instead.
    Origins take turns, so no origin waits for older notices of other origins. The first is the
    origin with the fewest notices under way, among equals the origin with the earliest due notice.
    """

    writes: ClassVar[bool] = False
    count: int = 64
    held: frozenset[int] = frozenset()
    per_origin: int = 64
    loads: tuple[OriginLoad, ...] = ()


class ListNotices(Operation, Struct, frozen=True):
    """Lists undelivered and given-up notices in the order of `end_seq`. Result: Notices.

    `after` is the `end_seq` after which the list begins. If `owner` is None, notices of all owners
    are listed.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    after: int = 0
    count: int = 100


class NoticeSent(Operation, Struct, frozen=True):
    """Deletes a delivered notice. Result: Done."""

    frees: ClassVar[bool] = True
    end_seq: int


class NoticeFailed(Operation, Struct, frozen=True):
    """Stores a failed attempt to post a notice. Result: Done.

    The next attempt follows in `delay` seconds; if `delay` is None, the notice is given up.
    `unreachable`: the origin, if no connection to it could be made, else "". Each such failure also
    gives up some notices of this origin that are older than `give_up_after` seconds, without an
    attempt to post them.
    """

    end_seq: int
    delay: float | None
    cause: str = ""
    unreachable: str = ""
    give_up_after: float = 0.0


# ---- operators -----------------------------------------------------------------------------------


class ReadFigures(Operation, Struct, frozen=True):
    """Reads the figures of the store. Result: StoreFigures."""

    writes: ClassVar[bool] = False


class ExportJobs(Operation, Struct, frozen=True):
    """Reads jobs with all their stored parts from `cursor` on, for a backup. Result: Export.

    A page has only a part of a job with more than `max_bytes` of output.
    """

    writes: ClassVar[bool] = False
    cursor: Cursor = Cursor()  # may be shared: a Cursor is frozen
    count: int = 100
    max_bytes: int = 1024 * 1024
    states: tuple[JobState, ...] = ()


class VerifyJobs(Operation, Struct, frozen=True):
    """Compares jobs after the number `after` with their checksums. Result: Verified.

    The operation reads at most `count` jobs and `max_bytes` bytes, but at least one job.
    """

    writes: ClassVar[bool] = False
    after: int = 0
    count: int = 200
    max_bytes: int = 8 * 1024 * 1024
