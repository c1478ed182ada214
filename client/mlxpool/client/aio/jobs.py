"""The methods of an asyncio client for jobs and batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import mlxpool.client.jobs as jobs
from mlxpool.client.aio.batch import AsyncBatch
from mlxpool.client.aio.calls import AsyncCaller
from mlxpool.client.aio.stream import AsyncStream
from mlxpool.client.batches import steps
from mlxpool.client.batches.files import FilePages, delete
from mlxpool.client.batches.source import Lines
from mlxpool.client.batches.steps import submission
from mlxpool.client.jobs import BatchOptions, CallOptions, Job, JobRef, SubmitOptions, SubmittedJob
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import Image, Question
from mlxpool.common.protocol.kept.batch_messages import READ as READ_BATCH
from mlxpool.common.protocol.kept.job_messages import READ, RELEASE, RETRY

Answer = TypeVar("Answer")


class AsyncJobMethods:
    """The methods of `AsyncClient` for requests that continue without the client."""

    _caller: AsyncCaller
    _connection: AnyConnection

    async def ask(self, question: Question[Answer]) -> Answer:
        """Returns the answer to a call of the protocol. Raises PoolError."""
        return await self._caller.call(question)

    async def submit(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[SubmitOptions],
    ) -> Job:
        """Submits a completion as a job; see `Client.submit`."""
        question = jobs.submit(model, prompt, messages, tokens, images, options)
        return await self._caller.call(question)

    async def submit_call(
        self,
        kind: str,
        model: str,
        **options: Unpack[CallOptions],
    ) -> Job:
        """Submits a call as a job; see `Client.submit_call`."""
        return await self._caller.call(jobs.submit_call(kind, model, options))

    def fetch(
        self, job: JobRef, start: int = 0, gen: int | None = None, *, steps: bool = False
    ) -> AsyncStream:
        """Reads a job; see `Client.fetch`."""
        return AsyncStream(self._connection, jobs.fetch(job, start, gen, steps))

    async def jobs(
        self,
        *,
        after: int | None = None,
        before: int = 0,
        state: str = "",
        limit: int = 0,
        batch: str = "",
    ) -> list[dict[str, Any]]:
        """Returns the jobs of this user; see `Client.jobs`."""
        pages = jobs.Pages(after, state, limit, batch, before)
        while not pages.complete:
            pages.add(await self._caller.call(pages.question()))
        return pages.rows

    async def follow_jobs(
        self, after: int = 0, *, interval: float = 1.0
    ) -> AsyncIterator[dict[str, Any]]:
        """Yields the ended jobs of this user, without end; see `Client.follow_jobs`."""
        while True:
            for row in await self.jobs(after=after):
                after = row["end_seq"]
                yield row
            await asyncio.sleep(interval)

    async def job(self, job: JobRef) -> dict[str, Any]:
        """Returns the map of one job; see `Client.job`."""
        return await self._caller.call(jobs.about(READ, job))

    async def submitted(self, job: JobRef) -> SubmittedJob:
        """Returns a job with its submitted request; see `Client.submitted`."""
        return await self._caller.call(jobs.submitted(job))

    async def retry(self, job: JobRef) -> dict[str, Any]:
        """Retries a dead or expired job; see `Client.retry`."""
        return await self._caller.call(jobs.about(RETRY, job))

    async def release(self, job: JobRef) -> dict[str, Any]:
        """Deletes the result of an ended job; see `Client.release`."""
        return await self._caller.call(jobs.about(RELEASE, job))

    async def cancel(
        self, request: bytes | Job | None = None, *, key: str | None = None
    ) -> dict[str, Any]:
        """Cancels a request or a job; see `Client.cancel`."""
        return await self._caller.call(jobs.cancel_request(request, key))

    async def submit_batch(
        self,
        lines: Lines,
        model: str | None = None,
        **options: Unpack[BatchOptions],
    ) -> AsyncBatch:
        """Submits each line of a file as a job; see `Client.submit_batch`.

        A thread reads and checks the lines.
        """
        sending = submission(lines, model, options)
        return AsyncBatch(self._caller, await self._caller.run(sending))

    async def batch(self, key: str) -> AsyncBatch:
        """Returns the batch with a key. Raises UnknownJob."""
        row = await self._caller.call(steps.about(READ_BATCH, key))
        return AsyncBatch(self._caller, row)

    async def batches(self, *, limit: int = 0) -> list[dict[str, Any]]:
        """Returns the batches of this user; see `Client.batches`."""
        pages = steps.BatchPages(limit)
        while not pages.complete:
            pages.add(await self._caller.call(pages.question()))
        return pages.rows

    async def files(
        self, *, purpose: str = "", limit: int = 0, oldest_first: bool = False
    ) -> list[dict[str, Any]]:
        """Returns the files of this user; see `Client.files`."""
        pages = FilePages(limit, purpose, oldest_first=oldest_first)
        while not pages.complete:
            pages.add(await self._caller.call(pages.question()))
        return pages.rows

    async def delete_file(self, key: str) -> dict[str, Any]:
        """Deletes a file; see `Client.delete_file`."""
        return await self._caller.call(delete(key))
