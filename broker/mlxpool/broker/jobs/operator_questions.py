"""Answers operators' questions about a job with its failures, notices, exports, checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxpool.broker.jobs import answers
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Outbox
from mlxpool.broker.jobs.answers import terminal_of
from mlxpool.broker.store import operations as store
from mlxpool.broker.store.records import (
    Cursor,
    Export,
    ExportedJob,
    History,
    JobState,
    JobView,
    Notices,
    Page,
    Refused,
    Result,
    Verified,
)
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.frames import unpack
from mlxpool.common.protocol.kept import job_operations
from mlxpool.common.protocol.kept.job_messages import AboutJob
from mlxpool.common.protocol.to_client import Done
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.common.records import as_map

SHOWN_IDS = 2000  # most token ids of a job's output in one answer, the last ones
PAGE_BYTES = 64 * 1024


class OperatorQuestions:
    """Answers the questions that only operators ask, each exactly once.

    `Questions` answers requests to change jobs, also those of operators.
    """

    def __init__(self, outbox: Outbox, row: Callable[[JobView], dict[str, Any]]) -> None:
        """`row` returns the map of a job with its owner."""
        self._outbox = outbox
        self._row = row

    def on_asked(self, event: ev.QuestionAsked, question: object) -> bool:
        """Answers a question that only operators ask. Returns False if clients may ask it too."""
        if isinstance(question, job_operations.ListNotices):
            self._notices(event, question)
        elif isinstance(question, job_operations.ExportJobs):
            self._export(event, question)
        elif isinstance(question, job_operations.VerifyJobs):
            self._verify(event, question)
        elif isinstance(question, AboutJob) and question.kind == "job":
            self._look(event, question)
        else:
            return False
        return True

    def _tell(self, event: ev.QuestionAsked, row: dict[str, Any]) -> None:
        self._outbox.send(event.link, job_operations.Told(row), event.id, event.attempt)

    # ---- one job -------------------------------------------------------------------------------

    def _look(self, event: ev.QuestionAsked, question: AboutJob) -> None:
        """Answers with a job, its failures, and the end of its text."""

        def then(history: History, now: float) -> None:
            self._look_at_text(event, history)

        def missing(result: Result) -> PoolError:
            known = isinstance(result, Refused)
            return answers.unexpected(result) if known else answers.unknown(question.name)

        name = answers.name_of(event.owner, question.name)
        self._outbox.ask(event, store.ReadHistory(name), History, then, missing)

    def _look_at_text(self, event: ev.QuestionAsked, history: History) -> None:
        job = history.job
        row = {**self._row(job), "failures": [as_map(failure) for failure in history.failures]}

        def then(result: Result, now: float) -> None:
            if isinstance(result, Page):
                start = result.chunks[0].pos if result.chunks else result.job.pos
                text = "".join(chunk.text for chunk in result.chunks)
                terminal = None if result.job.end is None else terminal_of(result.job.end)
                text += terminal.text if isinstance(terminal, Done) else ""
                self._tell(event, {**row, "text": text, "text_from": start})
            else:
                why = result.message if isinstance(result, Refused) else ""
                self._tell(event, {**row, "text": "", "text_from": 0, "damaged": why})

        page = store.FetchPage(job.id, max(0, job.pos - SHOWN_IDS), max_bytes=PAGE_BYTES)
        self._outbox.store(page, then)

    # ---- notices -------------------------------------------------------------------------------

    def _notices(self, event: ev.QuestionAsked, question: job_operations.ListNotices) -> None:
        def then(result: Notices, now: float) -> None:
            rows = [
                {
                    notice.kind: notice.subject,
                    "owner": notice.scope.owner,
                    "tenant": notice.scope.tenant,
                    "key": notice.scope.key,
                    "url": notice.url,
                    "end_seq": notice.end_seq,
                    "since": notice.since,
                    "tries": notice.tries,
                    "due": notice.due,
                    "given_up": notice.given_up,
                    "cause": notice.cause,
                }
                for notice in result.notices
            ]
            full = len(rows) == question.limit
            self._tell(event, {"notices": rows, "next": rows[-1]["end_seq"] if full else 0})

        listed = store.ListNotices(question.owner, question.after, question.limit)
        self._outbox.ask(event, listed, Notices, then)

    # ---- copies --------------------------------------------------------------------------------

    def _export(self, event: ev.QuestionAsked, question: job_operations.ExportJobs) -> None:
        def then(result: Export, now: float) -> None:
            items = [item for job in result.jobs for item in items_of(job, self._row(job.job))]
            following = None if result.next is None else as_map(result.next)
            exported = job_operations.Exported(items, following)
            self._outbox.send(event.link, exported, event.id, event.attempt)

        states = tuple(map(JobState, question.states))
        cursor = Cursor(question.seq, question.gen, question.part, question.pos)
        self._outbox.ask(event, store.ExportJobs(cursor, states=states), Export, then)

    def _verify(self, event: ev.QuestionAsked, question: job_operations.VerifyJobs) -> None:
        def then(result: Verified, now: float) -> None:
            damaged = [{**self._row(job), "damaged": what} for job, what in result.damaged]
            self._tell(
                event,
                {
                    "checked": result.checked,
                    "bytes": result.bytes,
                    "damaged": damaged,
                    "next": result.next,
                },
            )

        self._outbox.ask(event, store.VerifyJobs(question.after), Verified, then)


def items_of(exported: ExportedJob, row: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Returns the items of a job's export: the job, its blobs and its output.

    The job itself is left out if an earlier page has it.
    """
    job, items = exported.job, list[dict[str, Any]]()
    if exported.request is not None:
        terminal = None if job.end is None else terminal_of(job.end)
        end = None if terminal is None else {"kind": terminal.kind, **terminal.body()}
        head = {
            **row,
            "seed": job.seed,
            "request": unpack(exported.request) if exported.request else None,
            "end": end,
            "notify": job.notify,
        }
        items.append({"job": {**head, "damaged": list(exported.damaged)}})
    items += [
        {"blob": {"job": job.id, "place": place, "data": data}} for place, data in exported.blobs
    ]
    items += [
        {"answer": {"job": job.id, "place": place, "data": data}} for place, data in exported.answer
    ]
    for chunk in exported.chunks:
        output: dict[str, Any] = {
            "job": job.id,
            "gen": job.gen,
            "from": chunk.pos,
            "ids": list(unpack_ids(chunk.ids)),
            "text": chunk.text,
        }
        if chunk.logprobs:
            output["logprobs"] = unpack(chunk.logprobs)
        items.append({"output": output})
    if exported.request is None and exported.damaged:
        items.append({"damaged": {"job": job.id, "what": list(exported.damaged)}})
    return items


def with_owner(row: dict[str, Any], job: JobView) -> dict[str, Any]:
    """Returns the map of a job for operators, with the job's owner and tenant."""
    return {
        **row,
        "owner": job.scope.owner,
        "tenant": job.scope.tenant,
        "starts": job.starts,
        "charge": job.charge,
        "batch": job.batch,
        "notify": job.notify,
    }
