"""The methods of a blocking client for jobs and batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import mlxpool.client.jobs as jobs
from mlxpool.client.batches import steps
from mlxpool.client.batches.files import FilePages, delete
from mlxpool.client.batches.source import Lines
from mlxpool.client.batches.steps import submission
from mlxpool.client.jobs import BatchOptions, CallOptions, Job, JobRef, SubmitOptions, SubmittedJob
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import Image, Question
from mlxpool.client.sync.batch import Batch
from mlxpool.client.sync.calls import Caller
from mlxpool.client.sync.stream import Stream
from mlxpool.common.closing import Closing
from mlxpool.common.protocol.kept.batch_messages import READ as READ_BATCH
from mlxpool.common.protocol.kept.job_messages import READ, RELEASE, RETRY

Answer = TypeVar("Answer")


class JobMethods(Closing):
    """The methods of `Client` for requests that continue without the client."""

    _caller: Caller
    _connection: AnyConnection

    def ask(self, question: Question[Answer]) -> Answer:
        """Returns the answer to a call of the protocol. Raises PoolError."""
        return self._caller.call(question)

    def submit(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[SubmitOptions],
    ) -> Job:
        """Submits a completion as a job. Returns when the job is on the disk.

        The job continues after the end of this program, of a worker, of the broker or of the
        machine. A second submission of the same request with the same `key` returns the same job,
        so a program may repeat a submission. The arguments are those of `stream`, and the options
        of jobs. Raises JobsOff if the pool keeps no jobs, DuplicateId if another request has the
        key, Gone if the key's result was deleted, StoreFull, and the errors of `stream`.
        """
        question = jobs.submit(model, prompt, messages, tokens, images, options)
        return self._caller.call(question)

    def submit_call(
        self,
        kind: str,
        model: str,
        **options: Unpack[CallOptions],
    ) -> Job:
        """Submits a call as a job. Returns when the job is on the disk.

        `kind` is embed, rerank, classify or decide; the options are the keys of such a call, with
        at most 256 texts. To read the answer, pass the result `fetch(job).read()` to `Vectors.of`
        or `DecisionList.of`. Raises the errors of `submit`.
        """
        return self._caller.call(jobs.submit_call(kind, model, options))

    def fetch(
        self, job: JobRef, start: int = 0, gen: int | None = None, *, steps: bool = False
    ) -> Stream:
        """Reads a job: a stream of its token ids from index `start`.

        The job may be waiting, running or done; several readers may read it. The stream survives
        the loss of its connection or broker. The end of the stream does not cancel the job. If
        `start` is above 0, pass the `gen` (`Job.gen`, `Stream.gen`) with which the ids before it
        were read: JobRestarted is raised if the job has begun anew since then, because its model
        has changed. The first delta may begin before `start`, at the beginning of a step. With
        `steps`, each delta also has a field `steps`: one pair (ids, characters) for each step of
        the model, counted from the start of the delta to the end of the step. A pair (0, 0) marks a
        retry of the job after an error. The reader raises the errors of the job, and UnknownJob if
        there is no such job.
        """
        return Stream(self._connection, jobs.fetch(job, start, gen, steps))

    def jobs(
        self,
        *,
        after: int | None = None,
        before: int = 0,
        state: str = "",
        limit: int = 0,
        batch: str = "",
    ) -> list[dict[str, Any]]:
        """Returns a map for each of this user's jobs, the newest first (docs/protocol.md, `jobs`).

        `state` selects jobs in this state; `batch` selects the jobs of the lines of this batch;
        `limit` 0 means all. `end_seq` of an ended job is its number in the order of ends. `after`
        selects jobs with a greater `end_seq`, in the order of ends: pass 0 at first, then the last
        `end_seq` of each answer. `before` selects jobs that were submitted before the job with this
        `seq`.
        """
        pages = jobs.Pages(after, state, limit, batch, before)
        while not pages.complete:
            pages.add(self._caller.call(pages.question()))
        return pages.rows

    def follow_jobs(self, after: int = 0, *, interval: float = 1.0) -> Iterator[dict[str, Any]]:
        """Yields this user's jobs as they end, in this order, without end.

        `end_seq` of a job is its number in the order of ends. The first yielded job is the
        first with an `end_seq` above `after`: a program that stored the last `end_seq` can continue
        there. `interval` is the number of seconds between two requests for newly ended jobs.
        """
        while True:
            for row in self.jobs(after=after):
                after = row["end_seq"]
                yield row
            time.sleep(interval)

    def job(self, job: JobRef) -> dict[str, Any]:
        """Returns the map of one job, with its errors in `failures`. Raises UnknownJob."""
        return self._caller.call(jobs.about(READ, job))

    def submitted(self, job: JobRef) -> SubmittedJob:
        """Returns a job with its submitted request and its note. Raises UnknownJob and Gone."""
        return self._caller.call(jobs.submitted(job))

    def retry(self, job: JobRef) -> dict[str, Any]:
        """Retries a dead or expired job, which continues after the token ids that it has."""
        return self._caller.call(jobs.about(RETRY, job))

    def release(self, job: JobRef) -> dict[str, Any]:
        """Deletes the result of an ended job. For some time, calls with its key raise Gone.

        The notice (POST) about its end is still delivered; until then `notice` in the job's map is
        `waiting`.
        """
        return self._caller.call(jobs.about(RELEASE, job))

    def cancel(
        self, request: bytes | Job | None = None, *, key: str | None = None
    ) -> dict[str, Any]:
        """Cancels a request of this owner by its id (16 bytes), or a job by its id or its `key`.

        Returns {state, pos}: the state before the cancel (`unknown` for an unknown id), and the
        number of token ids sent. Raises BadRequest if the id is invalid, UnknownJob if the key is
        unknown.
        """
        return self._caller.call(jobs.cancel_request(request, key))

    def submit_batch(
        self,
        lines: Lines,
        model: str | None = None,
        **options: Unpack[BatchOptions],
    ) -> Batch:
        """Submits each line of a file as a job. Returns when all lines are on the disk.

        `lines` is the path of a file of JSON lines, or an iterable of maps or JSON texts. A line
        has the keys of a `generate` (docs/protocol.md) and may have an `id`. `model` and the
        options are defaults for lines without them. A second submission of the same lines with the
        same `key` adds nothing, so a program may repeat a submission. The first invalid line raises
        BadRequest with its number, unless check=False. Raises JobsOff, DuplicateId if another file
        has the key, Gone, StoreFull, OverQuota, OSError.
        """
        sending = submission(lines, model, options)
        return Batch(self._caller, self._caller.run(sending))

    def batch(self, key: str) -> Batch:
        """Returns the batch with a key. Raises UnknownJob."""
        row = self._caller.call(steps.about(READ_BATCH, key))
        return Batch(self._caller, row)

    def batches(self, *, limit: int = 0) -> list[dict[str, Any]]:
        """Returns a map for each of this user's batches, newest first (docs/protocol.md, `batch`).

        `limit` 0 means all.
        """
        pages = steps.BatchPages(limit)
        while not pages.complete:
            pages.add(self._caller.call(pages.question()))
        return pages.rows

    def files(
        self, *, purpose: str = "", limit: int = 0, oldest_first: bool = False
    ) -> list[dict[str, Any]]:
        """Returns a map for each of this user's files, the newest first (docs/protocol.md, `file`).

        `purpose` selects files with this purpose; uploads through OpenAI's API have "batch".
        `limit` 0 means all.
        """
        pages = FilePages(limit, purpose, oldest_first=oldest_first)
        while not pages.complete:
            pages.add(self._caller.call(pages.question()))
        return pages.rows

    def delete_file(self, key: str) -> dict[str, Any]:
        """Deletes a file. Returns its map.

        Raises UnknownJob if the file is unknown, and BadRequest while a batch reads it.
        """
        return self._caller.call(delete(key))
