"""What can be asked of the store about files and batches; the results are in batch_records.py.

A batch is a stored file whose lines become jobs a thousand at a time, when there is room for them.
The store finds the lines; what is in them the broker reads. See operations.py for what all
operations have in common.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from mlxpool.broker.store.batch_records import MAX_LINE, BatchState, Outcomes, Place
from mlxpool.broker.store.operations import Operation, Submit
from mlxpool.broker.store.records import Name, Scope


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
