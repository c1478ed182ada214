"""Runs of jobs: gives jobs to the core, writes their output, and ends or defers them.

Invariants:
- At most one operation on the output of a job is under way.
- An id is sent to readers only once it is durable.
- The end of a job is written after all its ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from mlxpool.broker.core import events as core
from mlxpool.broker.core.state import JOBS_LINK
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs import retries
from mlxpool.broker.jobs.actions import Outbox
from mlxpool.broker.jobs.active import ActiveJob
from mlxpool.broker.jobs.answers import packed_end
from mlxpool.broker.jobs.feeding import AnswerRoom, Feeder
from mlxpool.broker.jobs.notices import NoticeQueue
from mlxpool.broker.jobs.pool_view import PoolView
from mlxpool.broker.jobs.readers import Readers
from mlxpool.broker.jobs.retries import Verdict
from mlxpool.broker.store.operations import (
    Defer,
    FeedNext,
    Finish,
    NewGeneration,
    Operation,
    Progress,
    SetBack,
    SetPoison,
)
from mlxpool.broker.store.records import (
    Changed,
    Chunk,
    Durable,
    Fate,
    Fed,
    FedJob,
    JobState,
    JobView,
    Refused,
    Result,
)
from mlxpool.common.errors import Damaged, Internal, Poisoned, PoolError
from mlxpool.common.options import MAX_DEADLINE_MS
from mlxpool.common.protocol.frames import unpack
from mlxpool.common.protocol.from_client import Ack, ModelCall
from mlxpool.common.protocol.kept.job_messages import IDLE
from mlxpool.common.protocol.kept.job_work import Work, answer_bound, parse_work
from mlxpool.common.protocol.resume import Facts, Resume
from mlxpool.common.protocol.to_client import Done, Failed

WINDOW = 4096  # most ids of a run that may wait for the disk
RETRY_INTERVAL = 1.0  # seconds until a retry of an operation that the store refused
IDLE_IDS = 64  # ids that an idle job may still compute while others wait
CHARGED_IDS = 256  # IDLE_IDS of a job that is not idle and is charged with a worker's end


class Runs:
    """Gives jobs to the core, and writes their output and outcomes. Owns every ActiveJob."""

    def __init__(
        self,
        outbox: Outbox,
        view: PoolView,
        feeder: Feeder,
        answer_room: AnswerRoom,
        readers: Readers,
        notices: NoticeQueue,
        active: dict[bytes, ActiveJob],
    ) -> None:
        """`active` maps ids to running jobs; only this class changes it."""
        self.active = active
        self._outbox = outbox
        self._view = view
        self._feeder = feeder
        self._answer_room = answer_room
        self._readers = readers
        self._notices = notices
        self._last_attempt = 0

    # ---- starts --------------------------------------------------------------------------------

    def feed(self, now: float) -> None:
        """Reads the jobs that can run now, and requests workers for other jobs that are due."""
        for plan in self._feeder.plan(self._view, self.active.keys(), now):
            self._outbox.store(plan, self._fed(plan))
        for name in self._feeder.hungry(now):
            model = self._view.model_of(name)
            if model is not None and self._wants(name, model, now):
                self._outbox.perform(core.WantModel(model))

    def _wants(self, name: str, model: str, now: float) -> bool:
        """Returns whether to start a worker for the jobs that wait for a model.

        A worker for jobs of priority `idle` starts only if no other model must be unloaded for it.
        """
        if self._view.places(model) or not self._view.available(model, now):
            return False
        idle = all(
            priority == IDLE
            for (other, priority), backlog in self._feeder.groups.items()
            if other == name and backlog.due <= now
        )
        return not idle or self._view.loads_freely(model)

    def _fed(self, plan: FeedNext) -> Callable[[Result, float], None]:
        def then(result: Result, now: float) -> None:
            if isinstance(result, Fed):
                for fed in result.jobs:
                    self._start(fed, now)
                next_due = result.next_due
                due = math.inf if next_due is None else now + max(0.0, next_due - result.now)
                self._feeder.fed(plan, result, due)
            else:
                self._feeder.refused(plan, now + RETRY_INTERVAL)

        return then

    def _start(self, fed: FedJob, now: float) -> None:
        view, job = self._view, fed.job
        self._last_attempt += 1
        active = ActiveJob.of(fed, self._last_attempt, view.model_of(job.model) or "", now)
        self.active[job.id] = active
        self._feeder.started(active.group, job.scope.owner, suspect=active.suspect)
        self._readers.job_changed(job, now)  # the store may have begun a new generation
        if fed.damaged:
            self._leave(active, self._dead(active, Damaged(fed.damaged)), now)
            return
        if job.starts > retries.MAX_STARTS:
            why = f"the broker ended {retries.MAX_STARTS} times after this job was started"
            self._leave(active, self._dead(active, Poisoned(why)), now)
            return
        try:
            work = _work(fed, active.deadline - now)
        except (PoolError, ValueError, TypeError, KeyError) as error:
            what = Internal(f"the stored request cannot be read: {error}")
            self._leave(active, self._dead(active, what), now)
            return
        active.answer_bound = answer_bound(work)
        self._answer_room.take(active.model, active.answer_bound)
        self._outbox.perform(
            core.StartJob(
                job.id,
                active.attempt,
                job.scope.owner,
                job.digest,
                work,
                job.seed,
                job.charge,
                alone=active.suspect,
                idle=job.priority == IDLE,
            )
        )

    # ---- output --------------------------------------------------------------------------------

    def on_output(self, event: ev.Output, now: float) -> None:
        """Records the output of runs.

        If output does not follow the last id of its job, the job runs again. ValueError is then
        raised after all deltas were handled.
        """
        unfit: list[str] = []
        for row in event.rows:
            active = self.active.get(row.id)
            # Output of a run that has ended may still come: the job's next run computes it again.
            if active is None or active.attempt != row.attempt or not active.ran:
                continue
            if not active.fits(row):
                unfit.append(f"{row.id.hex()} at {row.pos}, which has {active.taken} ids")
                self._give_back(active, now)
                continue
            active.take(row)
            if active.steps and active.writing is None:  # else `_written` plans the write
                active.plan_write(now, read=self._readers.reads(row.id))
            if active.job.priority == IDLE or active.job.charge:
                self._give_way(active, now)
        if unfit:
            raise ValueError(
                f"output does not continue the ids of these jobs, so the jobs run again: {unfit}"
            )

    def _give_way(self, active: ActiveJob, now: float) -> None:
        """Defers a job that should give its place (batch slot) to waiting requests.

        An idle job is deferred after IDLE_IDS more ids if requests wait for a place. A job that is
        blamed for lost workers is deferred after CHARGED_IDS more ids if requests of a higher rank
        wait.
        """
        if active.job.charge:
            place_wanted = self._view.is_outranked(active.id)
        else:
            place_wanted = self._view.free(active.model) < 0
        if not place_wanted:
            active.yield_at = 0
        elif not active.yield_at:
            ids = IDLE_IDS if active.job.priority == IDLE else CHARGED_IDS
            active.yield_at = active.taken + ids
        elif active.taken >= active.yield_at:
            self._give_back(active, now)

    def _give_back(self, active: ActiveJob, now: float) -> None:
        """Ends the run of a job; a later run continues from the ids that the job has."""
        self._cancel_run(active)
        self._leave(active, self._put_back(active, 0.0), now)

    def on_ended(self, event: ev.RunEnded, now: float) -> None:
        active = self.active.get(event.id)
        if active is None or active.attempt != event.attempt or not active.ran:
            return
        active.ran = False
        if isinstance(event.terminal, Done):
            self._leave(active, self._done(active, event.terminal), now)
        else:
            self._leave(active, self._failed(active, event.terminal, now), now)

    def on_set_back(self, event: ev.SetBack, now: float) -> None:
        """Stores the loss of a worker immediately, because the broker may crash next."""
        active = self.active.get(event.id)
        if active is None or active.attempt != event.attempt:
            return
        job = active.job = replace(active.job, charge=event.charge)
        noted = SetBack(job.id, job.gen, event.charge, event.cause, event.stacks)
        self._outbox.store(noted, lambda result, now: None)

    def reader_came(self, id: bytes, now: float) -> None:
        """Schedules a write of the output of a job that now has a reader."""
        active = self.active.get(id)
        if active is not None and active.steps and active.writing is None:
            active.write_at = now

    def write_due(self, now: float) -> None:
        """Writes the output of jobs whose write is due."""
        for active in list(self.active.values()):
            if active.write_at <= now:
                self._write(active, now)

    def next_write(self) -> float:
        return min((active.write_at for active in self.active.values()), default=math.inf)

    # ---- how a job leaves ----------------------------------------------------------------------

    def _done(self, active: ActiveJob, done: Done) -> Finish:
        state = JobState.CANCELLED if done.reason == "cancelled" else JobState.DONE
        whole = replace(done, text=active.text_before + done.text)
        return Finish(active.id, active.job.gen, state, packed_end(whole), answer=whole.blobs())

    def _dead(self, active: ActiveJob, error: PoolError) -> Finish:
        return Finish(
            active.id, active.job.gen, JobState.DEAD, packed_end(Failed.of(error)), error.message
        )

    def _failed(self, active: ActiveJob, failed: Failed, now: float) -> Operation:
        """Returns the store operation that follows from the error of a job's run."""
        error, job = failed.error(), active.job
        what = retries.verdict(error)
        if what is Verdict.NEW_GENERATION:
            return NewGeneration(active.id, job.gen)
        if what is Verdict.EXPIRED and now < active.deadline - 1:
            what = Verdict.PUT_BACK  # the stream's time limit is over, not the job's
        if what is Verdict.EXPIRED:
            end = packed_end(failed)
            return Finish(active.id, job.gen, JobState.EXPIRED, end, error.message)
        if what is Verdict.PUT_BACK:
            return self._put_back(active, retries.put_back_delay(error))
        if isinstance(error, Poisoned):
            life = self._view.poison_life
            self._outbox.store(SetPoison(job.digest, life), lambda result, now: None)
            self._outbox.perform(core.Quarantine(job.digest, life))
        attempts = 1 if active.taken > job.pos else job.attempts + 1
        if what is Verdict.DEAD or attempts >= retries.MAX_ATTEMPTS:
            return replace(self._dead(active, error), attempts=attempts)
        delay = retries.retry_delay(active.id, attempts)
        return Defer(active.id, job.gen, delay, attempts, job.charge, 0, error.message)

    def _put_back(self, active: ActiveJob, delay: float) -> Defer:
        """Returns the operation that makes a job wait again through no fault of its own.

        The present start does not count in the job's `starts`.
        """
        job = active.job
        starts = 0 if active.taken > job.pos else max(0, job.starts - 1)
        return Defer(active.id, job.gen, delay, job.attempts, job.charge, starts)

    def _leave(self, active: ActiveJob, outcome: Operation, now: float) -> None:
        """Writes the remaining output of a job whose run is over, then the outcome of the job."""
        active.move(_event_of(outcome))
        active.ran, active.leaving, active.outcome = False, True, outcome
        self._feeder.leaving(active.group, active.job.scope.owner)
        self._write(active, now)

    def _cancel_run(self, active: ActiveJob) -> None:
        active.ran = False
        self._outbox.perform(core.CancelRequest(None, None, active.id))

    def drop(self, id: bytes, now: float) -> bool:
        """Forgets a job that another operation has ended in the store. Returns whether it ran."""
        active = self.active.get(id)
        if active is None:
            return False
        if active.ran:
            self._cancel_run(active)
        self._remove(active, now)
        return True

    def drop_all(self, now: float) -> None:
        """Forgets all running jobs, because the store is lost."""
        for active in list(self.active.values()):
            self.drop(active.id, now)

    def _remove(self, active: ActiveJob, now: float) -> None:
        del self.active[active.id]
        if not active.proven:
            self._feeder.proven(active.group, now, suspect=active.suspect)
        self._answer_room.give_back(active.model, active.answer_bound)
        self._feeder.left(active.group, active.job.scope.owner, leaving=active.leaving)

    # ---- writing -------------------------------------------------------------------------------

    def _write(self, active: ActiveJob, now: float) -> None:
        """Gives the next operation of a job to the store, if none is under way."""
        if active.writing is not None:
            active.write_at = math.inf  # `_written` continues after the present write
            return
        chunk = active.chunk()
        operation = active.next_operation(chunk, patient=self._is_patient(active, now))
        active.write_at = math.inf
        if operation is None:
            return
        active.writing = operation
        self._outbox.store(
            operation, lambda result, now: self._written(active, operation, chunk, result, now)
        )

    def _is_patient(self, active: ActiveJob, now: float) -> bool:
        """Returns whether the write of a job's end may wait for the ends of jobs of the same batch.

        It may wait if the store is about to read more jobs: that read is urgent, and is committed
        together with the waiting ends.
        """
        job = active.job
        return (
            job.batch is not None
            and not self._readers.reads(job.id)
            and self._feeder.has_due(active.group, now)
        )

    def _written(
        self,
        active: ActiveJob,
        operation: Operation,
        chunk: Chunk | None,
        result: Result,
        now: float,
    ) -> None:
        if self.active.get(active.id) is not active:
            return  # the job was cancelled, or the store was lost
        active.writing = None
        if isinstance(result, Refused):
            if result.code == "store_error":
                self._unwritable(active, operation, result)
            active.write_at = now + RETRY_INTERVAL  # all steps are still in memory
            return
        if not isinstance(result, Durable | Changed):
            self._lost(active, result, now)
            return
        if chunk is not None and isinstance(operation, Progress | Finish):
            self._note_durable(active, chunk, now)
        if isinstance(result, Changed):
            self._left(active, result.job, now)
        elif active.outcome is not None:
            self._write(active, now)
        elif active.steps:
            active.plan_write(now, read=self._readers.reads(active.id))

    def _note_durable(self, active: ActiveJob, chunk: Chunk, now: float) -> None:
        was_proven, facts = active.proven, active.facts or active.job.facts
        active.written(chunk)
        if not was_proven:
            self._feeder.proven(active.group, now, suspect=active.suspect)
        self._readers.chunk_durable(active.id, active.job.gen, chunk, facts, now)
        if active.ran:
            self._outbox.perform(core.ClientAck(JOBS_LINK, Ack([(active.id, active.durable)])))

    def _lost(self, active: ActiveJob, result: Result, now: float) -> None:
        """Handles a write that does not match the stored job.

        The job was ended meanwhile, or an earlier write was reported as failed but was committed.
        """
        self.drop(active.id, now)
        if isinstance(result, Fate):
            self._readers.job_changed(result.job, now)
            if result.job.state is JobState.WAITING:
                self._came_back(result.job, now)
            else:
                self._notices.came(result.job.notify, now)

    def _came_back(self, job: JobView, due: float) -> None:
        suspect = job.starts >= retries.ALONE_STARTS
        self._feeder.came((job.model, job.priority), due, job.scope.owner, suspect=suspect)

    def _unwritable(self, active: ActiveJob, operation: Operation, refused: Refused) -> None:
        """Ends a job with its durable ids, because the store can never accept the operation."""
        if isinstance(operation, Finish) and operation.state is JobState.DEAD:
            active.drop_steps()
            return  # the end is short: only its steps were too large
        if active.ran:
            self._cancel_run(active)
        if active.outcome is None:
            active.move("final")
        active.drop_steps()
        active.outcome = self._dead(active, Internal(refused.message))

    def _left(self, active: ActiveJob, job: JobView, now: float) -> None:
        """Handles a job whose outcome is on the disk."""
        self._remove(active, now)
        self._readers.job_changed(job, now)
        outcome = active.outcome
        if isinstance(outcome, Defer | NewGeneration):
            delay = outcome.delay if isinstance(outcome, Defer) else 0.0
            self._came_back(job, now + delay)
        else:
            self._notices.came(job.notify, now)


EVENTS = {
    JobState.DONE: "finish",
    JobState.CANCELLED: "cancel",
    JobState.DEAD: "final",
    JobState.EXPIRED: "deadline",
}


def _event_of(outcome: Operation) -> str:
    """Returns the event of TRANSITIONS that matches an outcome."""
    return EVENTS[outcome.state] if isinstance(outcome, Finish) else "retryable"


def _work(fed: FedJob, left: float) -> Work:
    """Returns the work of a job; its deadline is in `left` seconds.

    A `generate` continues after its durable ids. Raises PoolError or ValueError if the stored
    request is invalid.
    """
    job = fed.job
    request = {key: value for key, value in unpack(fed.request).items() if key != "note"}
    work = parse_work(request, fed.blobs, job.scope.owner)
    milliseconds = MAX_DEADLINE_MS if math.isinf(left) else math.ceil(left * 1000)
    deadline_ms = min(MAX_DEADLINE_MS, max(1, milliseconds))
    if isinstance(work, ModelCall):
        return replace(work, deadline_ms=deadline_ms)
    facts = None if job.facts is None else Facts.from_worker(unpack(job.facts))
    resume = Resume(fed.ids, facts, job.seed) if fed.ids or facts is not None else None
    return replace(
        work,
        resume=resume,
        deadline_ms=deadline_ms,
        priority=max(0, job.priority),
        window=WINDOW,
        batch=True,
        durable=True,
    )
