"""The job manager: a durable client of the core, inside the broker.

`handle(event, now)` and `stored(operation, result, now)` return actions. Pure: no I/O, no clock, no
random number. To the core a running job is a request with one reader, whose acknowledgements are
the commits of the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mlxpool.broker.core.events import Quarantine
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Action, Outbox
from mlxpool.broker.jobs.active import ActiveJob
from mlxpool.broker.jobs.answers import packed_end
from mlxpool.broker.jobs.batches.batch_questions import BatchQuestions
from mlxpool.broker.jobs.batches.file_questions import FileQuestions
from mlxpool.broker.jobs.batches.live_batches import Batches
from mlxpool.broker.jobs.feeding import AnswerRoom, Feeder
from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.jobs.notices import NoticeQueue
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.jobs.pool_view import PoolView
from mlxpool.broker.jobs.questions import Questions
from mlxpool.broker.jobs.readers import Readers
from mlxpool.broker.jobs.retries import ALONE_STARTS
from mlxpool.broker.jobs.runs import Runs
from mlxpool.broker.store import operations as store
from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import (
    Backlog,
    Changed,
    Fate,
    Fed,
    JobView,
    Poisons,
    Result,
    StoreFigures,
    Submitted,
    Swept,
)
from mlxpool.common.errors import DeadlineExceeded, Draining, PoolError, StoreUnavailable
from mlxpool.common.protocol.kept import batch_messages, file_messages, job_operations
from mlxpool.common.protocol.kept.job_messages import Fetch
from mlxpool.common.protocol.kept.kept_questions import Question
from mlxpool.common.protocol.to_client import Failed

POLL_INTERVAL = 0.1  # seconds between two checks for free slots, while jobs are due
PLACE_DELAY = 0.01  # seconds from the end of a run until its worker reports the free slot
SWEEP_INTERVAL = 1.0  # seconds between two sweeps of missed deadlines and expired results
READER_INTERVAL = 1.0  # seconds between two checks for slow or absent readers
FIGURES_INTERVAL = 2.0  # seconds between two counts of the stored jobs, if no job changed
RECOUNT_DELAY = 0.1  # seconds between two counts, if a job changed
RECOUNT_COST = 20  # least interval of counts, as a multiple of a count's own time
BACKLOG_RETRY = 1.0  # seconds until a refused ReadBacklog is tried again
BROKER_RETRY_MS = 1000  # `retry_after_ms` of readings that end because the broker ends


class JobManager:
    """Builds the components and routes each event to its handler."""

    def __init__(self, boot: int, view: PoolView, policy: Callable[[], JobPolicy]) -> None:
        """`policy` returns the present settings."""
        active: dict[bytes, ActiveJob] = {}
        self._view = view
        self._outbox = outbox = Outbox(boot)
        answer_room = AnswerRoom()
        self._feeder = Feeder(answer_room)
        self.readers = Readers(
            outbox, active, on_begun=lambda id, now: self.runs.reader_came(id, now)
        )
        self.notices = notices = NoticeQueue(outbox, lambda: policy().notify_for)
        self.runs = Runs(outbox, view, self._feeder, answer_room, self.readers, notices, active)
        self.questions = Questions(
            outbox, view, self._feeder, self.runs, self.readers, notices, policy
        )
        self.batches = Batches(
            outbox,
            self._feeder,
            view.check,
            active,
            self._on_batch_cancelled,
            lambda batch, now: notices.came(batch.notify, now),
            lambda: policy().quota_jobs,
        )
        self._batch_questions = BatchQuestions(outbox, self.batches, policy)
        self._file_questions = FileQuestions(outbox, policy)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.QuestionAsked: self._on_asked,
            ev.Acknowledged: self._on_acknowledged,
            ev.ReaderLeft: self._on_reader_left,
            ev.Output: self.runs.on_output,
            ev.RunEnded: self._on_run_ended,
            ev.SetBack: self.runs.on_set_back,
            ev.Posted: self.notices.on_posted,
            ev.StoreOpened: self._on_store_opened,
            ev.StoreLost: self._on_store_lost,
            ev.Closing: self._on_closing,
            ev.Wake: self._on_wake,
        }
        self._stored = StoreFigures((), 0, 0, 0, 0, 0)
        self._running = 0  # number of running jobs at the last count
        self._count_began = self._recount_at = 0.0
        self._open = False
        self._sweeping = self._counting = False
        self._sweep_at = self._figures_at = self._readers_at = self._poll_at = math.inf
        self._backlog_at = math.inf  # time of the next ReadBacklog

    @property
    def busy(self) -> bool:
        """Returns whether any job runs, or has an outcome that is not on the disk yet."""
        return bool(self.runs.active)

    def decided(self) -> list[Action]:
        """Returns the actions that were decided before the handler of an event raised an exception.

        They must be performed, because the state already has their effects.
        """
        return self._outbox.take()

    # ---- events --------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Returns the actions that follow from one event, in order."""
        self._handlers[type(event)](event, now)
        return self._outbox.take()

    def stored(self, operation: Operation, result: Result, now: float) -> list[Action]:
        """Returns the actions that follow from the result of an operation."""
        self._outbox.resolve(operation, result, now)
        if isinstance(result, Changed | Fate) and result.job.batch is not None:
            self.batches.touched(result.job.batch, now)
        if self._open:
            if isinstance(result, Submitted | Changed) or (isinstance(result, Fed) and result.jobs):
                self._recount()
            self._feed(now)
            self.notices.read_due(now)
        return self._outbox.take()

    def next_wake(self) -> float:
        """Returns the latest time for the next `Wake`; infinity if nothing is scheduled."""
        return min(
            self._poll_at,
            self._sweep_at,
            self._figures_at,
            self._readers_at,
            self._backlog_at,
            self.notices.next_read() if self._open else math.inf,
            self.runs.next_write(),
            self.batches.next_wake() if self._open else math.inf,
        )

    def figures(self) -> JobFigures:
        """Returns the counts of jobs and the bytes of the store.

        The store's counts by state may be old, because they are read at intervals.
        """
        live, refused = len(self.batches.live), self._outbox.refused
        return JobFigures.of(self._stored, self._running, len(self.readers.all), live, refused)

    def _on_asked(self, event: ev.QuestionAsked, now: float) -> None:
        if not self._open:
            error = StoreUnavailable(
                "the store of jobs does not take anything now; try again", retry_after_ms=1000
            )
            self._outbox.refuse(event, error)
            return
        try:
            self._ask(event, event.message, now)
        except PoolError as error:
            self._outbox.refuse(event, error)

    def _ask(
        self,
        event: ev.QuestionAsked,
        message: Question | job_operations.Question | PoolError,
        now: float,
    ) -> None:
        """Passes a question to the component that answers it.

        Raises PoolError if the question is refused before the store is asked.
        """
        if isinstance(message, PoolError):
            raise message
        if isinstance(message, Fetch):
            self.readers.fetch(event.link, event.owner, event.id, event.attempt, message, now)
            self._readers_at = min(self._readers_at, now + READER_INTERVAL)
        elif isinstance(message, file_messages.Question):
            self._file_questions.on_asked(event, message)
        elif isinstance(message, batch_messages.Question | job_operations.ListAllBatches):
            self._batch_questions.on_asked(event, message, now)
        else:
            self.questions.on_asked(event, now)

    def _on_acknowledged(self, event: ev.Acknowledged, now: float) -> None:
        for id, count in event.have:
            self.readers.acknowledged(event.link, id, count, now)

    def _on_reader_left(self, event: ev.ReaderLeft, now: float) -> None:
        self.readers.leave(event.link, event.owner, event.id)

    def _on_run_ended(self, event: ev.RunEnded, now: float) -> None:
        self.runs.on_ended(event, now)
        if self._open:
            self._feed(now)
            if self._feeder.hungry(now):
                self._poll_at = min(self._poll_at, now + PLACE_DELAY)

    def _on_wake(self, event: ev.Wake, now: float) -> None:
        if now >= self._readers_at:
            self.readers.drop_silent(self._view.link_known)
            self.readers.end_slow(self._view.ack_grace, now)
            if self._open:
                self.readers.read_again(now)
            self._readers_at = now + READER_INTERVAL if self.readers.all else math.inf
        if not self._open:
            return
        self.runs.write_due(now)
        if now >= self._backlog_at:
            self._read_backlog()
        if now >= self._sweep_at:
            self._sweep(now)
        if now >= self._figures_at:
            self._count(now)
        self.notices.read_due(now)
        self.batches.work(now)
        self._feed(now)

    def _feed(self, now: float) -> None:
        self.runs.feed(now)
        due = self._feeder.next_due(now)
        self._poll_at = min(due, now + POLL_INTERVAL if self._feeder.hungry(now) else math.inf)

    # ---- the store -----------------------------------------------------------------------------

    def _on_store_opened(self, event: ev.StoreOpened, now: float) -> None:
        self._open = True
        self._outbox.store(store.ReadPoisons(), self._poisons_read)
        self._read_backlog()
        self.batches.find()
        self._sweep(now)
        self._count(now)
        self.notices.opened(now)
        self.notices.read_due(now)
        self.readers.read_all(now)

    def _poisons_read(self, result: Result, now: float) -> None:
        if isinstance(result, Poisons):
            for digest, left in sorted(result.left, key=lambda entry: entry[1]):
                self._outbox.perform(Quarantine(digest, left))

    def _read_backlog(self) -> None:
        self._backlog_at = math.inf
        self._outbox.store(store.ReadBacklog(), self._backlog_read)

    def _backlog_read(self, result: Result, now: float) -> None:
        if isinstance(result, Backlog):
            for model, priority, _, due, starts in result.waiting:
                wait = max(0.0, due - result.now)
                suspect = starts >= ALONE_STARTS
                self._feeder.came((model, priority), now + wait, suspect=suspect)
        elif self._open:
            self._backlog_at = now + BACKLOG_RETRY

    def _on_store_lost(self, event: ev.StoreLost, now: float) -> None:
        self._open = False
        self.runs.drop_all(now)
        self.notices.lost()
        self.batches.lost()
        self._feeder.groups.clear()
        self._sweeping = self._counting = False
        self._poll_at = self._sweep_at = self._figures_at = self._backlog_at = math.inf

    def _on_closing(self, event: ev.Closing, now: float) -> None:
        retry = None if event.final else BROKER_RETRY_MS
        error = Draining("the broker is going down", retry_after_ms=retry)
        self.readers.end_all(error)
        if event.final:  # otherwise clients ask the next broker, which answers
            self.batches.end_all(error)

    def _on_batch_cancelled(self, job: JobView, now: float) -> None:
        self.runs.drop(job.id, now)
        self.readers.job_changed(job, now)

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + SWEEP_INTERVAL
        if self._sweeping:
            return
        self._sweeping = True
        late = DeadlineExceeded("the job was not finished before its deadline (deadline_ms)")
        operation = store.Sweep(
            frozenset(self.runs.active), expired_end=packed_end(Failed.of(late))
        )
        self._outbox.store(operation, self._swept)

    def _swept(self, result: Result, now: float) -> None:
        self._sweeping = False
        if isinstance(result, Swept):
            for job in result.expired:
                self.readers.job_changed(job, now)
                self.notices.came(job.notify, now)
                if job.batch is not None:
                    self.batches.touched(job.batch, now)
            if result.more:
                self._sweep(now)

    def _count(self, now: float) -> None:
        self._figures_at = now + FIGURES_INTERVAL
        if not self._counting:
            self._counting, self._count_began = True, now
            self._outbox.store(store.ReadFigures(), self._counted)

    def _recount(self) -> None:
        """Schedules an early read of the counts, because a job has changed.

        A read that is under way will include the change.
        """
        if not self._counting:
            self._figures_at = min(self._figures_at, self._recount_at)

    def _counted(self, result: Result, now: float) -> None:
        """Stores the counts that were read, and the present number of running jobs.

        The store counts running jobs as waiting.
        """
        self._counting = False
        self._recount_at = now + max(RECOUNT_DELAY, RECOUNT_COST * (now - self._count_began))
        if isinstance(result, StoreFigures):
            self._stored, self._running = result, len(self.runs.active)
