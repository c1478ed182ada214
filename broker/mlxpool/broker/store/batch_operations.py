"""The store's operations on files and batches, and their results.

A batch is a stored file whose lines become jobs, a thousand at a time, when there is room for them.
The store finds the lines; the broker reads their contents. operations.py describes the properties
that all operations share.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import ClassVar

from msgspec import Struct

from mlxpool.broker.store.operations import Operation, Submit
from mlxpool.broker.store.records import JobState, JobView, Name, Result, Scope

MAX_LINE = 8 * 1024 * 1024  # most bytes of a line of a batch
MAX_OUTPUT = 2 * 1024 * 1024  # most bytes of a job's output and end in a page of outcomes

Place = tuple[float, bytes]  # position in a list: time of an entry's creation, and its id


class FileView(Result, Struct, frozen=True):
    """A stored file. A file is `complete` once its end is known; then it never changes."""

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
    """The bytes sent for offset `start` differ from the stored bytes; nothing was changed."""

    file: FileView
    start: int


class FileList(Result, Struct, frozen=True):
    """Files in the requested order. `more`: further files follow."""

    files: tuple[FileView, ...]
    more: bool = False


class FilePart(Result, Struct, frozen=True):
    """Bytes of a file from `start` on; empty after the end of the file."""

    file: FileView
    start: int
    data: bytes


class Outcomes(IntFlag):
    """Flags for the results of a batch: DONE for done lines, OTHERS for all other lines."""

    NONE = 0
    DONE = 1
    OTHERS = 2


class BatchState(StrEnum):
    """The states of a batch. BatchView.counts shows whether its jobs have all ended."""

    OPEN = "open"  # some lines are not jobs yet
    FED = "fed"  # every line is a job or a failed line
    ENDED = "ended"
    CANCELLED = "cancelled"
    GONE = "gone"  # the results are deleted; the key is kept until `key_life` has passed


class BatchView(Result, Struct, frozen=True):
    """A batch. `next_line` is the number, from 0, of the first line that has not become a job yet.

    `next_start` is the offset of that line in the file, which has `file_size` bytes. `counts` has
    the number of jobs in each state. The expired jobs include the lines whose deadline passed
    before they became jobs. `failed` is the number of lines that could not become jobs. `defaults`
    has the settings from `SubmitBatch`, which the store does not read.
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
    end_seq: int = 0  # number of the batch's end in the order of all ends; 0 before the end
    notice: str = ""  # "waiting" or "given_up" if the notice of the end was not delivered
    deleted: Outcomes = Outcomes.NONE  # the results that were deleted before their expiry

    @property
    def live(self) -> bool:
        """True while some lines of the batch are not jobs yet, or some of its jobs wait or run."""
        states = (BatchState.OPEN, BatchState.FED, BatchState.CANCELLED)
        return self.ended is None and self.state in states

    @property
    def waiting(self) -> int:
        """The number of jobs of the batch that wait or run."""
        return dict(self.counts).get(JobState.WAITING, 0)


class BatchSubmitted(Result, Struct, frozen=True):
    """The batch is durable. `new` is false if an equal batch was already stored."""

    batch: BatchView
    new: bool


class BatchList(Result, Struct, frozen=True):
    """Batches, the newest first. `more`: further batches follow."""

    batches: tuple[BatchView, ...]
    more: bool = False

    @property
    def next(self) -> Place | None:
        """The value of `behind` in the next ListBatches; None after the last batches."""
        return (self.batches[-1].created, self.batches[-1].id) if self.more else None


class BatchChanged(Result, Struct, frozen=True):
    """The present view of a batch, and the jobs of the batch that the operation changed."""

    batch: BatchView
    jobs: tuple[JobView, ...]


class Lines(Result, Struct, frozen=True):
    """The next lines of a batch, without their line ends: (number, offset in the file, bytes).

    `end` is the offset of the line after the last of these lines. `last`: the file ends at `end`.
    Empty lines are left out, but have numbers. Of a line longer than MAX_LINE only the first
    MAX_LINE + 1 bytes are returned. `deadline_left`: the seconds until the batch's deadline.
    """

    batch: BatchView
    lines: tuple[tuple[int, int, bytes], ...]
    next_line: int
    end: int
    last: bool
    deadline_left: float | None


class LineOutcome(Struct, frozen=True):
    """The outcome of a line: a job, or a cause of failure.

    An ended job has its text and ids, or the blobs of its answer. If the job's output is damaged,
    or exceeds the bound of a page, `whole` is false and the outcome has no output.
    """

    line: int
    label: str
    cause: str
    job: JobView | None
    text: str = ""
    ids: bytes = b""
    logprobs: tuple[bytes, ...] = ()  # packed lists of log-probabilities
    whole: bool = True
    answer: tuple[bytes, ...] = ()


class LineOutcomes(Result, Struct, frozen=True):
    """Outcomes in the order of lines.

    `next` is the `after` of the next read; -1 after the last line.
    """

    outcomes: tuple[LineOutcome, ...]
    next: int


class CreateFile(Operation, Struct, frozen=True):
    """Begins a file with its first part. Results: FileView, FileDiffers.

    If the file exists, the part is appended as by AppendFile. `keep`: seconds from now until the
    file is deleted; if it is None, only DeleteFile deletes it. `max_bytes`: the bound on the total
    size of the owner's files, or 0 for no bound.
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
    """Appends `data` at `start`, the present size. Results: FileView, FileDiffers, UnknownName.

    Bytes that the file already has are compared and skipped, so a part may be sent again, also to a
    complete file. If `start` is after the end, nothing is changed, and the FileView has the present
    size. `last`: this part completes the file. `max_bytes`: the bound on the total size of the
    owner's files, or 0 for no bound. Above it the part is refused (`over_quota`). `keep`: seconds
    from the file's creation to its deletion; if it is None, the value of the first part stays.
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
    """Reads bytes of a file. Results: FilePart, UnknownName."""

    writes: ClassVar[bool] = False
    id: bytes
    owner: str | None
    tenant: str | None
    start: int = 0
    max_bytes: int = 1024 * 1024


class ListFiles(Operation, Struct, frozen=True):
    """Lists files of a tenant, the newest or the oldest first. Result: FileList.

    If `purpose` is "", files of all purposes are listed. `behind` is the time and id of a file: the
    list begins after this file, even if the file was deleted.
    """

    writes: ClassVar[bool] = False
    owner: str
    tenant: str
    count: int = 1000
    purpose: str = ""
    behind: Place | None = None
    oldest_first: bool = False


class DeleteFile(Operation, Struct, frozen=True):
    """Deletes a file. Results: FileView, UnknownName; Refused while a batch needs it.

    An open batch needs its file. A batch that a gateway made needs its file as long as the batch
    has results.
    """

    frees: ClassVar[bool] = True
    id: bytes
    owner: str
    tenant: str


class SubmitBatch(Operation, Struct, frozen=True):
    """Stores a batch that consists of the lines of the file `file`.

    Results: BatchSubmitted, DuplicateKey, KeyGone; FileView if the file is not complete;
    UnknownName if the file does not exist.

    A job of the owner may have the same key as the batch. `defaults` has settings that only the
    broker reads. `deadline`: seconds from now. `keep`: seconds between the batch's end and the
    deletion of its results. `max_live`: the most live batches that the owner may have, including
    this batch.
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
    """Reads the next lines of a batch that are not jobs yet. Results: Lines, UnknownName."""

    writes: ClassVar[bool] = False
    batch: bytes
    count: int = 1000
    max_bytes: int = MAX_LINE


class AddLines(Operation, Struct, frozen=True):
    """Makes jobs of lines in one transaction. Results: BatchView, UnknownName.

    If `first_line` is not the batch's `next_line`, another operation has added these lines, and
    nothing is changed. The view always has the present `next_line`.

    `next_line`, `end` and `last` have the values that `Lines` had. Each job of `jobs` has `batch`
    and `line`. `failed` has (line, label, cause) for each invalid line. `expired` has (line, label,
    cause) for each line that expires, because the batch's deadline has passed. If the key of a
    line's job is already used, the line becomes a failed line.
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
    """Reads a batch and the counts of its jobs. Results: BatchView, UnknownName."""

    writes: ClassVar[bool] = False
    name: Name


class ListBatches(Operation, Struct, frozen=True):
    """Lists batches, the newest first. Result: BatchList.

    If `states` is empty, batches in all states are listed; if `owner` is None, batches of all
    owners. `live`: only batches that have not ended. `behind` is the time and id of a batch: the
    list begins after this batch.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    tenant: str | None = None
    states: tuple[BatchState, ...] = ()
    count: int = 100
    live: bool = False
    behind: Place | None = None


class CancelBatch(Operation, Struct, frozen=True):
    """Makes no further jobs of a batch, and cancels at most `count` of its waiting jobs.

    Results: BatchChanged with the cancelled jobs, UnknownName. The caller repeats the operation
    while the batch has waiting jobs.
    """

    name: Name
    count: int = 1000
    end: bytes = b""


class RetryBatch(Operation, Struct, frozen=True):
    """Lets at most `count` dead or expired jobs of a batch wait again.

    Results: BatchChanged with these jobs, UnknownName. An ended batch becomes live again. A
    cancelled or gone batch is not changed.
    """

    name: Name
    count: int = 1000


class ReleaseBatch(Operation, Struct, frozen=True):
    """Deletes the results of an ended batch before their expiry. Results: BatchView, UnknownName.

    The `forget` time of the batch becomes the present time. Each of the next sweeps then deletes
    some of its jobs. A batch that has not ended is not changed.
    """

    frees: ClassVar[bool] = True
    name: Name


class ReleaseOutcomes(Operation, Struct, frozen=True):
    """Deletes some results of an ended batch before their expiry.

    Results: BatchChanged, UnknownName. At most `count` jobs, which BatchChanged lists, lose their
    results. The caller repeats the operation until BatchChanged lists fewer jobs. The batch and its
    counts stay. From the first commit on, `deleted` of the view names the kinds of results that are
    being deleted. If the batch has no results left, a file of lines that a gateway wrote for it is
    no longer kept. A batch that has not ended, or is gone, is not changed.
    """

    frees: ClassVar[bool] = True
    name: Name
    outcomes: Outcomes
    count: int = 1000


class EndBatch(Operation, Struct, frozen=True):
    """Ends a batch that has no waiting jobs, and is cancelled or has no unprocessed lines.

    Results: BatchView, UnknownName. Any other batch is not changed. The results are deleted `keep`
    seconds after the end; SubmitBatch has set `keep`. A batch with `notify` gets a notice of its
    end, which names `output_file` and `error_file`.
    """

    batch: bytes
    output_file: str = ""
    error_file: str = ""


class ReadOutcomes(Operation, Struct, frozen=True):
    """Reads the outcomes of the lines after `after`. Results: LineOutcomes, UnknownName.

    Waiting jobs, and jobs with more than MAX_OUTPUT bytes, come without output.
    """

    writes: ClassVar[bool] = False
    name: Name
    after: int = -1
    count: int = 200
    max_bytes: int = 1024 * 1024
