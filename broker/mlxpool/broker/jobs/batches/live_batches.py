"""Live batches: their lines become jobs, watchers get their progress, and they end.

The store counts the jobs. This module keeps the latest view of each batch. It reads the view again
after the end of a job of the batch, at most ten times a second.

Lines become jobs in portions, so that a large file neither fills memory nor blocks the store's
thread. One portion is under way at a time; batches take turns. A portion is read from the store,
checked in slices that take little of the broker's loop, and stored as jobs in one commit. A line
that cannot become a job is a failed line; the other lines still become jobs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct, field

from mlxpool.broker.jobs import answers
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Outbox
from mlxpool.broker.jobs.active import ActiveJob
from mlxpool.broker.jobs.answers import packed_end
from mlxpool.broker.jobs.batches.batch_rows import BatchSettings, batch_row, failure_text, mark_of
from mlxpool.broker.jobs.canonical import DIGEST_BYTES, job_digest
from mlxpool.broker.jobs.feeding import Feeder
from mlxpool.broker.store.batch_operations import (
    AddLines,
    BatchChanged,
    BatchList,
    BatchState,
    BatchView,
    CancelBatch,
    EndBatch,
    Lines,
    ListBatches,
    Place,
    ReadBatch,
    ReadLines,
)
from mlxpool.broker.store.operations import Operation, Submit
from mlxpool.broker.store.records import JobView, Refused, Result, Scope
from mlxpool.common.errors import DeadlineExceeded, OverQuota, PoolError, StoreUnavailable
from mlxpool.common.protocol.frames import EXACT_BITS
from mlxpool.common.protocol.kept.batch_lines import BadLine, Line, parse_line
from mlxpool.common.protocol.kept.batch_messages import BatchRow
from mlxpool.common.protocol.kept.job_work import Work, seed_of
from mlxpool.common.protocol.to_client import Done

AHEAD = 1024  # at this number of a batch's waiting and running jobs, no further line becomes a job
PORTION_LINES = 128  # most lines in one commit: about 10 ms of the store's thread
SLICE_LINES = 16  # most lines that one iteration of the broker's loop checks
SLICE_BYTES = 64 * 1024  # most bytes of these lines; a longer line is a slice by itself


class Check(Protocol):
    """The check whether a request may become a job, see PoolView.check."""

    def __call__(self, owner: str, work: Work, digest: bytes, now: float) -> None: ...


class Portion(Struct, eq=False):
    """Lines that become jobs together. The first `at` of them are already checked."""

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
        """Checks the next lines of the portion. Returns whether all lines are checked.

        Raises PoolError if the check of a line fails now but may succeed later. The lines then stay
        in the file.
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
        """Returns the operation that stores the jobs, once all lines are checked."""
        lines = self.lines
        return AddLines(
            self.batch.id,
            self.batch.next_line,
            lines.next_line,
            lines.end,
            lines.last,
            tuple(self.jobs),
            tuple(self.failed),
            tuple(self.expired),
        )


def line_key(batch: bytes, number: int) -> str:
    """Returns the key of the job that a line becomes."""
    return f"{batch.hex()}/{number}"


def line_id(batch: bytes, number: int) -> bytes:
    """Returns the id of the job that a line becomes; each reading of the line gives the same id."""
    return hashlib.sha256(b"line %d of " % number + batch).digest()[:DIGEST_BYTES]


def line_seed(batch: bytes, number: int) -> int:
    """Returns the seed for a line without a `seed`, derived from the random id of the batch."""
    drawn = hashlib.sha256(b"seed of line %d of " % number + batch).digest()
    return int.from_bytes(drawn[:8], "big") >> (64 - EXACT_BITS)


class FeedPause(Struct, eq=False):
    """The pause before more lines of a batch become jobs, and its cause."""

    pause_until: float = 0.0  # the time from which lines may become jobs again after a refusal
    trouble: str = ""  # the cause; "": no pause

    def due(self, batch: BatchView) -> float:
        """Returns the time from which more lines can become jobs; infinity if none can now.

        Lines can become jobs while the batch is open and has fewer than AHEAD unfinished jobs.
        """
        hungry = batch.state.value == "open" and batch.waiting < AHEAD
        return self.pause_until if hungry else math.inf


READ_INTERVAL = 0.1  # least seconds between two reads of the counts of a batch
RETRY_INTERVAL = 1.0  # seconds until a retry after a refusal by the store or the pool
PAGE = 100  # most batches per read when the store opens
MAX_WATCHERS = 64  # most watchers of one batch
CANCELLED_END = packed_end(Done("cancelled"))


class Watcher(Struct, frozen=True):
    """A client that waits until the progress of a batch (`mark_of`) differs from `seen`.

    `until`: the time at which the client gets an answer in any case.
    """

    question: ev.QuestionAsked
    seen: str
    until: float


class LiveBatch(Struct, eq=False):
    """A batch that has not ended. `busy`: an operation on the batch, not on a job, is under way."""

    view: BatchView
    feed_pause: FeedPause = field(default_factory=FeedPause)
    busy: bool = False
    stale: bool = False  # the counts of `view` are outdated
    read_at: float = 0.0  # time of the next read of the view, if `stale`
    watchers: dict[tuple[int, bytes], Watcher] = field(default_factory=dict)


class Batches:
    """Makes jobs of the lines of batches, reports progress, and ends batches.

    Owns every LiveBatch, and the one portion of lines that is under way.
    """

    def __init__(
        self,
        outbox: Outbox,
        feeder: Feeder,
        check: Check,
        active: Mapping[bytes, ActiveJob],
        on_cancelled: Callable[[JobView, float], None],
        on_ended: Callable[[BatchView, float], None],
        quota_jobs: Callable[[], int],
    ) -> None:
        """`on_cancelled` gets the jobs that ended with their batch; some may still run.

        `on_ended` gets each batch that has ended, after the commit of its end.
        """
        self.live: dict[bytes, LiveBatch] = {}
        self._outbox = outbox
        self._feeder = feeder
        self._check = check
        self._active = active
        self._on_cancelled = on_cancelled
        self._on_ended = on_ended
        self._quota_jobs = quota_jobs
        self._portion: Portion | None = None
        self._reading: bytes = b""  # the batch whose lines are read, or stored
        self._last = b""  # the batch that had a portion most recently
        self._find_at = math.inf  # when `find` is tried again

    # ---- the store opens and is lost -------------------------------------------------------------

    def find(self, behind: Place | None = None) -> None:
        """Asks the store for the batches that have not ended. Called once the store was opened.

        The store answers in pages. `behind`: the last batch of the previous page; None for the
        first page.
        """
        self._find_at = math.inf
        operation = ListBatches(live=True, count=PAGE, behind=behind)

        def then(result: Result, now: float) -> None:
            if isinstance(result, BatchList):
                for view in result.batches:
                    self.see(view, now)
                if result.more:
                    self.find(result.next)
            else:
                self._find_at = now + RETRY_INTERVAL

        self._outbox.store(operation, then)

    def lost(self) -> None:
        """Answers every watcher with StoreUnavailable: the store of jobs has failed."""
        error = StoreUnavailable("the store of jobs does not take anything now; try again")
        for batch in self.live.values():
            for watcher in batch.watchers.values():
                self._fail(watcher.question, error)
        self.live.clear()
        self._portion, self._reading = None, b""
        self._find_at = math.inf

    def end_all(self, error: PoolError) -> None:
        """Answers every watcher with `error`."""
        for batch in self.live.values():
            for watcher in batch.watchers.values():
                self._fail(watcher.question, error)
            batch.watchers.clear()

    # ---- views -----------------------------------------------------------------------------------

    def see(self, view: BatchView, now: float) -> None:
        """Updates a live batch from a view that the store has returned.

        Then answers the watchers. If the batch is cancelled, cancels more of its jobs. If it is not
        open and all its jobs have ended, ends the batch.
        """
        batch = self.live.get(view.id)
        if batch is None:
            if not view.live:
                return
            batch = self.live[view.id] = LiveBatch(view)
        batch.view, batch.stale = view, False
        self._tell_watchers(batch, now)
        if not view.live:
            del self.live[view.id]
            self._on_ended(view, now)
        elif not batch.busy and view.state is BatchState.CANCELLED and view.waiting:
            self._cancel_more(batch)
        elif not batch.busy and view.state is not BatchState.OPEN and not view.waiting:
            settings = BatchSettings.unpacked(view.defaults)
            self._ask(batch, EndBatch(view.id, settings.output_file, settings.error_file))

    def touched(self, id: bytes, now: float) -> None:
        """Schedules a new read of a batch's counts, because a job of the batch has changed."""
        batch = self.live.get(id)
        if batch is None:
            self._outbox.store(ReadBatch(id), self._seen)
        elif not batch.stale:
            batch.stale, batch.read_at = True, max(now, batch.read_at)

    def _seen(self, result: Result, now: float) -> None:
        if isinstance(result, BatchView):
            self.see(result, now)

    def row(self, view: BatchView) -> BatchRow:
        """Returns the map of the batch for its clients."""
        running = sum(job.job.batch == view.id for job in self._active.values())
        batch = self.live.get(view.id)
        return BatchRow(batch_row(view, running, "" if batch is None else batch.feed_pause.trouble))

    def _ask(self, batch: LiveBatch, operation: Operation) -> None:
        """Gives the store an operation whose result is the new view of the batch."""
        batch.busy = True

        def then(result: Result, now: float) -> None:
            batch.busy = False
            batch.read_at = now + READ_INTERVAL
            if isinstance(result, BatchChanged):
                self.changed(result, now)
            elif isinstance(result, BatchView):
                self.see(result, now)
            elif isinstance(result, Refused):
                batch.stale, batch.read_at = True, now + RETRY_INTERVAL
            else:
                self.live.pop(batch.view.id, None)

        self._outbox.store(operation, then)

    def changed(self, result: BatchChanged, now: float) -> None:
        """Handles a result of the store: several jobs of a batch were cancelled or wait again."""
        for job in result.jobs:
            if job.ended is None:
                self._feeder.came((job.model, job.priority), now, job.scope.owner)
            else:
                self._on_cancelled(job, now)
        self.see(result.batch, now)

    def _cancel_more(self, batch: LiveBatch) -> None:
        self._ask(batch, CancelBatch(batch.view.id, end=CANCELLED_END))

    # ---- watchers --------------------------------------------------------------------------------

    def watch(self, view: BatchView, watcher: Watcher, now: float) -> None:
        """Answers once the progress (`mark_of`) is not `watcher.seen`, or at `watcher.until`."""
        question = watcher.question
        batch = self.live.get(view.id)
        if batch is None or watcher.seen != mark_of(view) or watcher.until <= now:
            self._answer(watcher, view)
            return
        key = (question.link, question.id)
        if key not in batch.watchers and len(batch.watchers) >= MAX_WATCHERS:
            why = f"{MAX_WATCHERS} clients wait for the progress of this batch, which is the most"
            self._fail(question, OverQuota(why, retry_after_ms=5000))
            return
        batch.watchers[key] = watcher

    def _tell_watchers(self, batch: LiveBatch, now: float) -> None:
        mark = mark_of(batch.view)
        for key, watcher in list(batch.watchers.items()):
            if watcher.seen != mark or watcher.until <= now or not batch.view.live:
                del batch.watchers[key]
                self._answer(watcher, batch.view)

    def _answer(self, watcher: Watcher, view: BatchView) -> None:
        question = watcher.question
        self._outbox.send(question.link, self.row(view), question.id, question.attempt)

    def _fail(self, question: ev.QuestionAsked, error: PoolError) -> None:
        self._outbox.refuse(question, error)

    # ---- work ------------------------------------------------------------------------------------

    def next_wake(self) -> float:
        """Returns the latest time for the next `work`; a time in the past if work is due."""
        if self._portion is not None:
            return 0.0
        times = [self._find_at]
        for batch in self.live.values():
            if batch.stale and not batch.busy:
                times.append(batch.read_at)
            if not self._reading:
                times.append(batch.feed_pause.due(batch.view))
            times += (watcher.until for watcher in batch.watchers.values())
        return min(times)

    def work(self, now: float) -> None:
        """Does the due work: reads the views and lines of batches, and answers watchers."""
        if now >= self._find_at:
            self.find()
        for batch in list(self.live.values()):
            if batch.stale and not batch.busy and now >= batch.read_at:
                self._ask(batch, ReadBatch(batch.view.id))
            if any(watcher.until <= now for watcher in batch.watchers.values()):
                self._tell_watchers(batch, now)
        if self._portion is not None:
            self._check_slice(self._portion, now)
        elif not self._reading:
            self._read_lines(now)

    def _read_lines(self, now: float) -> None:
        """Starts to read a portion of lines of the batch whose turn it is."""
        hungry = [id for id, batch in self.live.items() if batch.feed_pause.due(batch.view) <= now]
        if not hungry:
            return
        turn = sorted(hungry)
        self._reading = self._last = next((id for id in turn if id > self._last), turn[0])
        self._outbox.store(ReadLines(self._reading, PORTION_LINES), self._lines_read)

    def _lines_read(self, result: Result, now: float) -> None:
        batch = self.live.get(self._reading)
        if batch is None or not isinstance(result, Lines):
            self._give_up(batch, result, now)
        elif result.batch.state is not BatchState.OPEN:
            self._reading = b""
            self.see(result.batch, now)
        else:
            settings = BatchSettings.unpacked(result.batch.defaults)
            self._portion = Portion(result, settings, self._quota_jobs())

    def _check_slice(self, portion: Portion, now: float) -> None:
        batch = self.live.get(portion.batch.id)
        try:
            complete = portion.check_slice(self._check, now)
        except PoolError as error:
            self._portion = None
            self._pause(batch, error.message, now)
            return
        if complete:
            self._portion = None
            operation = portion.operation()
            self._outbox.store(operation, lambda result, now: self._added(operation, result, now))

    def _added(self, operation: AddLines, result: Result, now: float) -> None:
        batch = self.live.get(operation.batch)
        if batch is None or not isinstance(result, BatchView):
            self._give_up(batch, result, now)
            return
        self._reading = b""
        batch.feed_pause.trouble = ""
        for group in {(job.model, job.priority) for job in operation.jobs}:
            self._feeder.came(group, now, batch.view.scope.owner)
        self.see(result, now)

    def _give_up(self, batch: LiveBatch | None, result: Result, now: float) -> None:
        """Abandons a portion that the store refused: its lines stay in the file."""
        if isinstance(result, Refused):
            self._pause(batch, answers.store_error(result).message, now)
        else:
            self._reading = b""

    def _pause(self, batch: LiveBatch | None, why: str, now: float) -> None:
        self._reading = b""
        if batch is not None:
            batch.feed_pause.pause_until, batch.feed_pause.trouble = now + RETRY_INTERVAL, why
