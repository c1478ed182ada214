"""Answers questions of clients and operators about batches.

An answer is sent only after the store has committed the changes that it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlxpool.broker.core.events import Quarantine
from mlxpool.broker.jobs import answers
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Outbox
from mlxpool.broker.jobs.batches.batch_rows import (
    RELEASED,
    BatchSettings,
    batch_digest,
    file_id,
    outcome_row,
)
from mlxpool.broker.jobs.batches.live_batches import CANCELLED_END, Batches, Watcher
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.store import batch_operations as store
from mlxpool.broker.store.batch_operations import (
    BatchChanged,
    BatchList,
    BatchState,
    BatchSubmitted,
    BatchView,
    FileView,
    LineOutcomes,
    Place,
)
from mlxpool.broker.store.records import DuplicateKey, KeyGone, Result, Scope, UnknownName
from mlxpool.common.errors import (
    BadRequest,
    DuplicateId,
    Gone,
    OverQuota,
    PoolError,
    UnknownJob,
)
from mlxpool.common.protocol.frames import pack
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.kept import job_operations
from mlxpool.common.protocol.kept.batch_messages import (
    AboutBatch,
    ListBatches,
    ReadOutcomes,
    SubmitBatch,
    WaitForProgress,
)
from mlxpool.common.protocol.kept.file_messages import KeyName

MAX_LIVE = 256  # most batches of one owner that have not ended
RETRY_COUNT = 1000  # most lines that one commit returns to the waiting state
RELEASE_COUNT = 1000  # most lines whose results one commit deletes


class BatchQuestions:
    """Answers the questions of `batch_messages`, and `ListAllBatches` of operators."""

    def __init__(self, outbox: Outbox, batches: Batches, policy: Callable[[], JobPolicy]) -> None:
        """`policy` returns the present settings."""
        self._outbox = outbox
        self._batches = batches
        self._policy = policy

    def on_asked(
        self,
        event: ev.QuestionAsked,
        message: messages.Question | job_operations.ListAllBatches,
        now: float,
    ) -> None:
        """Answers a question. Raises PoolError if it is refused before the store is asked."""
        if isinstance(message, SubmitBatch):
            self._submit(event, message)
        elif isinstance(message, ListBatches):
            self._list(event, message)
        elif isinstance(message, job_operations.ListAllBatches):
            self._list_all(event, message)
        elif isinstance(message, WaitForProgress):
            self._wait(event, message, now)
        elif isinstance(message, ReadOutcomes):
            self._results(event, message)
        else:
            ABOUT[message.kind](self, event, message)

    def _fail(self, event: ev.QuestionAsked, error: PoolError) -> None:
        self._outbox.refuse(event, error)

    def _show(self, event: ev.QuestionAsked, batch: BatchView) -> None:
        self._outbox.send(event.link, self._batches.row(batch), event.id, event.attempt)

    # ---- submit ----------------------------------------------------------------------------------

    def _submit(self, event: ev.QuestionAsked, message: SubmitBatch) -> None:
        policy = self._policy()
        if policy.quota_jobs and message.lines > policy.quota_jobs:
            raise OverQuota(
                f"the batch has {message.lines} lines; an owner may have {policy.quota_jobs} jobs"
                " (quota_jobs): divide it",
                details={"value": message.lines, "bound": policy.quota_jobs},
            )
        name, deadline_ms = message.name, message.deadline_ms
        try:
            notify = policy.told(message.notify)
        except PoolError as error:
            self._refuse_unless_known(event, message, error)
            return
        operation = store.SubmitBatch(
            event.new_id,
            _scope(event, name),
            batch_digest(message),
            file_id(event.owner, name.tenant, message.file),
            BatchSettings.of(message).packed(),
            deadline=None if deadline_ms is None else deadline_ms / 1000,
            keep=policy.kept(message.keep_ms),
            notify=notify,
            max_live=MAX_LIVE,
        )

        def then(result: BatchSubmitted, now: float) -> None:
            self._batches.see(result.batch, now)
            self._show(event, result.batch)

        self._outbox.ask(event, operation, BatchSubmitted, then, partial(_submit_error, message))

    def _refuse_unless_known(
        self, event: ev.QuestionAsked, message: SubmitBatch, error: PoolError
    ) -> None:
        """Refuses a submission with `error`, unless an equal earlier submission has made a batch.

        Then answers with that batch.
        """

        def then(result: Result, now: float) -> None:
            known = isinstance(result, BatchView) and result.digest == batch_digest(message)
            if isinstance(result, BatchView) and known and result.state is not BatchState.GONE:
                self._show(event, result)
            else:
                self._fail(event, error)

        self._outbox.store(store.ReadBatch(_scope(event, message.name)), then)

    # ---- reading ---------------------------------------------------------------------------------

    def _list(self, event: ev.QuestionAsked, message: ListBatches) -> None:
        def read(behind: Place | None) -> None:
            operation = store.ListBatches(
                event.owner, message.tenant, count=message.limit, behind=behind
            )
            error = partial(_error, KeyName("", message.tenant))
            self._outbox.ask(event, operation, BatchList, then, error)

        def list_after(batch: BatchView, now: float) -> None:
            read((batch.created, batch.id))

        def then(result: BatchList, now: float) -> None:
            rows = [self._batches.row(batch).body() for batch in result.batches]
            shown = answers.fitting(rows)
            more = result.more or len(shown) < len(rows)
            listed = messages.BatchList(shown, shown[-1]["key"] if more and shown else "")
            self._outbox.send(event.link, listed, event.id, event.attempt)

        if message.before:
            self._read(event, KeyName(message.before, message.tenant), list_after)
        else:
            read(None if message.older is None else (message.older, b""))

    def _list_all(self, event: ev.QuestionAsked, question: job_operations.ListAllBatches) -> None:
        """Answers an operator with the batches of one owner or of all."""

        def then(result: BatchList, now: float) -> None:
            rows = [_with_owner(self._batches.row(batch), batch) for batch in result.batches]
            shown = answers.fitting(rows)
            last = result.batches[len(shown) - 1] if shown else None
            more = result.more or len(shown) < len(rows)
            following = None
            if last is not None and more:
                following = job_operations.BatchPlace(last.created, last.id).body()
            answer = job_operations.Told({"batches": shown, "next": following})
            self._outbox.send(event.link, answer, event.id, event.attempt)

        behind = question.behind
        place = None if behind is None else (behind.created, behind.batch)
        operation = store.ListBatches(question.owner, count=question.limit, behind=place)
        self._outbox.ask(event, operation, BatchList, then, partial(_error, KeyName("")))

    def _wait(self, event: ev.QuestionAsked, message: WaitForProgress, now: float) -> None:
        watcher = Watcher(event, message.seen, now + message.wait_ms / 1000)
        self._read(event, message.name, lambda batch, now: self._batches.watch(batch, watcher, now))

    def _read(
        self, event: ev.QuestionAsked, name: KeyName, then: Callable[[BatchView, float], None]
    ) -> None:
        operation = store.ReadBatch(_scope(event, name))
        self._outbox.ask(event, operation, BatchView, then, partial(_error, name))

    def _results(self, event: ev.QuestionAsked, message: ReadOutcomes) -> None:
        operation = store.ReadOutcomes(
            _scope(event, message.name), message.after, message.limit, max_bytes=PAGE_BYTES
        )

        def then(result: LineOutcomes, now: float) -> None:
            rows = [row for row in map(outcome_row, result.outcomes) if row is not None]
            answer = messages.Outcomes(result.next, pack(rows))
            self._outbox.send(event.link, answer, event.id, event.attempt)

        self._outbox.ask(event, operation, LineOutcomes, then, partial(_error, message.name))

    # ---- changes ---------------------------------------------------------------------------------

    def _about(self, event: ev.QuestionAsked, message: AboutBatch) -> None:
        self._read(event, message.name, lambda batch, now: self._show(event, batch))

    def _cancel(self, event: ev.QuestionAsked, message: AboutBatch) -> None:
        def then(result: BatchChanged, now: float) -> None:
            self._batches.changed(result, now)
            self._show(event, result.batch)

        operation = store.CancelBatch(_scope(event, message.name), end=CANCELLED_END)
        self._outbox.ask(event, operation, BatchChanged, then, partial(_error, message.name))

    def _retry(self, event: ev.QuestionAsked, message: AboutBatch) -> None:
        operation = store.RetryBatch(_scope(event, message.name), RETRY_COUNT)

        def then(result: BatchChanged, now: float) -> None:
            state = result.batch.state
            if state in (BatchState.CANCELLED, BatchState.GONE):
                self._fail(event, _closed(message.name, state))
                return
            for job in result.jobs:
                self._outbox.perform(Quarantine(job.digest, 0.0))
            self._batches.changed(result, now)
            if len(result.jobs) == RETRY_COUNT:
                self._retry(event, message)
            else:
                self._show(event, result.batch)

        self._outbox.ask(event, operation, BatchChanged, then, partial(_error, message.name))

    def _release(self, event: ev.QuestionAsked, message: AboutBatch) -> None:
        def then(batch: BatchView, now: float) -> None:
            if batch.live:
                self._fail(event, _not_ended(message.name))
            else:
                self._show(event, batch)

        operation = store.ReleaseBatch(_scope(event, message.name))
        self._outbox.ask(event, operation, BatchView, then, partial(_error, message.name))

    def _release_results(self, event: ev.QuestionAsked, message: AboutBatch) -> None:
        """Deletes results of an ended batch, then answers with the batch.

        `message.only` names the results to delete: those of the done lines, or those of all other
        lines.
        """

        def then(result: BatchChanged, now: float) -> None:
            if result.batch.live:
                self._fail(event, _not_ended(message.name))
            elif result.batch.state is BatchState.GONE:
                self._fail(event, _closed(message.name, result.batch.state))
            elif len(result.jobs) == RELEASE_COUNT:
                self._release_results(event, message)
            else:
                self._show(event, result.batch)

        scope, outcomes = _scope(event, message.name), RELEASED[message.only]
        operation = store.ReleaseOutcomes(scope, outcomes, RELEASE_COUNT)
        self._outbox.ask(event, operation, BatchChanged, then, partial(_error, message.name))


ABOUT: Mapping[str, Callable[[BatchQuestions, ev.QuestionAsked, AboutBatch], None]] = {
    messages.READ: BatchQuestions._about,
    messages.CANCEL: BatchQuestions._cancel,
    messages.RETRY: BatchQuestions._retry,
    messages.RELEASE: BatchQuestions._release,
    messages.RELEASE_RESULTS: BatchQuestions._release_results,
}
PAGE_BYTES = 256 * 1024  # most bytes of outcomes in one answer; a single outcome may exceed it


def _with_owner(row: messages.BatchRow, batch: BatchView) -> dict[str, Any]:
    """Returns the map of a batch for operators, with the batch's owner and tenant."""
    return {**row.body(), "owner": batch.scope.owner, "tenant": batch.scope.tenant}


def _scope(event: ev.QuestionAsked, name: KeyName) -> Scope:
    return Scope(event.owner, name.tenant, name.key)


def _submit_error(message: SubmitBatch, result: Result) -> PoolError:
    name, file = message.name, message.file
    if isinstance(result, DuplicateKey):
        return DuplicateId(
            f"the key {name} is that of another batch ({result.id.hex()}); take another key for"
            " another file"
        )
    if isinstance(result, KeyGone):
        why = f"the results of the batch {name} were deleted"
        return Gone(f"{why}; take another key to compute it again")
    if isinstance(result, FileView):
        why = f"the file {file!r} has {result.size} bytes and is not complete"
        return BadRequest(f"{why}; send its last part first")
    if isinstance(result, UnknownName):
        return UnknownJob(f"there is no file {file!r} of this owner; send it with file_put first")
    return _error(name, result)


def _not_ended(name: KeyName) -> BadRequest:
    return BadRequest(f"the batch {name} has not ended; cancel it first")


def _closed(name: KeyName, state: BatchState) -> PoolError:
    if state is BatchState.GONE:
        return Gone(f"the results of the batch {name} were deleted")
    return BadRequest(f"the batch {name} was cancelled; submit it again under another key")


def _error(name: KeyName, result: Result) -> PoolError:
    if isinstance(result, UnknownName):
        return UnknownJob(f"there is no batch {name} of this owner")
    return answers.unexpected(result)
