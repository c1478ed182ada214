"""Answers clients' questions about jobs: submit, list, look up, cancel, retry, release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxpool.broker.core.events import Quarantine
from mlxpool.broker.jobs import answers
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Outbox
from mlxpool.broker.jobs.answers import packed_end
from mlxpool.broker.jobs.canonical import job_digest
from mlxpool.broker.jobs.feeding import Feeder
from mlxpool.broker.jobs.job_states import JobPhase, phase_of
from mlxpool.broker.jobs.notices import NoticeQueue
from mlxpool.broker.jobs.operator_questions import OperatorQuestions, with_owner
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.jobs.pool_view import PoolView
from mlxpool.broker.jobs.readers import Readers
from mlxpool.broker.jobs.runs import Runs
from mlxpool.broker.store import operations as store
from mlxpool.broker.store.batch_operations import BatchView, ReadBatch
from mlxpool.broker.store.records import (
    Changed,
    DuplicateKey,
    Fate,
    Found,
    History,
    JobList,
    JobState,
    JobView,
    KeyGone,
    Name,
    Refused,
    Result,
    Scope,
    StoredRequest,
    Submitted,
    UnknownName,
)
from mlxpool.common.errors import (
    BadRequest,
    DuplicateId,
    Gone,
    PoolError,
    UnknownJob,
)
from mlxpool.common.protocol import to_client
from mlxpool.common.protocol.frames import pack
from mlxpool.common.protocol.kept import job_messages as messages
from mlxpool.common.protocol.kept.job_messages import (
    AboutJob,
    JobAccepted,
    JobRequest,
    JobRow,
    ListJobs,
    Submit,
)
from mlxpool.common.protocol.kept.job_work import seed_of, warnings_of

# The errors of changes that a job's state does not allow, by the kind of change.
REFUSALS = {
    messages.RETRY: "only dead and expired jobs can be tried again",
    messages.RELEASE: "only an ended job has a result to release; cancel it first",
}
RUNNING = JobPhase.RUNNING.value
READS = (messages.READ, messages.REQUEST)  # the kinds of questions that change nothing
ALREADY = {messages.RETRY: JobState.WAITING, messages.RELEASE: JobState.GONE}


class Questions:
    """Answers each question of clients about jobs exactly once.

    A change is answered only after the store has committed it.
    """

    def __init__(
        self,
        outbox: Outbox,
        view: PoolView,
        feeder: Feeder,
        runs: Runs,
        readers: Readers,
        notices: NoticeQueue,
        policy: Callable[[], JobPolicy],
    ) -> None:
        """`policy` returns the present settings."""
        self._policy = policy
        self._outbox = outbox
        self._view = view
        self._feeder = feeder
        self._runs = runs
        self._readers = readers
        self._notices = notices
        self._of_operators = OperatorQuestions(outbox, self._row_for_operators)

    def on_asked(self, event: ev.QuestionAsked, now: float) -> None:
        message = event.message
        if isinstance(message, Submit):
            self._submit(event, message, now)
        elif event.operator and self._of_operators.on_asked(event, message):
            return
        elif isinstance(message, ListJobs):
            self._list(event, message)
        elif isinstance(message, AboutJob):
            self._about(event, message)

    def _fail(self, event: ev.QuestionAsked, error: PoolError) -> None:
        self._outbox.refuse(event, error)

    def _send(self, event: ev.QuestionAsked, message: Any) -> None:
        self._outbox.send(event.link, message, event.id, event.attempt)

    # ---- submit --------------------------------------------------------------------------------

    def _submit(self, event: ev.QuestionAsked, message: Submit, now: float) -> None:
        """Stores a job.

        A job that the pool does not accept is refused, unless it is already stored.
        """
        work, policy = message.work, self._policy()
        digest = job_digest(work)
        try:
            self._view.check(event.owner, work, digest, now)
            notify = policy.told(message.notify)
        except PoolError as error:
            self._refuse_unless_known(event, message, digest, error)
            return
        deadline_ms = work.deadline_ms
        operation = store.Submit(
            event.new_id,
            Scope(event.owner, message.tenant, message.key),
            digest,
            work.kind,
            work.model,
            pack({**message.request, **({"note": message.note} if message.note else {})}),
            seed_of(work, event.seed),
            message.blobs,
            message.priority,
            not_before=message.not_before,
            deadline=None if deadline_ms is None else deadline_ms / 1000,
            keep=policy.kept(message.keep_ms),
            notify=notify,
            max_jobs=policy.quota_jobs,
        )

        def then(result: Result, now: float) -> None:
            if isinstance(result, Submitted):
                self._submitted(event, message, result, now)
            elif isinstance(result, DuplicateKey):
                why = f"the key {message.key!r} is that of another job ({result.id.hex()})"
                self._fail(event, DuplicateId(f"{why}; take another key for another request"))
            elif isinstance(result, KeyGone):
                why = f"the result of the job {message.key!r} was deleted"
                self._fail(event, Gone(f"{why}; take another key to compute it again"))
            else:
                self._fail(event, answers.unexpected(result))

        self._outbox.store(operation, then)

    def _refuse_unless_known(
        self, event: ev.QuestionAsked, message: Submit, digest: bytes, error: PoolError
    ) -> None:
        """Refuses a submission with `error`, unless an equal earlier submission has made a job.

        Then answers with that job.
        """

        def then(result: Result, now: float) -> None:
            job = result.job if isinstance(result, Found) else None
            if job is None or job.digest != digest or job.state is JobState.GONE:
                self._fail(event, error)
            else:
                self._submitted(event, message, Submitted(job, new=False), now)

        scope = Scope(event.owner, message.tenant, message.key)
        self._outbox.store(store.ReadJob(scope), then)

    def _submitted(
        self, event: ev.QuestionAsked, message: Submit, result: Submitted, now: float
    ) -> None:
        job = result.job
        if result.new:
            due = now + max(0.0, job.due - job.submitted)
            self._feeder.came((job.model, job.priority), due, job.scope.owner)
        phase = phase_of(job.state, runs=job.id in self._runs.active)
        accepted = JobAccepted(
            self._outbox.boot,
            event.link,
            job.id,
            job.scope.key,
            job.gen,
            job.seed,
            phase.value,
            warnings_of(message.work) + self._policy().keep_warning(message.keep_ms),
        )
        self._send(event, accepted)

    # ---- lists ---------------------------------------------------------------------------------

    def _list(self, event: ev.QuestionAsked, message: ListJobs) -> None:
        if not message.batch:
            self._list_of(event, message, message.batch_id)
            return

        def list_of_batch(batch: BatchView, now: float) -> None:
            self._list_of(event, message, batch.id)

        def missing(result: Result) -> PoolError:
            if isinstance(result, UnknownName):
                return UnknownJob(f"there is no batch {message.batch!r} of this owner")
            return answers.unexpected(result)

        scope = Scope(event.owner, message.tenant or "", message.batch)
        self._outbox.ask(event, ReadBatch(scope), BatchView, list_of_batch, missing)

    def _list_of(self, event: ev.QuestionAsked, message: ListJobs, batch: bytes | None) -> None:
        running = message.state == RUNNING
        states = () if not message.state else (_stored(message.state),)
        owner = message.owner if event.operator else event.owner
        tenant = None if event.operator else message.tenant
        operation: store.Operation
        if message.after is None:
            operation = store.ListJobs(
                owner,
                tenant,
                states,
                message.before,
                message.limit,
                batch,
                reverse=True,
                model=message.model,
            )
        else:
            operation = store.ListEnded(owner, tenant, message.after, message.limit)

        def then(result: JobList, now: float) -> None:
            row = self._row_for_operators if event.operator else self._row
            rows = list(map(row, result.jobs))
            shown = answers.fitting(rows)
            following = result.next
            if len(shown) < len(rows):
                following = shown[-1]["seq" if message.after is None else "end_seq"]
            if message.state:
                shown = [row for row in shown if (row["state"] == RUNNING) is running]
            self._send(event, messages.JobList(shown, following))

        self._outbox.ask(event, operation, JobList, then)

    def _row(self, job: JobView) -> dict[str, Any]:
        return answers.row_of(job, runs=job.id in self._runs.active)

    def _row_for_operators(self, job: JobView) -> dict[str, Any]:
        return with_owner(self._row(job), job)

    # ---- one job -------------------------------------------------------------------------------

    def _about(self, event: ev.QuestionAsked, message: AboutJob) -> None:
        """Looks up or changes a job. A job named by its id is looked up first."""
        name = answers.name_of(event.owner, message.name)
        if isinstance(name, Scope) and message.kind not in READS:
            self._change(event, message, name)
            return

        def then(result: Result, now: float) -> None:
            job = result.job if isinstance(result, Found | History) else None
            mine = (event.owner, message.name.tenant)
            if isinstance(result, Refused):
                self._fail(event, answers.store_error(result))
            elif job is None or (
                not event.operator and (job.scope.owner, job.scope.tenant) != mine
            ):
                self._fail(event, answers.unknown(message.name))
            elif message.kind == messages.REQUEST:
                self._send_request(event, job)
            elif message.kind == messages.READ:
                failures = result.failures if isinstance(result, History) else ()
                rows = [{"at": failure.at, "cause": failure.cause} for failure in failures]
                self._send(event, JobRow({**self._row(job), "failures": rows}))
            else:
                self._change(event, message, job.id)

        reads = message.kind == messages.READ
        self._outbox.store(store.ReadHistory(name) if reads else store.ReadJob(name), then)

    def _send_request(self, event: ev.QuestionAsked, job: JobView) -> None:
        """Answers with the submitted request, unless it is deleted."""

        def then(stored: StoredRequest, now: float) -> None:
            self._send(event, JobRequest(self._row(stored.job), stored.request, stored.blobs))

        def missing(result: Result) -> PoolError:
            if isinstance(result, KeyGone):
                return Gone(f"the result of the job {job.scope.key!r} was deleted")
            return answers.unexpected(result)

        self._outbox.ask(event, store.ReadRequest(job.id), StoredRequest, then, missing)

    def _change(self, event: ev.QuestionAsked, message: AboutJob, name: Name) -> None:
        operation, then = CHANGES[message.kind](self, event, message, name)
        self._outbox.store(operation, then)

    def _cancel(
        self, event: ev.QuestionAsked, message: AboutJob, name: Name
    ) -> tuple[store.Operation, Callable[[Result, float], None]]:
        end = packed_end(to_client.Done("cancelled"))

        def then(result: Result, now: float) -> None:
            if isinstance(result, Changed | Fate):
                job = result.job
                state = str(job.state)
                if isinstance(result, Changed):
                    state = phase_of(JobState.WAITING, runs=self._runs.drop(job.id, now)).value
                    self._readers.job_changed(job, now)
                    self._notices.came(job.notify, now)
                self._send(event, to_client.Fate(state, job.pos))
            else:
                self._fail(event, self._error_of_change(message, result))

        return store.Cancel(name, end), then

    def _retry(
        self, event: ev.QuestionAsked, message: AboutJob, name: Name
    ) -> tuple[store.Operation, Callable[[Result, float], None]]:
        def then(result: Result, now: float) -> None:
            if isinstance(result, Changed):
                job = result.job
                self._feeder.came((job.model, job.priority), now, job.scope.owner)
                self._outbox.perform(Quarantine(job.digest, 0.0))
            self._changed(event, message, result)

        return store.Retry(name), then

    def _release(
        self, event: ev.QuestionAsked, message: AboutJob, name: Name
    ) -> tuple[store.Operation, Callable[[Result, float], None]]:
        def then(result: Result, now: float) -> None:
            if isinstance(result, Changed):
                self._readers.job_changed(result.job, now)
            self._changed(event, message, result)

        return store.Release(name), then

    def _changed(self, event: ev.QuestionAsked, message: AboutJob, result: Result) -> None:
        """Answers a request that changes a job, once the store has performed it.

        A client may repeat the request: if the job was already changed in this way, the answer is
        the job, as after the first request.
        """
        already = isinstance(result, Fate) and result.job.state is ALREADY[message.kind]
        if isinstance(result, Changed) or (isinstance(result, Fate) and already):
            self._send(event, JobRow(self._row(result.job)))
        else:
            self._fail(event, self._error_of_change(message, result))

    def _error_of_change(self, message: AboutJob, result: Result) -> PoolError:
        if isinstance(result, Fate):
            job = result.job
            if job.state is JobState.GONE:
                return Gone(f"the result of the job {message.name} was deleted")
            state = phase_of(job.state, runs=job.id in self._runs.active).value
            return BadRequest(f"the job {message.name} is {state}: {REFUSALS[message.kind]}")
        if isinstance(result, Refused):
            return answers.store_error(result)
        return answers.unknown(message.name)


CHANGES = {
    messages.CANCEL: Questions._cancel,
    messages.RETRY: Questions._retry,
    messages.RELEASE: Questions._release,
}


def _stored(state: str) -> JobState:
    """Returns the stored state for a state that clients see."""
    return JobState.WAITING if state == RUNNING else JobState(state)
