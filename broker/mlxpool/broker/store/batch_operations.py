"""The store's operations on files and batches, and their results.

A batch is a stored file whose lines become jobs a thousand at a time, when there is room for them.
The store finds the lines; the broker reads their contents. operations.py describes the properties
that all operations share.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import ClassVar

from msgspec import Struct

from mlxpool.broker.store.operations import Operation, Submit
from mlxpool.broker.store.records import JobState, JobView, Name, Result, Scope

MAX_LINE = 8 * 1024 * 1024  # bytes of a line of a batch
MAX_OUTPUT = 2 * 1024 * 1024  # bytes of a job's output and end in a page of outcomes

Place = tuple[float, bytes]  # the place of an entry in a list: time of its creation, id


class FileView(Result, Struct, frozen=True):
    """A stored file. It is `complete` once its end is known, and then never changes."""

    id: bytes
    owner: str
    tenant: str
    key: str
    name: str
    purpose: str
    size: int
    complete: bool
    created: float
    forget: float | None


class FileDiffers(Result, Struct, frozen=True):
    """The part for `start` differs from the bytes that the file has there; nothing was changed."""

    file: FileView
    start: int


class FileList(Result, Struct, frozen=True):
    """Files in the requested order; `more`: others follow them."""

    files: tuple[FileView, ...]
    more: bool = False


class FilePart(Result, Struct, frozen=True):
    """Bytes of a file from `start` on; none after its end."""

    file: FileView
    start: int
    data: bytes


class Outcomes(IntFlag):
    """A choice of a batch's results: those of done lines, and all others."""

    NONE = 0
    DONE = 1
    OTHERS = 2


class BatchState(StrEnum):
    """The states of a batch. BatchView.counts shows whether its jobs have all ended."""

    OPEN = "open"  # some lines have not become jobs yet
    FED = "fed"  # every line is a job or a failed line
    ENDED = "ended"
    CANCELLED = "cancelled"
    GONE = "gone"  # the key is remembered until `key_life` has passed


class BatchView(Result, Struct, frozen=True):
    """A batch. `next_line` is the number, from 0, of the first line that has not become a job yet.

    `next_start` is the offset of that line in the file, which has `file_size` bytes. `counts` has
    the number of jobs in each state. It counts lines that the deadline cut off before they were
    jobs as expired. `failed` is the number of lines that could not become jobs. `defaults` comes
    from `SubmitBatch`: the store does not read it.
    """

    id: bytes
    scope: Scope
    file: bytes
    file_size: int
    digest: bytes
    defaults: bytes
    state: BatchState
    next_line: int
    next_start: int
    failed: int
    counts: tuple[tuple[JobState, int], ...]
    created: float
    ended: float | None
    deadline: float | None
    keep: float | None
    notify: str
    forget: float | None = None
    end_seq: int = 0  # the number of its end among the ends of all jobs and batches; 0 before
    notice: str = ""  # "waiting" or "given_up" if the notice of its end was not delivered
    deleted: Outcomes = Outcomes.NONE  # the results that were deleted before their time

    @property
    def live(self) -> bool:
        """True while some of its lines are still to become jobs, or wait, or run."""
        states = (BatchState.OPEN, BatchState.FED, BatchState.CANCELLED)
        return self.ended is None and self.state in states

    @property
    def waiting(self) -> int:
        """The number of jobs of the batch that wait or run."""
        return dict(self.counts).get(JobState.WAITING, 0)


class BatchSubmitted(Result, Struct, frozen=True):
    """The batch is durable. `new` is false if the same batch was there before."""

    batch: BatchView
    new: bool


class BatchList(Result, Struct, frozen=True):
    """Batches, the newest first; `more`: others follow them."""

    batches: tuple[BatchView, ...]
    more: bool = False

    @property
    def next(self) -> Place | None:
        """The `behind` of the next ListBatches; None: these are the last."""
        return (self.batches[-1].created, self.batches[-1].id) if self.more else None


class BatchChanged(Result, Struct, frozen=True):
    """The batch as it is now, and those of its jobs that the operation has changed."""

    batch: BatchView
    jobs: tuple[JobView, ...]


class Lines(Result, Struct, frozen=True):
    """The next lines of a batch, without their line ends: (number, offset in the file, bytes).

    `end` is the offset of the line after the last of them. `last`: the file ends there. Empty lines
    are counted and left out. A line over MAX_LINE is cut to MAX_LINE + 1 bytes. `deadline_left`:
    seconds until the deadline of the batch.
    """

    batch: BatchView
    lines: tuple[tuple[int, int, bytes], ...]
    next_line: int
    end: int
    last: bool
    deadline_left: float | None


class LineOutcome(Struct, frozen=True):
    """The outcome of a line: a job, or a cause of failure.

    An ended job has its text and ids, or the blobs of its answer. `whole` is false for a job with
    more output than a page may have; then the outcome has no output.
    """

    line: int
    label: str
    cause: str
    job: JobView | None
    text: str = ""
    ids: bytes = b""
    logprobs: tuple[bytes, ...] = ()  # packed lists
    whole: bool = True
    answer: tuple[bytes, ...] = ()


class LineOutcomes(Result, Struct, frozen=True):
    """Outcomes in the order of lines. `next` goes into the following `after`; -1: the last."""

    outcomes: tuple[LineOutcome, ...]
    next: int


class CreateFile(Operation, Struct, frozen=True):
    """Begin a file with its first part. Results: FileView, FileDiffers.

    If the file exists, it stays, and AppendFile's rules hold for the part. `keep`: seconds from now
    until the file is deleted; None: only DeleteFile deletes it. `max_bytes`: see AppendFile.
    """

    admits: ClassVar[bool] = True
    id: bytes
    owner: str
    tenant: str
    key: str
    name: str
    purpose: str
    keep: float | None = None
    data: bytes = b""
    last: bool = False
    max_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.data)


class AppendFile(Operation, Struct, frozen=True):
    """Append `data` at `start`, the present size. Results: FileView, FileDiffers, UnknownName.

    Bytes that the file already has are compared and skipped, so a part may be sent again, also to a
    complete file. A start after the end changes nothing; the view has the size. `last`: the file is
    complete. `max_bytes`: the bound on the files of the owner together, 0: no bound; above it
    nothing is appended (`over_quota`). `keep`: seconds since the file was created until it is
    deleted; None: as its first part has it.
    """

    admits: ClassVar[bool] = True
    id: bytes
    owner: str
    tenant: str
    start: int
    data: bytes
    last: bool = False
    max_bytes: int = 0
    keep: float | None = None

    @property
    def size(self) -> int:
        return len(self.data)


class ReadFile(Operation, Struct, frozen=True):
    """Read bytes of a file. Results: FilePart, UnknownName."""

    writes: ClassVar[bool] = False
    id: bytes
    owner: str | None
    tenant: str | None
    start: int = 0
    max_bytes: int = 1024 * 1024


class ListFiles(Operation, Struct, frozen=True):
    """List files of a tenant, the newest or the oldest first. Result: FileList.

    `purpose` "": files of all purposes. `behind`: only files that follow the one with this time and
    id, which may have been deleted.
    """

    writes: ClassVar[bool] = False
    owner: str
    tenant: str
    count: int = 1000
    purpose: str = ""
    behind: Place | None = None
    oldest_first: bool = False


class DeleteFile(Operation, Struct, frozen=True):
    """Delete a file. Results: FileView, UnknownName; Refused while a batch needs it.

    An open batch needs its file. A batch that a gateway made needs its lines as long as it has
    results.
    """

    frees: ClassVar[bool] = True
    id: bytes
    owner: str
    tenant: str


class SubmitBatch(Operation, Struct, frozen=True):
    """Store a batch of a complete file. Results: BatchSubmitted, DuplicateKey, KeyGone.

    The result is FileView if the file is not complete, and UnknownName if it does not exist.

    `defaults` is for the broker, which reads the lines. A batch and a job may have the same key.
    `max_live`: the most live batches of the owner, this one included.
    """

    admits: ClassVar[bool] = True
    id: bytes
    scope: Scope
    digest: bytes
    file: bytes
    defaults: bytes = b""
    deadline: float | None = None
    keep: float | None = None
    notify: str = ""
    max_live: int = 1 << 30


class ReadLines(Operation, Struct, frozen=True):
    """Read the next lines of a batch that have not become jobs. Results: Lines, UnknownName."""

    writes: ClassVar[bool] = False
    batch: bytes
    count: int = 1000
    max_bytes: int = MAX_LINE


class AddLines(Operation, Struct, frozen=True):
    """Make jobs of lines, in one transaction. Results: BatchView, UnknownName.

    Changes nothing if `first_line` is not the batch's `next_line`, because another call has added
    these lines. The view has the present `next_line` in either case.

    `next_line`, `end` and `last` have the values that `Lines` had. Each of `jobs` has its `batch`
    and `line`. `failed` and `expired` have (line, label, cause) of lines that become no job: of
    invalid lines, and of lines after the batch's deadline, which count as expired jobs. A job
    whose key is taken becomes a failed line.
    """

    admits: ClassVar[bool] = True
    batch: bytes
    first_line: int
    next_line: int
    end: int
    last: bool
    jobs: tuple[Submit, ...] = ()
    failed: tuple[tuple[int, str, str], ...] = ()
    expired: tuple[tuple[int, str, str], ...] = ()

    @property
    def size(self) -> int:
        return sum(job.size for job in self.jobs)


class ReadBatch(Operation, Struct, frozen=True):
    """Look a batch up, with counts. Results: BatchView, UnknownName."""

    writes: ClassVar[bool] = False
    name: Name


class ListBatches(Operation, Struct, frozen=True):
    """List batches, the newest first. Result: BatchList.

    `states` empty: batches in all states. `owner` None: batches of all owners. `live`: only batches
    that have not ended. `behind`: only batches that follow the one with this time and id.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    tenant: str | None = None
    states: tuple[BatchState, ...] = ()
    count: int = 100
    live: bool = False
    behind: Place | None = None


class CancelBatch(Operation, Struct, frozen=True):
    """Make no further jobs of a batch, and cancel at most `count` of its waiting jobs.

    Results: BatchChanged with those jobs, UnknownName. Repeat it while the batch has waiting jobs.
    """

    name: Name
    count: int = 1000
    end: bytes = b""


class RetryBatch(Operation, Struct, frozen=True):
    """Let at most `count` dead or expired jobs of a batch wait again. Results as of CancelBatch.

    An ended batch becomes live again. A cancelled or gone batch is not changed.
    """

    name: Name
    count: int = 1000


class ReleaseBatch(Operation, Struct, frozen=True):
    """Delete the results of an ended batch before their time. Results: BatchView, UnknownName.

    It sets `forget` of the batch to now, and the next sweeps delete some jobs at a time. A batch
    that has not ended stays as it is.
    """

    frees: ClassVar[bool] = True
    name: Name


class ReleaseOutcomes(Operation, Struct, frozen=True):
    """Delete some results of an ended batch before their time. Results: BatchChanged, UnknownName.

    At most `count` jobs lose their results. The result has these jobs: repeat it until there are
    fewer than `count`. The batch and its counts stay. From the first commit on, `deleted` of the
    view has the outcomes that are deleted. When the last results are deleted, so are the lines that
    a gateway wrote. A batch that has not ended, or is gone, stays as it is.
    """

    frees: ClassVar[bool] = True
    name: Name
    outcomes: Outcomes
    count: int = 1000


class EndBatch(Operation, Struct, frozen=True):
    """End a fed or cancelled batch without waiting jobs. Results: BatchView, UnknownName.

    Any other batch stays as it is; its view shows that. `keep` counts from the end. A batch with
    `notify` gets a notice, which names these two files of its results.
    """

    batch: bytes
    output_file: str = ""
    error_file: str = ""


class ReadOutcomes(Operation, Struct, frozen=True):
    """Read the outcomes of the lines after `after`. Results: LineOutcomes, UnknownName.

    Waiting jobs come without their output, and so do jobs with more than MAX_OUTPUT bytes.
    """

    writes: ClassVar[bool] = False
    name: Name
    after: int = -1
    count: int = 200
    max_bytes: int = 1024 * 1024
