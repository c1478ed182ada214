"""Runs jobs: gives them to the core, writes what comes of them, and ends or defers them.

Invariants: a job has at most one operation on its output under way; an id is told to readers only
when it is durable; the end of a job is written after all its ids.
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

WINDOW = 4096  # ids of a run that may wait for the disk
RETRY_INTERVAL = 1.0  # seconds until an operation that the store refused is given to it again
IDLE_IDS = 64  # that an idle job may still compute when others wait
CHARGED_IDS = 256  # the same of one that is charged with the end of a worker, and not idle


class Runs:
    """Owns every ActiveJob."""

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
        """`active` is filled and emptied here; others may read it."""
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
        """Read the jobs that can be run now, and have workers for those that cannot."""
        for plan in self._feeder.plan(self._view, self.active.keys(), now):
            self._outbox.store(plan, self._fed(plan))
        for name in self._feeder.hungry(now):
            model = self._view.model_of(name)
            if model is not None and self._wants(name, model, now):
                self._outbox.perform(core.WantModel(model))

    def _wants(self, name: str, model: str, now: float) -> bool:
        """Whether to start a worker: idle jobs alone do not end other models' for it."""
        if self._view.places(model) or not self._view.available(model, now):
            return False
        idle = all(
            priority == IDLE
            for (other, priority), one in self._feeder.groups.items()
            if other == name and one.due <= now
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
        """Take the output of runs. Raises ValueError for some that does not follow, at the end."""
        unfit: list[str] = []
        for row in event.rows:
            active = self.active.get(row.id)
            # Output of one that has left may be on its way: it goes on from the ids it left with.
            if active is None or active.attempt != row.attempt or not active.ran:
                continue
            if not active.fits(row):
                unfit.append(f"{row.id.hex()} at {row.pos}, which has {active.taken} ids")
                self._give_back(active, now)
                continue
            active.take(row)
            if active.steps and active.writing is None:  # else when that is written
                active.plan_write(now, read=self._readers.reads(row.id))
            if active.job.priority == IDLE or active.job.charge:
                self._give_way(active, now)
        if unfit:
            raise ValueError(f"output of jobs does not follow, so they run again: {unfit}")

    def _give_way(self, active: ActiveJob, now: float) -> None:
        """Defer an idle or a charged job that has computed so many ids since others began to wait.

        A charged one has its worker to itself and few others: it gives way to a higher rank.
        """
        if active.job.charge:
            wanted = self._view.is_outranked(active.id)
        else:
            wanted = self._view.free(active.model) < 0
        if not wanted:
            active.yield_at = 0
        elif not active.yield_at:
            ids = IDLE_IDS if active.job.priority == IDLE else CHARGED_IDS
            active.yield_at = active.taken + ids
        elif active.taken >= active.yield_at:
            self._give_back(active, now)

    def _give_back(self, active: ActiveJob, now: float) -> None:
        """End its run; it goes on in another one from the ids that it has."""
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
        """Note the loss at once: the broker may be the next that ends."""
        active = self.active.get(event.id)
        if active is None or active.attempt != event.attempt:
            return
        job = active.job = replace(active.job, charge=event.charge)
        noted = SetBack(job.id, job.gen, event.charge, event.cause, event.stacks)
        self._outbox.store(noted, lambda result, now: None)

    def reader_came(self, id: bytes, now: float) -> None:
        """Somebody reads a job from now on: write what it has."""
        active = self.active.get(id)
        if active is not None and active.steps and active.writing is None:
            active.write_at = now

    def write_due(self, now: float) -> None:
        """Write what has been gathered for long enough."""
        for active in list(self.active.values()):
            if active.write_at <= now:
                self._write(active, now)

    def next_write(self) -> float:
        return min((one.write_at for one in self.active.values()), default=math.inf)

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
        """What follows from the error of its run."""
        error, job = failed.error(), active.job
        what = retries.verdict(error)
        if what is Verdict.NEW_GENERATION:
            return NewGeneration(active.id, job.gen)
        if what is Verdict.EXPIRED and now < active.deadline - 1:
            what = Verdict.PUT_BACK  # the longest time of a stream is over, not that of the job
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
        """Nothing is wrong with it: this start does not count."""
        job = active.job
        starts = 0 if active.taken > job.pos else max(0, job.starts - 1)
        return Defer(active.id, job.gen, delay, job.attempts, job.charge, starts)

    def _leave(self, active: ActiveJob, outcome: Operation, now: float) -> None:
        """Its run is over: write what there is, then the outcome."""
        active.move(_event_of(outcome))
        active.ran, active.leaving, active.outcome = False, True, outcome
        self._feeder.leaving(active.group, active.job.scope.owner)
        self._write(active, now)

    def _cancel_run(self, active: ActiveJob) -> None:
        active.ran = False
        self._outbox.perform(core.CancelRequest(None, None, active.id))

    def drop(self, id: bytes, now: float) -> bool:
        """Forget a job that was ended in the store; whether it ran."""
        active = self.active.get(id)
        if active is None:
            return False
        if active.ran:
            self._cancel_run(active)
        self._remove(active, now)
        return True

    def drop_all(self, now: float) -> None:
        """The store is lost: nothing that runs can be kept."""
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
        """Give the next operation of a job to the store, if none is under way."""
        if active.writing is not None:
            active.write_at = math.inf  # `_written` goes on
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
        """Whether the end of a job may wait for others: lines of a batch have theirs together.

        A read of the jobs that follow, which is urgent, takes them along.
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
            return  # it was cancelled, or the store was lost
        active.writing = None
        if isinstance(result, Refused):
            if result.code == "store_error":
                self._unwritable(active, operation, result)
            active.write_at = now + RETRY_INTERVAL  # all of it is still there
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
        """On the disk the job is not as it was: it was ended, or a commit that failed was made."""
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
        """The store cannot hold this, now or later: end the job with what is on the disk."""
        if isinstance(operation, Finish) and operation.state is JobState.DEAD:
            active.drop_steps()
            return  # this end is short: what it had beside it was at fault
        if active.ran:
            self._cancel_run(active)
        if active.outcome is None:
            active.move("final")
        active.drop_steps()
        active.outcome = self._dead(active, Internal(refused.message))

    def _left(self, active: ActiveJob, job: JobView, now: float) -> None:
        """Its outcome is on the disk."""
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
    """The event of the state table that an outcome is."""
    return EVENTS[outcome.state] if isinstance(outcome, Finish) else "retryable"


def _work(fed: FedJob, left: float) -> Work:
    """What a job computes with `left` seconds; a `generate` goes on from its durable ids.

    Raises PoolError, ValueError.
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
