"""What the store answers about files and batches."""

from __future__ import annotations

from enum import IntFlag, StrEnum

from msgspec import Struct

from mlxpool.broker.store.records import JobState, JobView, Result, Scope

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
