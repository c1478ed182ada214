"""What a blocking client can do with jobs and batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import mlxpool.client.jobs as jobs
from mlxpool.client.batches import steps
from mlxpool.client.batches.files import FilePages, delete
from mlxpool.client.batches.settings import submission
from mlxpool.client.batches.source import Lines
from mlxpool.client.images import Image
from mlxpool.client.job_options import BatchOptions, CallOptions, SubmitOptions
from mlxpool.client.jobs import Job, JobRef, SubmittedJob
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import Question
from mlxpool.client.sync.batch import Batch
from mlxpool.client.sync.calls import Caller
from mlxpool.client.sync.stream import Stream
from mlxpool.common.closing import Closing
from mlxpool.common.protocol.kept.batch_messages import READ as READ_BATCH
from mlxpool.common.protocol.kept.job_messages import READ, RELEASE, RETRY

Answer = TypeVar("Answer")


class JobMethods(Closing):
    """The methods of `Client` about requests that outlive it."""

    _caller: Caller
    _connection: AnyConnection

    def ask(self, question: Question[Answer]) -> Answer:
        """The answer to a question of the protocol. Raises PoolError."""
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
        """Have a completion made, whoever is there to read it; returns when it is on the disk.

        From then on neither the end of this program, of a worker, of the broker nor of the machine
        loses it. `key` names the job (default: a new one): submitting the same request with the
        same key again is the same job, so a program that does not know whether it has submitted one
        may do it again. `keep` is for how many seconds the result stays after the end (default: as
        the pool's settings say), `not_before` a time as of `time.time()`, `notify` the URL to which
        its end is posted (docs/jobs.md). The other arguments are those of `stream`, without those
        of the reading: `queue_ms`, `first_token_ms`, `window`, `batch`, `durable`. A job has no
        deadline unless `deadline_ms` gives one; `priority=-1` is for what may wait until nothing
        else does. `note` is up to 64 KiB of the program's own that `submitted` returns. Raises
        JobsOff for a pool that keeps none, DuplicateId for a key of another request, Gone for
        one whose result was deleted, StoreFull, and what `stream` raises.
        """
        question = jobs.submit(model, prompt, messages, tokens, images, options)
        return self._caller.call(question)

    def submit_call(
        self,
        kind: str,
        model: str,
        **options: Unpack[CallOptions],
    ) -> Job:
        """Have a call answered, whoever is there to read it; returns when it is on the disk.

        `kind` is embed, rerank, classify or decide, and the options are the keys of such a call
        (docs/protocol.md): `inputs` or `tokens`, `query` and `documents`, `prompt` and `questions`
        and so on, at most 256 texts. The answer is read by `Vectors.of` or `DecisionList.of` of
        `fetch(job).read()`. The other options are those of `submit`, and it raises the same.
        """
        return self._caller.call(jobs.submit_call(kind, model, options))

    def fetch(
        self, job: JobRef, start: int = 0, gen: int | None = None, *, steps: bool = False
    ) -> Stream:
        """Read a job, its key or its id: a stream of its ids from the one with the index `start`.

        It may be running, waiting or done, and read by others too. The stream goes on after the
        loss of its connection or broker, and leaving it does not cancel the job. With a `start`
        above 0 name the generation that the ids before it are of (`Job.gen`): if the job was begun
        anew since, because its model had changed, JobRestarted is raised. The first delta may begin
        before `start`, at the border of a step. The errors of the job are raised where the stream
        is read; UnknownJob if there is none of this user.
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
        """The jobs of this user, each a map: job, key, state, … (docs/protocol.md, `jobs`).

        The newest first, of one `state` or of all; `limit` 0: all. With `after` those that ended
        since, in the order of their ends: pass the last `end_seq` that was seen, 0 at first, and
        no end is missed. `batch` is the key of a batch of whose lines the jobs are listed.
        """
        pages = jobs.Pages(after, state, limit, batch, before)
        while not pages.complete:
            pages.add(self._caller.call(pages.question()))
        return pages.rows

    def follow_jobs(self, after: int = 0, *, interval: float = 1.0) -> Iterator[dict[str, Any]]:
        """Each job of this user that ended after the end with this number, and each that will end.

        The maps come in the order of the ends, without end: keep the last `end_seq`, and pass it
        to go on there, in another program too. `interval`: seconds between two looks.
        """
        while True:
            for row in self.jobs(after=after):
                after = row["end_seq"]
                yield row
            time.sleep(interval)

    def job(self, job: JobRef) -> dict[str, Any]:
        """The map of one job; `failures` are what went wrong with it. Raises UnknownJob."""
        return self._caller.call(jobs.about(READ, job))

    def submitted(self, job: JobRef) -> SubmittedJob:
        """A job with what was submitted and its note. Raises UnknownJob, and Gone."""
        return self._caller.call(jobs.submitted(job))

    def retry(self, job: JobRef) -> dict[str, Any]:
        """Let a job that is dead or expired be tried again, from the ids that it has."""
        return self._caller.call(jobs.about(RETRY, job))

    def release(self, job: JobRef) -> dict[str, Any]:
        """Delete the result of a job that has ended; its key answers Gone for some time.

        The notice of its end is delivered all the same, and says how it ended: `notice` of the map
        is `waiting` until then.
        """
        return self._caller.call(jobs.about(RELEASE, job))

    def cancel(
        self, request: bytes | Job | None = None, *, key: str | None = None
    ) -> dict[str, Any]:
        """Cancel any request of this owner by its id, 16 bytes, or a job, also by its `key`.

        Returns {state, pos}: the state that it was in (`unknown` if there is none with this id) and
        the number of token ids sent. Raises BadRequest for an invalid id, UnknownJob for a key that
        names no job.
        """
        return self._caller.call(jobs.cancel_request(request, key))

    def submit_batch(
        self,
        lines: Lines,
        model: str | None = None,
        **options: Unpack[BatchOptions],
    ) -> Batch:
        """Have every line of a file become a job; returns when all of it is on the disk.

        `lines` is the path of a file of JSON lines, or lines as maps or as JSON. A line has the
        keys of a `generate` (docs/protocol.md): `prompt`, `messages` or `tokens`, `options`, and an
        `id` of its own. `model` and the options hold for lines that do not say otherwise. `key`
        names the batch (default: a new one): a program that ended while it was sending sends the
        same with the same key, and nothing is taken twice. `deadline`: seconds after which what is
        not done expires; `keep`: seconds for which the results stay after the end of the batch;
        `priority` is that of all lines. `metadata` is a map of your own. `notify` is the URL to
        which the end of the batch is posted (docs/jobs.md). Every line is checked before it is
        sent, and the first bad one raises BadRequest with its number; with check=False bad lines
        are listed as failed. `on_sent` gets the bytes that were sent so far. Raises JobsOff,
        DuplicateId for a key of another file, Gone, StoreFull, OverQuota, OSError.
        """
        sending = submission(lines, model, options)
        return Batch(self._caller, self._caller.run(sending))

    def batch(self, key: str) -> Batch:
        """A batch by its key. Raises UnknownJob."""
        row = self._caller.call(steps.about(READ_BATCH, key))
        return Batch(self._caller, row)

    def batches(self, *, limit: int = 0) -> list[dict[str, Any]]:
        """The batches of this user, the newest first; `limit` 0: all.

        Each is a map: key, state, lines, done, … (docs/protocol.md, `batch`).
        """
        pages = steps.BatchPages(limit)
        while not pages.complete:
            pages.add(self._caller.call(pages.question()))
        return pages.rows

    def files(
        self, *, purpose: str = "", limit: int = 0, oldest_first: bool = False
    ) -> list[dict[str, Any]]:
        """The files of this user, the newest first or the oldest; `limit` 0: all.

        They are what batches are made of: each is a map with key, name, purpose, size, … as
        docs/protocol.md has it at `file`. `purpose`: only those that were sent with it, such as
        "batch", uploads of OpenAI's interface.
        """
        pages = FilePages(limit, purpose, oldest_first=oldest_first)
        while not pages.complete:
            pages.add(self._caller.call(pages.question()))
        return pages.rows

    def delete_file(self, key: str) -> dict[str, Any]:
        """Delete a file; returns the map that it had.

        Raises UnknownJob if there is none, BadRequest while an open batch reads it.
        """
        return self._caller.call(delete(key))
