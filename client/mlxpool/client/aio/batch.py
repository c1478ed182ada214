"""One batch, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import mlxpool.client.jobs as jobs
from mlxpool.client.aio.calls import AsyncCaller
from mlxpool.client.aio.stream import AsyncStream
from mlxpool.client.batches import steps
from mlxpool.client.batches.outcome import LineResult, is_too_long, line_result
from mlxpool.client.stream import Result
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.kept.batch_messages import CANCEL, READ, RELEASE, RETRY


class AsyncBatch:
    """A batch in the pool, with the same members as `Batch`.

    `progress` and `results` are asynchronous iterators; the other methods are coroutines.
    """

    def __init__(self, caller: AsyncCaller, row: Mapping[str, Any]) -> None:
        self._caller = caller
        self.key: str = row["key"]
        self.row = dict(row)

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the present map of the batch, and its map after each change.

        See `Batch.progress`.
        """
        seen = ""
        while True:
            self.row = await self._caller.run(steps.progress(self.key, seen))
            yield self.row
            if steps.is_over(self.row):
                return
            seen = self.row["mark"]

    async def wait(self) -> dict[str, Any]:
        """Waits until the batch has ended. Returns the batch's map, `row`."""
        async for _ in self.progress():
            pass
        return self.row

    async def results(self, *, wait: bool = True, after: int = -1) -> AsyncIterator[LineResult]:
        """Yields the outcome of each line, in the order of the file; see `Batch.results`."""
        if wait:
            await self.wait()
        while True:
            page = await self._caller.run(steps.page(self.key, after))
            for row in page.rows:
                yield line_result(row, await self._whole(row) if is_too_long(row) else None)
            if page.next < 0:
                return
            after = page.next

    async def _whole(self, row: Mapping[str, Any]) -> Result | PoolError:
        """Fetches a line's job alone, because its output is too long for a page of results.

        Returns the job's result or its error. Raises PoolError if the job cannot be read now.
        """
        try:
            reading = jobs.fetch(row["job"], 0, None)
            async with AsyncStream(self._caller.connection, reading) as stream:
                return await stream.read()
        except PoolError as error:
            if error.code in jobs.READING_CODES:
                raise  # the read failed, not the job
            return error

    async def refresh(self) -> dict[str, Any]:
        """Returns the present map of the batch."""
        return await self._about(READ)

    async def cancel(self) -> dict[str, Any]:
        """Ends the batch; see `Batch.cancel`."""
        return await self._about(CANCEL)

    async def retry(self) -> dict[str, Any]:
        """Retries the dead and expired lines."""
        return await self._about(RETRY)

    async def release(self) -> dict[str, Any]:
        """Deletes the results of an ended batch; see `Batch.release`."""
        return await self._about(RELEASE)

    async def _about(self, kind: str) -> dict[str, Any]:
        self.row = await self._caller.call(steps.about(kind, self.key))
        return self.row
