"""Lines of batches become jobs: some at a time, so that neither memory nor the store's thread is
held up by a large file.

One portion of lines is under way at a time, of one batch after another: it is read from the store,
checked in slices of which each is short beside a turn of the broker's loop, and stored as jobs in
one commit. A line that cannot become a job is a failed line; nothing else is disturbed by it.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

from msgspec import Struct, field

from mlxpool.broker.jobs.batches.batch_rows import BatchSettings, failure_text
from mlxpool.broker.jobs.canonical import DIGEST_BYTES, job_digest
from mlxpool.broker.store.batch_operations import AddLines
from mlxpool.broker.store.batch_records import BatchView, Lines
from mlxpool.broker.store.operations import Submit
from mlxpool.broker.store.records import Scope
from mlxpool.common.errors import DeadlineExceeded, PoolError
from mlxpool.common.protocol.frames import EXACT_BITS
from mlxpool.common.protocol.kept.batch_lines import BadLine, Line, parse_line
from mlxpool.common.protocol.kept.job_work import Work, seed_of

AHEAD = 1024  # jobs of a batch that wait or run, from which on no further lines become jobs
PORTION_LINES = 128  # that one commit makes jobs of: about 10 ms of the store's thread
SLICE_LINES = 16  # that are checked in one turn of the broker's loop
SLICE_BYTES = 64 * 1024  # the same; a longer line is a slice by itself


class Check(Protocol):
    """Whether a request may become a job, see PoolView.check."""

    def __call__(self, owner: str, work: Work, digest: bytes, now: float) -> None: ...


class Portion(Struct, eq=False):
    """Lines on their way from the file into jobs. `at` of them are checked."""

    lines: Lines
    settings: BatchSettings
    max_jobs: int
    at: int = 0
    jobs: list[Submit] = field(default_factory=list)
    failed: list[tuple[int, str, str]] = field(default_factory=list)
    expired: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def batch(self) -> BatchView:
        return self.lines.batch

    def check_slice(self, check: Check, now: float) -> bool:
        """Check some lines; whether that were the last.

        Raises the PoolError of a check that can succeed later: then the lines stay in the file.
        """
        size = 0
        for number, _, data in self.lines.lines[self.at : self.at + SLICE_LINES]:
            size += len(data)
            if size > SLICE_BYTES and size > len(data):
                break
            self._take(number, data, check, now)
            self.at += 1
        return self.at >= len(self.lines.lines)

    def _take(self, number: int, data: bytes, check: Check, now: float) -> None:
        label = ""
        try:
            line = parse_line(data, self.settings.defaults)
            label = line.label
            left = self.lines.deadline_left
            if left is not None and left <= 0:
                late = DeadlineExceeded("the batch was not finished before its deadline")
                self.expired.append((number, label, failure_text(late)))
                return
            self.jobs.append(self._job(number, line, check, now))
        except BadLine as bad:
            self.failed.append((number, bad.label, failure_text(bad.error)))
        except PoolError as error:
            if error.retryable:
                raise
            self.failed.append((number, label, failure_text(error)))

    def _job(self, number: int, line: Line, check: Check, now: float) -> Submit:
        batch, work = self.batch, line.submit.work
        scope = batch.scope
        digest = job_digest(work)
        check(scope.owner, work, digest, now)
        return Submit(
            line_id(batch.id, number),
            Scope(scope.owner, scope.tenant, line_key(batch.id, number)),
            digest,
            work.kind,
            work.model,
            line.packed,
            seed_of(work, line_seed(batch.id, number)),
            line.blobs,
            self.settings.priority,
            deadline=self.lines.deadline_left,
            batch=batch.id,
            line=number,
            label=line.label,
            max_jobs=self.max_jobs,
        )

    def operation(self) -> AddLines:
        """What stores the jobs, once all lines are checked."""
        found = self.lines
        return AddLines(
            self.batch.id,
            self.batch.next_line,
            found.next_line,
            found.end,
            found.last,
            tuple(self.jobs),
            tuple(self.failed),
            tuple(self.expired),
        )


def line_key(batch: bytes, number: int) -> str:
    """The key of the job of a line."""
    return f"{batch.hex()}/{number}"


def line_id(batch: bytes, number: int) -> bytes:
    """The id of the job of a line: the same whenever the line is read."""
    return hashlib.sha256(b"line %d of " % number + batch).digest()[:DIGEST_BYTES]


def line_seed(batch: bytes, number: int) -> int:
    """The seed of a line that names none: the id of a batch is drawn, so this is."""
    drawn = hashlib.sha256(b"seed of line %d of " % number + batch).digest()
    return int.from_bytes(drawn[:8], "big") >> (64 - EXACT_BITS)


class FeedPause(Struct, eq=False):
    """When more lines of a batch may become jobs, and what keeps them from it."""

    pause_until: float = 0.0  # the pool, or the store, did not take the last ones
    trouble: str = ""  # why; "": nothing is wrong

    def due(self, batch: BatchView) -> float:
        """The time from which lines of the batch can become jobs; infinity: not in this state."""
        hungry = batch.state.value == "open" and batch.waiting < AHEAD
        return self.pause_until if hungry else math.inf
