"""What can be asked of the store about jobs: one frozen record for each write and each read.

Files and batches are in batch_operations.py. The results are in records.py; each docstring names
those that its operation can have, and any operation can also be `Refused`. A write is told only
after the commit that holds it, and changes nothing if its result is `Fate`, `UnknownName`,
`DuplicateKey`, `KeyGone` or `Refused`. Ages are seconds; the store adds them to its own clock.
`held` are the ids of the jobs that the broker runs: on disk they wait.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from mlxpool.broker.store.records import Chunk, Cursor, JobState, Name, Scope


class Operation:
    """Base of all operations.

    `urgent`: a commit is not delayed to gather more. `admits`: it brings new work, so that it is
    refused first when the inbox fills or the bound in bytes comes near. `writes`: it can change
    what is stored. `frees`: it deletes, concerns no job that runs, and so goes before others when
    the disk is full.
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
        """Bytes that it holds in memory while it waits, beside a small constant."""
        return 0


# ---- the life of a job ---------------------------------------------------------------------------


class Submit(Operation, Struct, frozen=True):
    """Store a job. Results: Submitted, DuplicateKey, KeyGone.

    `request` is the packed request, which the store does not read, and `blobs` are those of its
    message: equal blobs of all jobs are stored once. `digest` says what makes two sendings the same
    job. `delay`: not fed before so many seconds, `not_before` not before this time of day.
    `deadline`: seconds from now, None for no deadline. `keep`: seconds for which the result is kept
    after the end, None until it is released. `label` is the client's name of a line of a batch.
    `max_jobs` and `max_bytes` are what the owner may have stored in all, 0 for no bound.
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
    """Take jobs that wait and are due, to be run. Result: Fed.

    One job of each owner in turn, owners in the order of their names from the first behind
    `after_owner`, until `count` jobs are found or `max_bytes` of requests; of one owner the
    earliest due first. Jobs in `held` and those of `but_owners` are passed over, and those whose
    `starts` is below `min_starts` or from `below_starts` on. `starts` is raised before the result
    is told.
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
    """Append output to a job that runs. Results: Durable, Fate, UnknownName.

    `chunk.pos` is the number of ids that are stored, or there is a gap and the result is `Fate`.
    `facts` come with the first ids of a generation. `starts` becomes 0.
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
    """End a job that waits or runs, with its last output. Results: Changed, Fate, UnknownName.

    `state` is one of `ENDED`. `end` is the packed terminal, of at most MAX_END bytes, `answer` the
    blobs of one that has an answer, of at most MAX_ANSWER bytes together. A job with `notify` gets
    a notice. A `cause` is kept as a failure of the job, with `stacks` of a worker. `attempts` are
    those that have failed in a row, with the last; None: as before. `patient`: it is not urgent.
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
    """Put a job that ran back: it waits and is due in `delay` seconds. Results as of Finish.

    `attempts` and `charge` replace those that are stored; `starts` too, unless None. A `cause` is
    kept as a failure of the job, with `stacks` of a worker.
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
    """A worker that ran the job was lost; the job goes on. Results: Done, Fate, UnknownName.

    `charge` replaces the one that is stored, so that it outlives the broker. `cause` is kept as a
    failure of the job, with the `stacks` of the worker.
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
    """Begin the output of a job anew, as generation `gen` + 1 at 0. Results as of Finish.

    For a worker whose model has another digest: the ids so far are deleted, its facts too.
    """

    id: bytes
    gen: int


class Cancel(Operation, Struct, frozen=True):
    """End a job that waits or runs as `cancelled`. Results: Changed, Fate, UnknownName."""

    name: Name
    end: bytes = b""
    cause: str = ""


class Retry(Operation, Struct, frozen=True):
    """Let a dead or expired job wait again. Results: Changed, Fate, UnknownName.

    Its attempts, starts and charge become 0 and its quarantine ends. `new_generation`: the output
    begins anew. `deadline`: seconds from now, None for none.
    """

    name: Name
    new_generation: bool = False
    deadline: float | None = None


class Release(Operation, Struct, frozen=True):
    """Delete the result of an ended job; its key is `gone`. Results: Changed, Fate, UnknownName."""

    frees: ClassVar[bool] = True
    name: Name


class Sweep(Operation, Struct, frozen=True):
    """Do what time asks for, at most `count` jobs of each sort. Result: Swept.

    Waiting jobs past their deadline expire, unless they are `held`: the broker ends those itself.
    Ended jobs past `forget` are gone, gone ones past `key_life` are deleted, and so are files and
    batches past their time. `expired_end` is the packed terminal of those that expire.
    """

    frees: ClassVar[bool] = True
    held: frozenset[bytes] = frozenset()
    count: int = 200
    expired_end: bytes = b""


# ---- reading jobs --------------------------------------------------------------------------------


class ReadJob(Operation, Struct, frozen=True):
    """Look a job up. Results: Found, UnknownName."""

    writes: ClassVar[bool] = False
    name: Name


class ReadHistory(Operation, Struct, frozen=True):
    """Look a job up, with what went wrong with it. Results: History, UnknownName."""

    writes: ClassVar[bool] = False
    name: Name


class ReadRequest(Operation, Struct, frozen=True):
    """Read what was submitted. Results: StoredRequest, KeyGone, UnknownName."""

    writes: ClassVar[bool] = False
    id: bytes


class FetchPage(Operation, Struct, frozen=True):
    """Read output. Results: Page, JobRestarted, KeyGone, UnknownName.

    Output that does not match its checksum is refused as `damaged`, and so is the end of a job.

    `pos` is rounded down to a border of steps. `gen` None is the present generation; another than
    that is JobRestarted. The page has at least one step, and else at most `max_bytes`.
    """

    writes: ClassVar[bool] = False
    name: Name
    pos: int = 0
    gen: int | None = None
    max_bytes: int = 64 * 1024


class ListJobs(Operation, Struct, frozen=True):
    """Jobs in order of arrival behind the number `after`. Result: JobList of seqs.

    `owner` and `tenant` None: of all. `states` empty: of all but gone ones. `model` "": of all.
    `reverse`: the newest first, those before `after` (0: from the newest). `batch`: the lines of
    that batch; without it they are left out.
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
    """The durable feed: ended jobs behind the end number `after`. Result: JobList of end_seqs.

    The numbers rise in the order of the commits, so that nothing appears later below one that was
    read. Jobs whose result was deleted are there as `gone`, until their key is forgotten.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    tenant: str | None = None
    after: int = 0
    count: int = 100


class ReadBacklog(Operation, Struct, frozen=True):
    """Which models have jobs that wait. Result: Backlog."""

    writes: ClassVar[bool] = False


# ---- poison and notices --------------------------------------------------------------------------


class SetPoison(Operation, Struct, frozen=True):
    """Keep a digest in quarantine for `life` seconds; 0 ends it. Result: Done."""

    digest: bytes
    life: float


class ReadPoisons(Operation, Struct, frozen=True):
    """The quarantine, at boot. Result: Poisons."""

    writes: ClassVar[bool] = False


class OriginLoad(Struct, frozen=True):
    """How many notices to an origin are under way, and for how many more it has room."""

    origin: str
    under_way: int
    room: int


class ReadNotices(Operation, Struct, frozen=True):
    """Notices that are due and not given up; those of `held` are under way. Result: Notices.

    At most `count` come, and of one origin `per_origin`, or as many as it has room for in `loads`.
    Origins take turns: first those with the fewest under way, of these the one whose notice is due
    for longest. So none has to wait for the older notices of others.
    """

    writes: ClassVar[bool] = False
    count: int = 64
    held: frozenset[int] = frozenset()
    per_origin: int = 64
    loads: tuple[OriginLoad, ...] = ()


class ListNotices(Operation, Struct, frozen=True):
    """Notices that were not taken yet, or were given up, by `end_seq`. Result: Notices.

    `owner` None: of all.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    after: int = 0
    count: int = 100


class NoticeSent(Operation, Struct, frozen=True):
    """A notice was taken: it is deleted. Result: Done."""

    frees: ClassVar[bool] = True
    end_seq: int


class NoticeFailed(Operation, Struct, frozen=True):
    """A notice is tried again in `delay` seconds; None: it is given up. Result: Done.

    `unreachable`: an origin that cannot be reached at all. With it those of its notices are given
    up that were to be tried for `give_up_after` seconds, some at a time: they need no try each.
    """

    end_seq: int
    delay: float | None
    cause: str = ""
    unreachable: str = ""
    give_up_after: float = 0.0


# ---- operators -----------------------------------------------------------------------------------


class ReadFigures(Operation, Struct, frozen=True):
    """What the store holds. Result: StoreFigures."""

    writes: ClassVar[bool] = False


class ExportJobs(Operation, Struct, frozen=True):
    """Jobs with all that is stored of them, from `cursor` on, for a copy. Result: Export.

    Of a job whose output has more than `max_bytes` a page has only a part.
    """

    writes: ClassVar[bool] = False
    cursor: Cursor = Cursor()  # frozen
    count: int = 100
    max_bytes: int = 1024 * 1024
    states: tuple[JobState, ...] = ()


class VerifyJobs(Operation, Struct, frozen=True):
    """Compare jobs behind the number `after` with their checksums. Result: Verified.

    At most `count` jobs, and so many that `max_bytes` are read, or one.
    """

    writes: ClassVar[bool] = False
    after: int = 0
    count: int = 200
    max_bytes: int = 8 * 1024 * 1024
