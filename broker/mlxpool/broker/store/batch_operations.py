"""What can be asked of the store about files and batches, and what it answers.

A batch is a stored file whose lines become jobs a thousand at a time, when there is room for them.
The store finds the lines; what is in them the broker reads. See operations.py for what all
operations have in common.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import ClassVar

from msgspec import Struct

from mlxpool.broker.store.operations import Operation, Submit
from mlxpool.broker.store.records import JobState, JobView, Name, Result, Scope

MAX_LINE = 8 * 1024 * 1024  # bytes of a line of a batch
MAX_OUTPUT = 2 * 1024 * 1024  # bytes of a job's output and end in a page of outcomes

Place = tuple[float, bytes]  # in a list of files or batches: when one was created, and its id


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
    """What was to be appended at `start` is not what the file has there; nothing was changed."""

    file: FileView
    start: int


class FileList(Result, Struct, frozen=True):
    """Files in the order that was asked for; `more`: others follow them."""

    files: tuple[FileView, ...]
    more: bool = False


class FilePart(Result, Struct, frozen=True):
    """Bytes of a file from `start` on; none behind its end."""

    file: FileView
    start: int
    data: bytes


class Outcomes(IntFlag):
    """Which results of a batch: those of lines that are done, and all others."""

    NONE = 0
    DONE = 1
    OTHERS = 2


class BatchState(StrEnum):
    """The states of a batch. Whether its jobs have all ended is counted, see BatchView.counts."""

    OPEN = "open"  # lines are left that are no jobs yet
    FED = "fed"  # every line is a job or a failed line
    ENDED = "ended"
    CANCELLED = "cancelled"
    GONE = "gone"  # the key is remembered until `key_life` has passed


class BatchView(Result, Struct, frozen=True):
    """A batch. `next_line` is the number, from 0, of the first line that is no job yet.

    `next_start` is where that line begins in the file, which has `file_size` bytes. `counts` has
    the number of its jobs in each state, where lines that its deadline cut off before they were
    jobs are expired, and `failed` the number of lines that could not become jobs.
    `defaults` is what `SubmitBatch` was given: the store does not read it.
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
    end_seq: int = 0  # of its end among the ends of all jobs and batches, 0 before
    notice: str = ""  # waiting or given_up: the notice of its end was not delivered
    deleted: Outcomes = Outcomes.NONE  # of its results before their time

    @property
    def live(self) -> bool:
        """Whether lines of it are still to become jobs, or wait, or run."""
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
        """The `behind` of the following question; None: these are the last."""
        return (self.batches[-1].created, self.batches[-1].id) if self.more else None


class BatchChanged(Result, Struct, frozen=True):
    """The batch as it is now, and those of its jobs that the operation has changed."""

    batch: BatchView
    jobs: tuple[JobView, ...]


class Lines(Result, Struct, frozen=True):
    """The next lines of a batch, without their line ends. (number, where it begins, bytes).

    `end` is where the line behind the last of them begins. `last`: the file ends there. Empty lines
    are counted and left out. Of a line over MAX_LINE there are MAX_LINE + 1 bytes. `deadline_left`:
    seconds until the deadline of the batch.
    """

    batch: BatchView
    lines: tuple[tuple[int, int, bytes], ...]
    next_line: int
    end: int
    last: bool
    deadline_left: float | None


class LineOutcome(Struct, frozen=True):
    """What became of a line: a job, or a cause of failure.

    An ended job has its text and ids, or the blobs of its answer.

    `whole` is false for a job with more output than a page may have; then it comes without.
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

    One that is there already stays; the part is then appended as AppendFile does. `keep`: seconds
    from now, None until it is deleted. `max_bytes`: see AppendFile.
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

    Bytes that are there already are compared and skipped, so a part may be sent again, also to a
    complete file; a start behind the size changes nothing, and the view says the size. `last`: the
    file is complete. `max_bytes`: what the files of the owner may have in all, 0: no bound; above
    it nothing is appended (`over_quota`). `keep`: seconds from the file's first part on, None: as
    that has said.
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
    """Bytes of a file. Results: FilePart, UnknownName."""

    writes: ClassVar[bool] = False
    id: bytes
    owner: str | None
    tenant: str | None
    start: int = 0
    max_bytes: int = 1024 * 1024


class ListFiles(Operation, Struct, frozen=True):
    """Files of a tenant, the newest first or the oldest. Result: FileList.

    `purpose` "": of all. `behind`: those that follow the file with this time and id, which need not
    be there any more.
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

    An open batch needs its file, and one made by a gateway the lines as long as it has results.
    """

    frees: ClassVar[bool] = True
    id: bytes
    owner: str
    tenant: str


class SubmitBatch(Operation, Struct, frozen=True):
    """Store a batch of a complete file. Results: BatchSubmitted, DuplicateKey, KeyGone.

    Of a file that is not complete FileView, of one that is not there UnknownName.

    `defaults` is for the broker, which reads the lines. Keys of batches and of jobs are apart.
    `max_live`: how many batches of the owner may be live with it.
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
    """The next lines of a batch that are no jobs yet. Results: Lines, UnknownName."""

    writes: ClassVar[bool] = False
    batch: bytes
    count: int = 1000
    max_bytes: int = MAX_LINE


class AddLines(Operation, Struct, frozen=True):
    """Make jobs of lines, in one transaction. Results: BatchView, UnknownName.

    `first_line` is the batch's `next_line`, or another call was first: nothing is changed, and the
    view says where the batch is. `next_line`, `end` and `last` are those of `Lines`. `jobs` have
    `batch` and `line`; `failed` and `expired` are (line, label, cause). A job whose key is taken
    becomes a failed line. `expired` lines were cut off by the deadline of the batch: they count as
    its expired jobs do.
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
    """Batches, the newest first. Result: BatchList. `states` empty: all. `owner` None: of all.

    `live`: those that have not ended. `behind`: those that follow the batch with this time and id.
    """

    writes: ClassVar[bool] = False
    owner: str | None = None
    tenant: str | None = None
    states: tuple[BatchState, ...] = ()
    count: int = 100
    live: bool = False
    behind: Place | None = None


class CancelBatch(Operation, Struct, frozen=True):
    """No line becomes a job any more, and at most `count` waiting jobs are cancelled.

    Results: BatchChanged with those jobs, UnknownName. Repeat it while the batch has waiting ones.
    """

    name: Name
    count: int = 1000
    end: bytes = b""


class RetryBatch(Operation, Struct, frozen=True):
    """At most `count` dead or expired jobs of a batch wait again. Results as of CancelBatch.

    A batch that had ended has not any more. Nothing is changed of a cancelled or a gone one.
    """

    name: Name
    count: int = 1000


class ReleaseBatch(Operation, Struct, frozen=True):
    """Delete the results of an ended batch before their time. Results: BatchView, UnknownName.

    Sweeps do it, some jobs at a time; `forget` of the view is in the past then. One that has not
    ended stays as it is.
    """

    frees: ClassVar[bool] = True
    name: Name


class ReleaseOutcomes(Operation, Struct, frozen=True):
    """Delete some results of an ended batch before their time. Results: BatchChanged, UnknownName.

    At most `count` jobs lose theirs, which are those of the result: repeat it while there are as
    many. The batch stays, and so do its counts; `deleted` of the view says from the first commit on
    which results it has no more. With the last results go the lines that a gateway has written.
    One that has not ended, or is gone, stays as it is.
    """

    frees: ClassVar[bool] = True
    name: Name
    outcomes: Outcomes
    count: int = 1000


class EndBatch(Operation, Struct, frozen=True):
    """A fed or cancelled batch without waiting jobs has ended. Results: BatchView, UnknownName.

    Another batch stays as it is, and the view says so. From its end on `keep` counts for it. One
    with `notify` gets a notice, which names the files of its results as they are given here.
    """

    batch: bytes
    output_file: str = ""
    error_file: str = ""


class ReadOutcomes(Operation, Struct, frozen=True):
    """What became of the lines behind `after`. Results: LineOutcomes, UnknownName.

    Jobs that wait come without their output, and so do those with more than MAX_OUTPUT bytes.
    """

    writes: ClassVar[bool] = False
    name: Name
    after: int = -1
    count: int = 200
    max_bytes: int = 1024 * 1024
